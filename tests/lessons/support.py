"""Lessons run once per test process, and the parts of them that tests ask for."""

from __future__ import annotations

import io
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
import numpy
import torch

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
    files: tuple[str, ...]  # that the cells left in the working folder

    @property
    def text(self) -> str:
        """All that the cells printed."""
        return "".join(output.text for output in self.outputs)


@cache
def executed(name: str) -> Executed:
    """A lesson with its cells run in order, in a namespace and a folder of its own; warnings go to stderr, as in a
    notebook."""
    cells = tuple(cell for cell in read_lesson(name).cells if "exercise" not in cell.tags)
    runner, before = CellRunner(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, _kept_state(), _captured_stderr() as stderr:
        os.chdir(folder)
        try:
            outputs = tuple(runner.run(cell.text) for cell in cells)
            files = tuple(sorted(os.listdir(folder)))
        finally:
            os.chdir(before)
    return Executed(cells, outputs, runner.namespace, stderr.getvalue(), files)


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
