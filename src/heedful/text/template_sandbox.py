"""The process in which chat templates run: a script that reads templates and writes what they render.

A chat template is a program from the internet. Here it runs in Jinja's immutable sandbox, in a process of its own that
the kernel ends where a template takes more than its share of memory or time, whatever operator it spends them on. The
parent (heedful/text/template.py) starts a new one then. Only Jinja is imported, so that the start is quick.

Requests and replies are JSON behind their length (8 bytes): {"template", "variables"} with the variables of several
conversations, and {"texts"} or {"error"}.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import json
import os
import signal
import sys
from typing import Any, BinaryIO

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_OUTPUT = 20_000_000  # characters
MAX_MESSAGE = 2_000  # characters of an error, which a template can write
PATIENCE = 10.0  # seconds by the clock for each of the processor: other processes may be busy


GENERATION_MARKS = ("_generation_begins", "_generation_ends")  # variables of a template


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words: GENERATION_MARKS are written around them,
    nothing if they are not defined."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]).set_lineno(line) for name in GENERATION_MARKS
        )
        return [begin, *body, end]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox.from_string(template)


def render_in_sandbox(template: str, variables: dict[str, Any]) -> str:
    """The text that a template writes; ValueError for one that is broken or refuses the conversation."""
    parts, size = [], 0
    try:
        for part in _compile(template).generate(variables):
            size += len(part)
            if size > MAX_OUTPUT:
                raise jinja2.TemplateError(f"it writes more than {MAX_OUTPUT:,} characters")
            parts.append(part)
    except jinja2.exceptions.SecurityError as error:
        raise ValueError(f"the chat template does what the sandbox forbids: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"the chat template exceeds its limits: {type(error).__name__}") from None
    except Exception as error:
        raise ValueError(f"the chat template could not render this conversation: {error}") from None
    return "".join(parts)


def _limit_memory(n_bytes: int) -> None:
    """Let this process have n_bytes more than it has now, where the system can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="utf-8") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + n_bytes, now + n_bytes))
    except (ImportError, OSError, ValueError):
        pass


def _limit_time(seconds: float) -> None:
    """End this process after so many seconds of the processor; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal is not handled, and so it ends the process
    if seconds:
        faulthandler.dump_traceback_later(PATIENCE * seconds, exit=True)  # a thread in C: needs no interpreter
    else:
        faulthandler.cancel_dump_traceback_later()


def read_message(stream: BinaryIO) -> Any:
    """The next message of a stream; EOFError at its end."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    body = stream.read(int.from_bytes(head))
    return json.loads(body)


def write_message(stream: BinaryIO, value: Any) -> None:
    """Write a message; TypeError for what JSON has no form for."""
    body = json.dumps(value).encode("ascii")
    stream.write(len(body).to_bytes(8) + body)
    stream.flush()


def answer_requests(memory: int, seconds: float) -> None:
    """Answer requests until their end."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this
    _limit_memory(memory)
    while True:
        try:
            request = read_message(requests)
        except EOFError:
            return
        _limit_time(seconds)
        try:
            reply: dict[str, Any] = {
                "texts": [render_in_sandbox(request["template"], variables) for variables in request["variables"]]
            }
        except ValueError as error:
            reply = {"error": str(error)[:MAX_MESSAGE]}
        _limit_time(0)
        write_message(replies, reply)


if __name__ == "__main__":
    answer_requests(int(sys.argv[1]), float(sys.argv[2]))
