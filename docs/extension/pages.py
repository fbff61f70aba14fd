"""Pages that are written from other files when Sphinx starts: one source each, never a copy in git.

project/    the documents in the root of the repository
lessons/    src/heedful/lessons/*.md, and their contents by chapter
reference/  commands from argparse, recipes and models from their files
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from extension import references
from heedful.lessons.lesson import FOLDER as LESSONS
from heedful.lessons.lesson import lesson_names, read_lesson

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
PROJECT = ["ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "RESULTS", "SECURITY"]
FRONT_MATTER = """\
file_format: mystnb
kernelspec: {name: python3, display_name: Python 3, language: python}
"""
LINK = re.compile(rf"\]\((?:\.\./)*({'|'.join(PROJECT)})\.md(#[^)]*)?\)")


def write_pages(app: Sphinx) -> None:
    pages = dict(generated())
    for name, text in pages.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # a file that stays is not built again
            path.write_text(text, encoding="utf-8")
    for folder in {Path(name).parent for name in pages}:
        for path in (DOCS / folder).glob("*.md"):
            if path.relative_to(DOCS).as_posix() not in pages:
                path.unlink()


def generated() -> Iterator[tuple[str, str]]:
    """The pages by their names."""
    for name in PROJECT:
        yield f"project/{name.lower()}.md", project_page(name)
    for name in lesson_names():
        yield f"lessons/{name}.md", lesson_page(name)
    yield "lessons/index.md", lessons_index()
    yield "reference/commands.md", references.commands()
    yield "reference/recipes.md", references.recipes()
    yield "reference/models.md", references.models()


def project_page(name: str) -> str:
    """A document of the root, with links that lead from the folder project/."""
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](../", text)
    if name == "ARCHITECTURE":  # `nn/stack.py`: `Stack.forward`, `Stack.run_blocks`
        text = re.sub(r"^(\d+\. )`([^`]+\.py)`: (`[^`]+`(?:, `[^`]+`)*)", linked_functions, text, flags=re.MULTILINE)
    return text


def linked_functions(found: re.Match[str]) -> str:
    file = found[2]
    linked = ", ".join(f"{{src}}`{file}::{name}`" for name in re.findall(r"`([^`]+)`", found[3]))
    return f"{found[1]}`{file}`: {linked}"


def lesson_page(name: str) -> str:
    """A lesson as MyST-NB reads it: the body of its file below front matter that is YAML."""
    body = re.split(
        r"^---[ \t]*$\n", (LESSONS / f"{name}.md").read_text(encoding="utf-8"), maxsplit=2, flags=re.MULTILINE
    )[2]
    return f"---\n{FRONT_MATTER}---\n{body}"


def lessons_index() -> str:
    """The lessons by chapter, and their table of contents."""
    text = "# The lessons\n\nText, code that was run when this page was built, exercises that check themselves.\n"
    chapter = ""
    for name in lesson_names():
        lesson = read_lesson(name)
        if lesson.chapter != chapter:
            chapter = lesson.chapter
            text += f"\n## {chapter}\n\n"
        text += f"- [{lesson.title}]({name}.md): {lesson.about}\n"
    return text + "\n```{toctree}\n:hidden:\n\n" + "\n".join(lesson_names()) + "\n```\n"


def lead_to_project(app: Sphinx, docname: str, content: list[str]) -> None:
    """Links to the documents in the root of the repository lead to their pages."""
    text = LINK.sub(lambda found: f"](/project/{found[1].lower()}.md{found[2] or ''})", content[0])
    content[0] = text.replace("](../src/heedful/lessons)", "](/lessons/index.md)")


def spread_lessons(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Lessons evenly among the other pages: processes read neighbours together, and only lessons take long."""
    lessons = [name for name in docnames if name.startswith("lessons/")]
    others = [name for name in docnames if not name.startswith("lessons/")]
    places = [(i / len(names), name) for names in (lessons, others) for i, name in enumerate(names)]
    docnames[:] = [name for _, name in sorted(places)]


def tell_executed(app: Sphinx, problem: Exception | None) -> None:
    """How many cells of lessons the pages have run."""
    found = {name: NbMetadataCollector.get_exec_data(app.env, f"lessons/{name}") for name in lesson_names()}
    cells = sum(len(read_lesson(name).cells) for name, data in found.items() if data)
    seconds = sum(data["runtime"] or 0 for data in found.values() if data)
    if cells:
        print(f"{sum(map(bool, found.values()))} lessons executed: {cells} cells, {seconds:.0f} seconds")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("env-before-read-docs", spread_lessons)
    app.connect("source-read", lead_to_project)
    app.connect("build-finished", tell_executed)
