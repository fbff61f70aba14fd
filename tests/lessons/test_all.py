"""What every lesson has and does: its cells run, its exercises are checked, it asks five questions."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from heedful.lessons import lesson_names, read_lesson
from heedful.lessons.checking import found_check
from heedful.lessons.execute import CellRunner
from lessons.support import executed, exercises

NAMES = lesson_names()
CHAPTERS = {  # by the first order of their lessons
    10: "Before Transformers", 20: "Query, key, value", 30: "Attention by hand", 40: "The Transformer",
    50: "Words to numbers", 60: "GPT", 70: "BERT", 80: "Beyond text", 90: "Inside", 100: "Fast",
}  # fmt: skip
every_lesson = pytest.mark.parametrize("name", NAMES)


@every_lesson
def test_every_cell_runs_and_nothing_goes_to_stderr(name):
    run = executed(name)
    assert [output.error for output in run.outputs if output.error] == []
    assert run.stderr == ""
    assert run.files == (), "files belong into a temporary folder"


@every_lesson
def test_a_lesson_has_all_its_parts(name):
    lesson = read_lesson(name)
    kinds = [part.kind for part in lesson.parts]
    text = "\n\n".join(part.text for part in lesson.parts if part.kind == "text")
    assert lesson.chapter == CHAPTERS[lesson.order // 10 * 10]
    assert text.startswith(f"# {lesson.title}\n")
    assert "from heedful.lessons import check" in lesson.cells[0].text
    assert len(exercises(name)) >= 2
    assert kinds.count("question") == 5
    assert kinds.count("view") >= 1
    assert all(re.fullmatch(r"#/[a-z]+(\?\S+)?", part.title) for part in lesson.parts if part.kind == "view")
    assert all(part.text for part in lesson.parts)
    assert re.search(r"^## Questions$", text, re.MULTILINE) and re.search(r"^## Read on$", text, re.MULTILINE)
    assert "```{" not in text, "a directive that is not code-cell, view or dropdown, or that is not closed"


@every_lesson
def test_solutions_are_right_and_stubs_are_not_written_yet(name):
    run, lesson = executed(name), read_lesson(name)
    solved = [output.text for cell, output in zip(run.cells, run.outputs, strict=True) if "solution" in cell.tags]
    assert [text.split("\n")[0] for text in solved] == [f"✓ {function}: right" for function in exercises(name)]
    stubs = [cell.text for cell in lesson.cells if "exercise" in cell.tags]
    for function, stub in zip(exercises(name), stubs, strict=True):
        runner = CellRunner()
        runner.run("import torch\nfrom torch import Tensor\nfrom heedful.lessons import check")
        assert runner.run(stub).text.startswith(f"✗ {function}: not written yet\n")


@every_lesson
def test_exercises_say_what_to_write_and_have_a_check(name):
    lesson = read_lesson(name)
    assert list(lesson.solutions) == list(lesson.exercises)
    assert all("hide-input" in cell.tags for cell in lesson.solutions.values())
    for function, cell in lesson.exercises.items():
        written = [node for node in ast.parse(cell.text).body if isinstance(node, ast.FunctionDef)]
        assert ast.get_docstring(next(node for node in written if node.name == function))
        assert found_check(function).__module__ == f"heedful.lessons.checks.{name.replace('-', '_')}"


@every_lesson
def test_other_cells_need_no_answer(name):
    """The terminal and the page go on whether or not a student has solved an exercise."""
    for cell in read_lesson(name).cells:
        if not {"exercise", "solution"} & set(cell.tags):
            used = {node.id for node in ast.walk(ast.parse(cell.text)) if isinstance(node, ast.Name)}
            assert not used & set(exercises(name)), cell.text


def test_an_exercise_has_one_lesson():
    every = [function for name in NAMES for function in exercises(name)]
    assert len(every) == len(set(every))


def test_each_lesson_has_its_own_place():
    places = Counter(read_lesson(name).order for name in NAMES)
    assert not [order for order, n in places.items() if n > 1]
