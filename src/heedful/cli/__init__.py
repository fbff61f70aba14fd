"""The command line: `heedful COMMAND ...`.

A command is a line in COMMANDS and a module of the same name, with `add_arguments(parser)` and `run(options)`, which
returns the exit code. Only the module of the command that is given is imported, and PyTorch only when it runs, so that
help is instant.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType

from heedful import __version__
from heedful.cli.parser import ArgumentParser

COMMANDS = {  # name: help; in the order of `heedful --help`
    "models": "list the models: what ships with a score each, what was pulled or can be, the families",
    "pull": "fetch a known good model by its short name; without one, list them",
    "info": "what a model is: architecture, parameters, memory, context",
    "generate": "continue a prompt; without one, a loop that asks for prompts",
    "chat": "a conversation with a model, or one answer",
    "translate": "translate texts",
    "classify": "the labels of texts, of pairs of texts, or of images",
    "tag": "the entities of texts: people, places, organizations",
    "answer": "the answer to a question, from a passage",
    "embed": "texts as vectors, and how alike they are",
    "neighbours": "nearest words and analogies (king - man + woman) among a model's embeddings",
    "complete-image": "complete images of which the upper part is given",
    "train": "train a model: from a text file, a folder or a recipe; or go on with a run",
    "estimate": "what a training would cost: parameters, memory, FLOPs, time on this machine",
    "serve": "the playground's page, and OpenAI's and Anthropic's HTTP APIs: chats, completions, embeddings",
    "batch": "a file of requests in OpenAI's batch format, answered at once; here or on a Ray cluster",
    "learn": "lessons on Transformers that run: in the terminal, as notebooks, in the playground",
    "show": "look inside a model: attention, layers, positions; a page or a picture",
    "fill": "what a model puts into a blank, and what that goes with",
    "bias": "what a model makes of groups of people: a report with intervals, as a page",
    "eval": "how good a model is on a task, with confidence intervals; or which of several is better",
    "probe": "which layers of a model know best: words tagged from each",
    "export": "write a model as a folder in the hub's layout",
    "convert": "write pickled weights (.bin) as safetensors, without running what is in them",
    "tokenize": "show the tokens of a text",
    "merges": "byte-pair encoding step by step: every merge and the text after it",
    "train-tokenizer": "train a tokenizer on text files",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what went wrong is one line on stderr, with exit code 2 for a mistake of the user's."""
    write_utf8()
    try:
        return run_command(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, FileNotFoundError) as problem:
        print_line(f"heedful: {problem}")
        return 2
    except RecursionError:
        print_line("heedful: the input is nested too deeply to be read")
        return 2
    except KeyboardInterrupt:
        print_line("")
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        discard_output()
        return 0
    except OSError as problem:  # a full disk, a full stdout, no permission
        discard_output()
        where = f": {problem.filename}" if problem.filename else ""
        print_line(f"heedful: {problem.strerror or problem}{where}")
        return 1


def write_utf8() -> None:
    """Write UTF-8 where Windows would write its code page to a file or pipe, which has few of the characters."""
    for stream in (sys.stdout, sys.stderr):
        if os.name == "nt" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")


def run_command(arguments: Sequence[str]) -> int:
    """Parse the arguments and run their command; all of its output is written when this returns."""
    try:
        command, options = parse_arguments(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = print_warning
            code: int = command.run(options)
            return code
    finally:  # after --help too: what cannot be written fails here, not at exit
        if sys.stdout is not None:
            sys.stdout.flush()


def print_line(text: str) -> None:
    """Print to stderr, if that can be written."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Drop what stdout still has to write: Python would try again at exit, and fail again."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_warning(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
    """A warning as one line on stderr, in place of the line of code that it comes from."""
    print_line(f"heedful: warning: {message}")


def parse_arguments(arguments: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The command's module and its options; exits with usage or help as argparse does."""
    parser = ArgumentParser(
        prog="heedful",
        description="The whole Transformer family: build, train, generate, look inside.",
        epilog="heedful COMMAND --help says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"heedful {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    parsers = {name: commands.add_parser(name, help=about, description=about) for name, about in COMMANDS.items()}
    module: ModuleType | None = None
    if chosen in COMMANDS:
        module = import_module(f"heedful.cli.{chosen.replace('-', '_')}")
        module.add_arguments(parsers[chosen])
    if not arguments:
        parser.print_help()
        raise SystemExit(0)
    if not chosen:
        parser.check_options(arguments)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers[chosen].reject(unknown)
    assert module is not None, "argparse exits unless a command is given"
    return module, options


if __name__ == "__main__":
    sys.exit(main())
