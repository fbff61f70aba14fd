"""What every lesson has and does: its cells run, its exercises are checked, it asks five questions."""

from __future__ import annotations

import re

import pytest

from heedful.lessons import lesson_names, read_lesson
from heedful.lessons.execute import CellRunner
from lessons.support import executed, exercises

NAMES = lesson_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_and_nothing_goes_to_stderr(name):
    run = executed(name)
    assert [output.error for output in run.outputs if output.error] == []
    assert run.stderr == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_all_its_parts(name):
    lesson = read_lesson(name)
    kinds = [part.kind for part in lesson.parts]
    text = "\n\n".join(part.text for part in lesson.parts if part.kind == "text")
    assert text.startswith(f"# {lesson.title}\n")
    assert len(exercises(name)) >= 2
    assert kinds.count("question") == 5
    assert kinds.count("view") >= 1
    assert all(re.fullmatch(r"#/[a-z]+(\?\S+)?", part.title) for part in lesson.parts if part.kind == "view")
    assert re.search(r"^## Questions$", text, re.MULTILINE) and re.search(r"^## Read on$", text, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_solutions_are_right_and_stubs_are_not_written_yet(name):
    run, lesson = executed(name), read_lesson(name)
    solved = [output.text for cell, output in zip(run.cells, run.outputs, strict=True) if "solution" in cell.tags]
    assert solved == [f"✓ {function}: right\n" for function in exercises(name)]
    stubs = [cell.text for cell in lesson.cells if "exercise" in cell.tags]
    for function, stub in zip(exercises(name), stubs, strict=True):
        runner = CellRunner()
        runner.run("import torch\nfrom torch import Tensor\nfrom heedful.lessons import check")
        assert runner.run(stub).text == f"✗ {function}: not written yet\n"


def test_an_exercise_has_one_lesson():
    every = [function for name in NAMES for function in exercises(name)]
    assert len(every) == len(set(every))
