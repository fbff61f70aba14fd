"""A lesson's file, parsed into the parts that every form of it is made of.

    ---
    title: Attention by hand
    chapter: Attention by hand
    order: 30
    about: six words, six vectors, every number
    kernelspec: {name: python3, display_name: Python 3}
    ---
    # Attention by hand
    Text, and

    ```{code-cell} python
    print("cells that run, in order")
    ```
    ```{view} #/attention?model=tiny-books&text=The%20cat%20sat
    What to look at in the playground.
    ```
    ```{code-cell} python
    :tags: [exercise]
    def shifted(tokens): ...

    check(shifted)
    ```
    ```{code-cell} python
    :tags: [solution, hide-input]
    def shifted(tokens):
        return tokens[1:]

    check(shifted)
    ```
    ```{dropdown} Why is it so?
    Because.
    ```

It is MyST as MyST-NB reads it; `view` is a directive of our documentation. Files are found by their names, sorted by
`order`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs

FOLDER = Path(__file__).parent
FENCE = re.compile(
    r"^(```+|~~~+)\{(code-cell|view|dropdown)\}[ \t]*(.*?)[ \t]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL
)
TAGS = re.compile(r"\A:tags:[ \t]*\[(.*?)\][ \t]*\n+")


@dataclass(frozen=True)
class Part:
    """A piece of a lesson, in the order of the page.

    text: Markdown. code: a cell; `tags` may have exercise, solution, hide-input. view: `title` is an address of the
    playground, `text` what to see there. question: `title` asks, `text` answers.
    """

    kind: Literal["text", "code", "view", "question"]
    text: str
    title: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lesson:
    """One lesson: what it is about, and its parts."""

    name: str
    title: str
    chapter: str
    order: int
    about: str
    parts: tuple[Part, ...]

    @property
    def cells(self) -> list[Part]:
        """The code cells, in order."""
        return [part for part in self.parts if part.kind == "code"]

    @property
    def exercises(self) -> dict[str, Part]:
        """The cells that are exercises, by the name of the function to write."""
        return {exercise_name(cell): cell for cell in self.cells if "exercise" in cell.tags}

    @property
    def solutions(self) -> dict[str, Part]:
        """The cells that solve the exercises, by the name of the function."""
        return {exercise_name(cell): cell for cell in self.cells if "solution" in cell.tags}

    @property
    def models(self) -> list[str]:
        """The models that its views open, in their order."""
        queries = [parse_qs(part.title.partition("?")[2]) for part in self.parts if part.kind == "view"]
        return list(dict.fromkeys(name for query in queries for name in query.get("model", [])))


def exercise_name(cell: Part) -> str:
    """The function that an exercise or a solution hands to `check` in its last line."""
    found = re.search(r"^check\((\w+)\)\s*\Z", cell.text, re.MULTILINE)
    if not found:
        raise ValueError(f"an exercise ends with check(NAME), and this one does not:\n{cell.text}")
    return found[1]


@cache
def lesson_names() -> tuple[str, ...]:
    """The lessons that there are, in the order of the course."""
    lessons = [read_lesson(path.stem) for path in FOLDER.glob("*.md")]
    return tuple(lesson.name for lesson in sorted(lessons, key=lambda lesson: (lesson.order, lesson.name)))


@cache
def read_lesson(name: str) -> Lesson:
    """A lesson by its name; a ValueError says which there are."""
    path = FOLDER / f"{name}.md"
    if not re.fullmatch(r"[a-z0-9-]+", name) or not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.md")))
        raise ValueError(f"There is no lesson {name!r}; there are: {known}")
    return parse_lesson(name, path.read_text(encoding="utf-8"))


def parse_lesson(name: str, source: str) -> Lesson:
    """A lesson from its text."""
    _, front, body = re.split(r"^---[ \t]*$\n?", source, maxsplit=2, flags=re.MULTILINE)
    fields = dict(re.findall(r"^(\w+):[ \t]*(.*?)[ \t]*$", front, re.MULTILINE))
    missing = {"title", "chapter", "order", "about"} - fields.keys()
    if missing:
        raise ValueError(f"{name}.md says nothing about its {', '.join(sorted(missing))}")
    parts: list[Part] = []
    end = 0
    for found in FENCE.finditer(body):
        _add_text(parts, body[end : found.start()])
        parts.append(_directive(found[2], found[3], found[4]))
        end = found.end()
    _add_text(parts, body[end:])
    about = {key: fields[key] for key in ("title", "chapter", "about")}
    return Lesson(name=name, order=int(fields["order"]), parts=tuple(parts), **about)


def _add_text(parts: list[Part], text: str) -> None:
    if text.strip():
        parts.append(Part("text", text.strip()))


def _directive(kind: str, title: str, text: str) -> Part:
    if kind == "view":
        return Part("view", text.strip(), title)
    if kind == "dropdown":
        return Part("question", text.strip(), title)
    tags = TAGS.match(text)
    names = tuple(tag.strip() for tag in tags[1].split(",")) if tags else ()
    return Part("code", text[tags.end() if tags else 0 :].strip("\n"), tags=names)
