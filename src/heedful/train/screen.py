"""The terminal while a model trains: a bar on a terminal, lines now and then where there is none; on standard error."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

LINES = 20  # where there is no terminal, about so many for the whole run
SPEAK_EVERY = 60.0  # seconds at most between two of them, if steps are slow

# A model may write anything, and a terminal would obey it; halves of characters cannot be written at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Screen:
    """What is shown, from step `begin` to `steps`."""

    def __init__(self, begin: int, steps: int) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.begin, self.steps = begin, steps
        self.started = self.spoke = time.perf_counter()
        self.every = max(1, steps // LINES)
        self.bar: Progress | None = None
        self.waiting: list[str] = []
        self.busy = False

    def is_due(self, step: int) -> bool:
        """Whether a line is, where there is no bar."""
        return not self.console.is_terminal and (step % self.every == 0 or step == self.begin + 1)

    def progress(self, step: int, words: str) -> None:
        now = time.perf_counter()
        left = (now - self.started) / max(step - self.begin, 1) * (self.steps - step)
        if not self.console.is_terminal:
            if self.is_due(step) or step == self.steps or now - self.spoke >= SPEAK_EVERY:
                self.spoke = now
                self.say(f"step {step}/{self.steps}  {words}  {clock(left)} left")
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
        self.bar.update(self.bar.task_ids[0], completed=step, words=f"{words}  {clock(left)} left")
        self.bar.refresh()
        self.busy = False
        self._speak()

    def say(self, text: str) -> None:
        """A line or several. What a signal's handler says while the terminal is being written to comes after that."""
        self.waiting.append(_CONTROL.sub("�", text))
        self._speak()

    def _speak(self) -> None:
        while self.waiting and not self.busy:
            self.busy = True
            self.console.print(self.waiting.pop(0), markup=False, soft_wrap=True)
            self.busy = False

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and values; a value of several lines stays in its column, and a path is never broken."""
        known = list(rows)
        width = max(len(name) for name, _ in known) + 2
        self.console.print()
        for name, value in known:
            text = Text(name.ljust(width), "bold")
            text.append(value.replace("\n", "\n" + " " * width), "not bold")
            self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def count(n: float) -> str:
    """20100 -> 20.1k"""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"


def clock(seconds: float) -> str:
    """80 -> 1:20"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
