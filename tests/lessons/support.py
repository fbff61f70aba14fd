"""Lessons run once per test process, and the parts of them that tests ask for."""

from __future__ import annotations

import io
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch

from heedful.cli.lesson_terminal import LessonCells, print_lesson
from heedful.lessons import check, read_lesson
from heedful.lessons.execute import CellOutput


@dataclass(frozen=True)
class Executed:
    """A lesson in the terminal, as a whole: what its cells showed, exercises and solutions left out, and the names that
    they defined."""

    outputs: tuple[CellOutput, ...]
    names: dict[str, Any]

    @property
    def text(self) -> str:
        """All that the cells printed."""
        return "".join(output.text for output in self.outputs)


@cache
def executed(name: str) -> Executed:
    """A lesson as `heedful learn NAME --all` prints it, in a folder of its own; warnings go to stderr, as in notebooks.

    What every lesson must keep to is asserted here, since a lesson runs for seconds: no cell fails, solutions are
    right, nothing goes to stderr, and no files are left.
    """
    lesson = read_lesson(name)
    cells, printed, before = LessonCells(lesson), io.StringIO(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, _kept_state(), _captured_stderr() as stderr:
        os.chdir(folder)
        try:
            with redirect_stdout(printed):
                code = print_lesson(lesson, Path("pictures"), cells)
            files = set(os.listdir(folder)) - {"pictures"}
        finally:
            os.chdir(before)
    assert [output.error for output in cells.outputs.values() if output.error] == [] and code == 0
    assert [function for function in lesson.exercises if f"✓ {function}: right\n" not in printed.getvalue()] == []
    assert stderr.getvalue() == ""
    assert files == set(), "files belong into a temporary folder"
    outputs = tuple(cells.outputs.values())
    for solution in lesson.solutions.values():  # the functions that tests call; the lesson is over
        cells.runner.run(solution.text)
    return Executed(outputs, cells.runner.namespace)


@contextmanager
def _captured_stderr() -> Iterator[io.StringIO]:
    """What is written to stderr, and warnings, which pytest would keep for itself."""
    written = io.StringIO()
    with redirect_stderr(written), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield written
    written.writelines(f"{warning.category.__name__}: {warning.message}\n" for warning in caught)


@contextmanager
def _kept_state() -> Iterator[None]:
    """A lesson seeds generators and sets options, which other tests must not notice."""
    seeds = random.getstate(), numpy.random.get_state()
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    with torch.random.fork_rng(devices=[]), matplotlib.rc_context(), numpy.printoptions():
        yield
    random.setstate(seeds[0])
    numpy.random.set_state(seeds[1])
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_printoptions(**options)


def exercises(name: str) -> list[str]:
    """The functions that a lesson's exercises ask for."""
    return list(read_lesson(name).exercises)


def verdict(answer: Callable[..., Any], capsys: Any, *, name: str = "") -> str:
    """What `check` prints of an answer, which is called `name` if its own name is another."""
    answer.__name__ = name or answer.__name__
    capsys.readouterr()
    check(answer)
    return str(capsys.readouterr().out.strip())
