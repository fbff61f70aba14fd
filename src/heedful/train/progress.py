"""Training progress on standard error: a progress bar on a terminal, a line now and then where there is none."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

N_LINES = 20  # without a terminal, for the whole run
LINE_EVERY = 10.0  # seconds between lines at most, if steps are slow

# Samples may hold terminal escape sequences, and lone surrogates, which cannot be written at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class ProgressDisplay:
    """The progress of training from step `begin` to `steps`."""

    def __init__(self, begin: int, steps: int) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.begin, self.steps = begin, steps
        self.started = self.last_line = time.perf_counter()
        self.every = max(1, steps // N_LINES)
        self.bar: Progress | None = None
        self.queue: list[str] = []
        self.busy = False

    def is_due(self, step: int) -> bool:
        """Whether a line is due at this step, where there is no bar."""
        return not self.console.is_terminal and (step % self.every == 0 or step == self.begin + 1)

    def update(self, step: int, words: str) -> None:
        """Move the bar to a step, or print a line if one is due; `words` are the loss, speed and so on."""
        now = time.perf_counter()
        left = (now - self.started) / max(step - self.begin, 1) * (self.steps - step)
        if not self.console.is_terminal:
            if self.is_due(step) or step == self.steps or now - self.last_line >= LINE_EVERY:
                self.last_line = now
                self.print(f"step {step}/{self.steps}  {words}  {format_clock(left)} left")
            return
        self.busy = True
        if self.bar is None:
            self.bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[words]}"),
                console=self.console,
                auto_refresh=False,
                expand=True,
            )
            self.bar.add_task("", total=self.steps, words="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=step, words=f"{words}  {format_clock(left)} left")
        self.bar.refresh()
        self.busy = False
        self._print_queue()

    def print(self, text: str) -> None:
        """Print text. Called from a signal handler while the terminal is being written to, it waits for that."""
        self.queue.append(_CONTROL.sub("�", text))
        self._print_queue()

    def _print_queue(self) -> None:
        """Print what is queued, unless the terminal is being written to."""
        while self.queue and not self.busy:
            self.busy = True
            self.console.print(self.queue.pop(0), markup=False, soft_wrap=True)
            self.busy = False

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names and values in two columns; long values are not wrapped."""
        known = list(rows)
        width = max(len(name) for name, _ in known) + 2
        self.console.print()
        for name, value in known:
            text = Text(name.ljust(width), "bold")
            text.append(value.replace("\n", "\n" + " " * width), "not bold")
            self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def format_count(n: float) -> str:
    """20100 -> 20.1k"""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"


def format_clock(seconds: float) -> str:
    """80 -> 1:20"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
