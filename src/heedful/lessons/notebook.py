"""A lesson as a Jupyter notebook, in the format nbformat 4.5, which is JSON.

https://nbformat.readthedocs.io/en/latest/format_description.html. Solutions are cells whose source is folded, questions
are unfolded by a click, and a view of the playground is a note with its address.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from heedful import __version__
from heedful.lessons.lesson import Lesson, Part

INSTALL = """\
# A hosted notebook has no heedful yet: install it there.
import importlib.util

if importlib.util.find_spec("heedful") is None:
    %pip install --quiet heedful
import heedful  # before PyTorch, so that its threads share the cores with other programs

%matplotlib inline"""
PLAYGROUND = "http://127.0.0.1:8000/"


def lesson_notebook(lesson: Lesson) -> dict[str, Any]:
    """A lesson as the JSON object of a notebook, without outputs."""
    title, *rest = lesson.parts
    cells = [_cell("text", title), _code("install", INSTALL, ("hide-input",))]
    cells += [_cell(f"part-{i}", part) for i, part in enumerate(rest, start=1)]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "heedful": {"lesson": lesson.name, "version": __version__},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebook_text(lesson: Lesson) -> str:
    """The text of the notebook's file."""
    return json.dumps(lesson_notebook(lesson), indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, part: Part) -> dict[str, Any]:
    if part.kind == "code":
        return _code(name, part.text, part.tags)
    if part.kind == "view":
        return _markdown(name, view_note(part))
    if part.kind == "question":
        return _markdown(
            name, f"<details>\n<summary><b>{escape(part.title)}</b></summary>\n\n{part.text}\n\n</details>"
        )
    return _markdown(name, part.text)


def view_note(part: Part) -> str:
    """A view of the playground as a quotation: where it is, and what to see there."""
    quoted = "\n".join(f"> {line}".rstrip() for line in part.text.splitlines())
    return (
        f"> **Try it in the playground.** Start it by `heedful serve --open`, then open "
        f"[{PLAYGROUND}{part.title}]({PLAYGROUND}{part.title}).\n>\n{quoted}"
    )


def _markdown(name: str, text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _lines(text)}


def _code(name: str, text: str, tags: tuple[str, ...]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"tags": list(tags)} if tags else {}
    if "hide-input" in tags:
        metadata["jupyter"] = {"source_hidden": True}
    return {
        "cell_type": "code", "execution_count": None, "id": name, "metadata": metadata, "outputs": [],
        "source": _lines(text),
    }  # fmt: skip


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
