"""What every lesson has and does: its cells run, its exercises are checked, it asks five questions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from heedful.lessons import lesson_names, read_lesson
from heedful.lessons.checking import found_check
from heedful.lessons.execute import CellRunner
from lessons.support import exercises

NAMES = lesson_names()
CHAPTERS = {  # by the first order of their lessons
    10: "Before Transformers", 20: "Query, key, value", 30: "Attention by hand", 40: "The Transformer",
    50: "Words to numbers", 60: "GPT", 70: "BERT", 80: "Beyond text", 90: "Inside", 100: "Fast",
}  # fmt: skip
every_lesson = pytest.mark.parametrize("name", NAMES)


@every_lesson
def test_a_lesson_is_run_by_its_own_tests(name):
    """`executed` asserts that cells run and solutions are right; called here too, it would run lessons in both test
    processes."""
    tests = Path(__file__).with_name(f"test_{name.replace('-', '_')}.py")
    assert f'executed("{name}")' in tests.read_text(encoding="utf-8")


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
def test_stubs_are_not_written_yet(name):
    for function, cell in read_lesson(name).exercises.items():
        runner = CellRunner()
        runner.run("import torch\nfrom torch import Tensor\nfrom heedful.lessons import check")
        assert runner.run(cell.text).text.startswith(f"✗ {function}: not written yet\n")


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
