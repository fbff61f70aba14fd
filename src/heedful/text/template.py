"""Chat templates in processes of their own: `render_template` hands a template to one that is idle.

See heedful/text/template_sandbox.py for what runs there. A process stays for the next template, since its start takes
longer than most conversations; one that was ended for its template's memory or time is replaced when it is needed.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from heedful.text import template_sandbox as sandbox

MAX_TEMPLATE = 200_000  # characters; the longest published templates have about 20,000
MEMORY = 256 * 2**20  # bytes that a template may take
SECONDS = 2.0  # of the processor
MAX_IDLE = 4  # processes that are kept
# What the process inherits: how to find Python's libraries, and what strftime_now depends on. No keys.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME")

_idle: list[subprocess.Popen[bytes]] = []
_lock = threading.Lock()


def render_template(template: str, /, **variables: Any) -> str:
    """Run a chat template in its sandbox. `variables` are what the reference passes: messages, bos_token ..."""
    return render_templates(template, [variables])[0]


def render_templates(template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Run a chat template for each of several conversations, all in one sandbox and within its limits.

    A template that is broken, refuses the conversation or exceeds its limits is a ValueError that says so; variables
    are values that JSON has.
    """
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"the chat template has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}")
    process = _take_process()
    try:
        sandbox.write_message(cast(BinaryIO, process.stdin), {"template": template, "variables": list(variables)})
        reply = sandbox.read_message(cast(BinaryIO, process.stdout))
    except (TypeError, RecursionError) as error:
        _end(process)
        raise ValueError(f"the variables of a chat template must be what JSON has: {error}") from None
    except (EOFError, OSError):
        _end(process)
        limits = f"{SECONDS:g} seconds of the processor and {MEMORY // 2**20} MB"
        raise ValueError(f"the chat template exceeds its limits: {limits}") from None
    except BaseException:  # interrupted between question and answer
        _end(process)
        raise
    _give_back(process)
    if "error" in reply:
        raise ValueError(reply["error"])
    return list(map(str, reply["texts"]))


def _take_process() -> subprocess.Popen[bytes]:
    while True:
        with _lock:
            process = _idle.pop() if _idle else None
        if process is None:
            return _start()
        if process.poll() is None:
            return process
        _end(process)


def _start() -> subprocess.Popen[bytes]:
    """A new process. Not a fork of this one, whose threads (PyTorch's) would not survive in it."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # -P: the script's folder is not searched for modules
    command = [sys.executable, "-P", str(Path(sandbox.__file__)), str(MEMORY), str(SECONDS)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, **pipes)


def _give_back(process: subprocess.Popen[bytes]) -> None:
    with _lock:
        if len(_idle) < MAX_IDLE:
            return _idle.append(process)
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        try:
            cast(BinaryIO, stream).close()
        except OSError:  # what was not sent yet
            pass
    process.wait()


@atexit.register
def end_template_processes() -> None:
    """End the idle processes; the next template starts a new one."""
    with _lock:
        processes, _idle[:] = list(_idle), []
    for process in processes:
        _end(process)


if hasattr(os, "register_at_fork"):  # a fork shares the pipes: the processes are the parent's
    os.register_at_fork(after_in_child=_idle.clear)
