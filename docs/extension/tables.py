"""{parity} gpt1 gpt2*: rows of RESULTS.md's table of errors. {sizes} gpt: the published sizes of a family."""

from __future__ import annotations

from fnmatch import fnmatch

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from extension.references import table
from extension.results import RESULTS, tables_of


class Parity(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RESULTS))
        head, *rows = tables_of("Parity: every family against its reference")[0]
        patterns = self.arguments[0].split()
        chosen = [row for row in rows if any(fnmatch(row[0], pattern) for pattern in patterns)]
        if not chosen:
            raise self.error(f"RESULTS.md has no row for {self.arguments[0]}")
        return self.parse_text_to_nodes(table(["case", *head[1:]], chosen))


class Sizes(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from heedful.models.registry import sizes

        found = [size for size in sizes().values() if size.family == self.arguments[0]]
        if not found:
            raise self.error(f"there are no published sizes of {self.arguments[0]!r}")
        rows = ([f"`{size.name}`", f"{size.parameters:,}"] for size in found)
        return self.parse_text_to_nodes(table(['`heedful.create("...")`', "parameters"], rows))


def setup(app: Sphinx) -> None:
    app.add_directive("parity", Parity)
    app.add_directive("sizes", Sizes)
