"""The results of a command: a line of text or of JSON for each input, in order, as they come; progress on stderr."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")

DELAY = 2.0  # seconds until the progress bar is shown
LINE_EVERY = 5.0  # seconds between lines where there is no terminal


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="JSON lines: an object for each input, with the input")


def write_results(
    options: argparse.Namespace,
    batches: Iterable[list[str]],
    compute: Callable[[list[str]], Sequence[R]],
    *,
    record: Callable[[R], dict[str, Any]],
    text: Callable[[str, R], str],
    total: int | None = None,
) -> int:
    """Print the result of each input: its `text`, or with --json its `record` beside the input. The exit code.

    An input that the model refuses is told on stderr, and the others go on; the exit code is 2 then.
    """
    number, code = 0, 0
    with progress_bar(total) as advance:
        for batch in batches:
            for given, result in zip(batch, _results(compute, batch), strict=True):
                number += 1
                if isinstance(result, ValueError):
                    if total == 1:
                        raise result
                    code = 2
                    print(f"heedful: input {number}: {result}", file=sys.stderr)
                if options.json:
                    found = {"error": str(result)} if isinstance(result, ValueError) else record(result)
                    print_json({"input": given} | found)
                else:
                    print("" if isinstance(result, ValueError) else text(given, result))
                advance(1)
            sys.stdout.flush()
    return code


def _results(compute: Callable[[list[str]], Sequence[R]], batch: list[str]) -> Iterator[R | ValueError]:
    """The results of a batch; where it fails, of each input alone."""
    try:
        yield from compute(batch)
        return
    except ValueError as problem:
        if len(batch) == 1:
            yield problem
            return
    for given in batch:
        yield from _results(compute, [given])


def print_json(found: dict[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps(found, ensure_ascii=False))


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if it takes longer than DELAY, else where that is no terminal a line every few seconds; call
    what it gives to advance."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = ProgressLines(total)
        yield lines.advance
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Results on the same terminal are printed above the bar; those that go elsewhere are left alone.
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    task = bar.add_task("", total=total)
    timer = threading.Timer(DELAY, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda n: bar.advance(task, n)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


class ProgressLines:
    """Progress where there is no terminal: a line on stderr every few seconds."""

    def __init__(self, total: int | None, name: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.name, self.clock = total, name, clock
        self.done = 0
        self.began = self.last = clock()

    def advance(self, n: int = 1) -> None:
        """Count n more."""
        self.update(self.done + n, self.total)

    def update(self, done: int, total: int | None, more: str = "") -> None:
        """Set how many are done, and print them if a line is due."""
        self.done, self.total, now = done, total, self.clock()
        if now - self.last < LINE_EVERY:
            return
        self.last, seconds = now, now - self.began
        left = ""
        if total and done:
            left = f", {format_clock(seconds / done * max(0, total - done))} left"
        of = f" of {total:,}" if total else ""
        begin = f"{self.name}: " if self.name else ""
        print(f"{begin}{done:,}{of} in {format_clock(seconds)}{left}{more}", file=sys.stderr, flush=True)


def format_clock(seconds: float) -> str:
    """80 -> 1:20"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten(text: str, before: int = 0) -> str:
    """A text in one line; on a terminal, cut to what that has room for behind `before` characters."""
    line = " ".join(text.split())
    room = shutil.get_terminal_size().columns - before if sys.stdout.isatty() else len(line)
    return line if len(line) <= room else line[: max(0, room - 1)] + "…"
