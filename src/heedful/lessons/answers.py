"""A student's answer to an exercise: run, checked, and told what is wrong with it."""

from __future__ import annotations

import ast
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from heedful.lessons.execute import BoundedText, CellRunner, take_figures
from heedful.lessons.lesson import Lesson

DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Judged:
    """Whether an answer is right, and what was printed on the way: by the answer, and by its check."""

    right: bool
    text: str


def judge_answer(exercise: str, source: str, names: dict[str, Any]) -> Judged:
    """Run a student's code, in which there is the function that an exercise asks for, and check it. `names` are those
    of the lesson, which the code may use and does not change."""
    runner = CellRunner({name: value for name, value in names.items() if name != exercise})
    output = runner.run(without_checks(source))
    if output.error:
        return Judged(False, f"{output.text}{output.error}\n")
    answer = runner.namespace.get(exercise)
    if not callable(answer) or getattr(answer, "__name__", "") != exercise:
        return Judged(False, f"{output.text}✗ {exercise}: there is no function of this name in the answer\n")
    from heedful.lessons.checking import check

    printed = BoundedText()
    with redirect_stdout(printed):
        right = bool(check(answer))
    take_figures()  # they would appear under the next cell
    return Judged(right, output.text + printed.getvalue())


def without_checks(source: str) -> str:
    """Code without its own calls of `check`, since the answer is checked afterwards; every line keeps its number."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return source  # running it says where
    lines = source.splitlines()
    for statement in statements:
        match statement:
            case ast.Expr(ast.Call(ast.Name("check"))) if statement.col_offset == 0:
                last = statement.end_lineno or statement.lineno
                lines[statement.lineno - 1 : last] = [""] * (last - statement.lineno + 1)
    return "\n".join(lines) + "\n"


def context_of(lesson: Lesson, exercise: str) -> str:
    """What a lesson defines before an exercise: imports, functions, classes and constants. It runs at once, where all
    the cells would take long."""
    kept: list[ast.stmt] = []
    for cell in lesson.cells:
        if cell is lesson.exercises[exercise]:
            break
        if "exercise" not in cell.tags:
            kept += [statement for statement in ast.parse(cell.text).body if _is_definition(statement)]
    return ast.unparse(ast.Module(kept, []))


def _is_definition(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        try:
            ast.literal_eval(statement.value)
        except ValueError:
            return False
        return all(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    return isinstance(statement, DEFINITIONS)
