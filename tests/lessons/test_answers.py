"""Answers to exercises, as `check` sees them: what a student may send, and what is said of it."""

from __future__ import annotations

import pytest

from heedful.lessons import checking, lesson_names, read_lesson
from heedful.lessons.answers import context_of, judge_answer, without_checks
from heedful.lessons.execute import CellRunner
from support.sample_lesson import lessons_in


@pytest.fixture(autouse=True)
def sample(tmp_path, monkeypatch):
    def check_doubled_in_tests(answer):
        checking.require(answer(2) == 4, f"twice 2 is 4, not {answer(2)}")

    found = checking.found_check
    monkeypatch.setattr(
        checking, "found_check", lambda name: check_doubled_in_tests if name.endswith("_in_tests") else found(name)
    )
    return tmp_path


def body_of(statement: str) -> str:
    return f"def doubled_in_tests(x):\n    {statement}\n\ncheck(doubled_in_tests)"


@pytest.mark.parametrize(
    ("source", "right", "said"),
    [
        (body_of("return x + x"), True, "✓ doubled_in_tests: right\n"),
        (body_of("return half(4 * x) + 0 * SIZE * math.pi"), True, "✓"),  # what the lesson has defined before
        (body_of("return x"), False, "✗ doubled_in_tests: twice 2 is 4, not 2\n"),
        (body_of("raise NotImplementedError"), False, "not written yet"),
        (body_of("return x +"), False, "SyntaxError"),
        (body_of("print('got', x); return 1 / 0"), False, "got 2\n✗ doubled_in_tests: it raised ZeroDivisionError"),
        ("y = 1", False, "no function of this name"),
        ("", False, "no function of this name"),
        ("doubled_in_tests = 3", False, "no function of this name"),
        ("\n\n1 / 0", False, 'File "<cell 1>", line 3'),
        ("import sys; sys.exit(0)", False, "SystemExit"),
        (body_of("raise SystemExit"), False, "it raised SystemExit"),
        (body_of("return doubled_in_tests(x)"), False, "RecursionError"),
    ],
)
def test_answers(sample, source, right, said):
    with lessons_in(sample / "lessons"):
        runner = CellRunner()
        assert not runner.run(context_of(read_lesson("sample"), "doubled_in_tests")).error
    names = dict(runner.namespace)
    judged = judge_answer("doubled_in_tests", source, {**names, "doubled_in_tests": lambda x: 2 * x})
    assert judged.right == right and said in judged.text
    assert runner.namespace == names


def test_a_check_is_run_once_wherever_it_stands():
    source = "def f():\n    check(1)\ncheck(f)\nx = (1,\n  2)\ncheck(\n  f,\n)\ny = 1\n"
    assert without_checks(source) == "def f():\n    check(1)\n\nx = (1,\n  2)\n\n\n\ny = 1\n"


@pytest.mark.parametrize("name", lesson_names())
def test_solutions_are_right_where_only_definitions_came_before(name):
    """As the page checks answers: without the lesson's own cells having run."""
    lesson = read_lesson(name)
    for exercise, solution in lesson.solutions.items():
        runner = CellRunner()
        assert not runner.run(context_of(lesson, exercise)).error
        judged = judge_answer(exercise, solution.text, runner.namespace)
        assert judged.right, judged.text
