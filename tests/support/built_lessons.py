"""What the lessons showed when the documentation was built, as results that a server keeps: the page draws them without
running the cells once more."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from heedful.lessons import read_lesson
from heedful.lessons.lesson import Lesson
from heedful.lessons.results import keep_results
from support.documents import ROOT

NOTEBOOKS = ROOT / "docs" / "_build" / "lessons" / "executed"  # by myst-nb, one for each version of a lesson's code


def keep_built(names: Iterable[str]) -> None:
    """Keep the results of lessons, of those whose cells were run as they are now."""
    built = [json.loads(path.read_text(encoding="utf-8"))["cells"] for path in NOTEBOOKS.glob("*/base.ipynb")]
    by_code = {tuple(_source(cell) for cell in cells): cells for cells in built}
    for name in names:
        lesson = read_lesson(name)
        if cells := by_code.get(tuple(cell.text for cell in lesson.cells)):
            keep_results(lesson, _events(lesson, cells))


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"]).strip("\n")


def _events(lesson: Lesson, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As heedful.lessons.child tells them."""
    numbers = [i for i, part in enumerate(lesson.parts) if part.kind == "code"]
    events = []
    for number, cell in zip(numbers, cells, strict=True):
        if not {"exercise", "solution"} & set(lesson.parts[number].tags):
            data = [output.get("data", {}) for output in cell["outputs"]]
            printed = [output.get("text", "") for output in cell["outputs"]]
            shown = [found.get("text/plain", "") for found in data if "image/png" not in found]
            figures = ["".join(found["image/png"]).replace("\n", "") for found in data if "image/png" in found]
            text = "".join("".join(lines) for lines in [*printed, *shown])
            events.append({"cell": number, "text": text, "figures": figures, "error": ""})
    return events
