"""Lessons run once per test process, and the parts of them that tests ask for."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from typing import Any

from heedful.lessons import check, read_lesson
from heedful.lessons.execute import CellOutput, CellRunner
from heedful.lessons.lesson import Part


@dataclass(frozen=True)
class Executed:
    """A lesson's cells, exercises left out: what each showed, the names they defined, what came to stderr."""

    cells: tuple[Part, ...]
    outputs: tuple[CellOutput, ...]
    names: dict[str, Any]
    stderr: str

    @property
    def text(self) -> str:
        """All that the cells printed."""
        return "".join(output.text for output in self.outputs)


@cache
def executed(name: str) -> Executed:
    """A lesson with its cells run in order, in a namespace of its own; warnings go to stderr, as in a notebook."""
    cells = tuple(cell for cell in read_lesson(name).cells if "exercise" not in cell.tags)
    runner, stderr = CellRunner(), io.StringIO()
    with redirect_stderr(stderr), warnings.catch_warnings():
        warnings.simplefilter("default")
        outputs = tuple(runner.run(cell.text) for cell in cells)
    return Executed(cells, outputs, runner.namespace, stderr.getvalue())


def exercises(name: str) -> list[str]:
    """The functions that a lesson's exercises ask for."""
    cells = [cell.text for cell in read_lesson(name).cells if "exercise" in cell.tags]
    return [re.search(r"check\((\w+)\)\s*$", text)[1] for text in cells]


def verdict(answer: Callable[..., Any], capsys: Any, *, name: str = "") -> str:
    """What `check` prints of an answer, which is called `name` if its own name is another."""
    answer.__name__ = name or answer.__name__
    capsys.readouterr()
    check(answer)
    return str(capsys.readouterr().out.strip())
