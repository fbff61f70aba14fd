"""{src}`models/gpt.py::GPT.hidden`: a link to a line of the package's source, found when the site is built.

`FILE::NAME` is where a function, class, method, field or constant is defined; `FILE::NAME::text` the first line in it
that has the text; `FILE` alone the file. A name that is no longer there is a warning, and so an error of `make docs`.
The files that are linked to become pages of the site, with a number for each line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxRole

SOURCE = Path(__file__).parents[2] / "src" / "heedful"
FOLDER = "source/"  # of the site


class Line(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        file, _, rest = self.text.strip().partition("::")
        name, _, text = rest.partition("::")
        try:
            number = line_of(file, name, text)
        except (OSError, LookupError) as problem:
            message = self.inliner.reporter.warning(f"{self.text}: {problem}", line=self.lineno)
            return [nodes.literal("", self.text)], [message]
        linked_files(self.env).setdefault(self.env.docname, set()).add(file)
        place = f"{file}:{number}" if name else file
        shown = nodes.literal("", place if not name or text else f"{name}")
        builder = self.env.app.builder
        target = builder.get_relative_uri(self.env.docname, FOLDER + file.removesuffix(".py"))
        link = nodes.reference("", "", shown, refuri=f"{target}#L{number}", internal=True, classes=["source-line"])
        link["reftitle"] = f"src/heedful/{file}, line {number}"
        if name and not text:
            link += nodes.inline("", f" {Path(file).name}:{number}", classes=["source-place"])
        return [link], []


def line_of(file: str, name: str = "", text: str = "") -> int:
    """The line of a file where a name is defined, or the first one of that definition with a text."""
    lines = (SOURCE / file).read_text(encoding="utf-8").splitlines()
    if not name:
        return 1
    node = found(file, name)
    if not text:
        return node.lineno
    for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        if text in lines[number - 1]:
            return number
    raise LookupError(f"{name} in {file} has no {text!r}")


def found(file: str, name: str) -> Any:
    """The node of the syntax tree that defines a dotted name."""
    node: Any = parsed(file)
    for part in name.split("."):
        inner = (
            [one for one in ast.walk(node) if part in names(one)] if isinstance(node, ast.FunctionDef) else node.body
        )
        node = next((one for one in inner if part in names(one)), None)
        if node is None:
            raise LookupError(f"{file} has no {name}")
    return node


def names(node: ast.AST) -> list[str]:
    """What a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def linked_files(env: BuildEnvironment) -> dict[str, set[str]]:
    """The files that each page links to."""
    if not hasattr(env, "heedful_sources"):
        env.heedful_sources = {}
    return env.heedful_sources


def forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    linked_files(env).pop(docname, None)


def merge(app: Sphinx, env: BuildEnvironment, docnames: Iterable[str], other: BuildEnvironment) -> None:
    mine, theirs = linked_files(env), linked_files(other)
    mine |= {name: theirs[name] for name in docnames if name in theirs}


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that is linked to."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    for file in sorted(set().union(*linked_files(app.env).values())):
        code = (SOURCE / file).read_text(encoding="utf-8")
        body = highlight(code, get_lexer_for_filename(file), formatter)
        body = body.replace('name="L-', 'id="L').replace('href="#L-', 'href="#L')
        title = f"src/heedful/{file}"
        yield FOLDER + file.removesuffix(".py"), {"title": title, "body": f"<h1>{title}</h1>\n{body}"}, "page.html"


def setup(app: Sphinx) -> None:
    app.add_role("src", Line())
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("html-collect-pages", source_pages)
