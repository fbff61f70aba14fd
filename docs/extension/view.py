"""{view} #/attention?model=...: a place of the playground where a lesson's claim can be tried."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PLACE = "http://127.0.0.1:8000/"  # where `heedful serve` is; static/playground.js changes it on a page that it serves


class View(SphinxDirective):
    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        address = self.arguments[0].strip()
        box = nodes.admonition("", nodes.title("", "Try it in the playground"), classes=["playground"])
        box += self.parse_content_to_nodes()
        link = nodes.reference("", "Open this view", refuri=PLACE + address, classes=["playground-link"])
        how = nodes.inline("", "", nodes.Text(", while "), nodes.literal("", "heedful serve"), nodes.Text(" runs"))
        box += nodes.paragraph("", "", link, how)
        return [box]


def setup(app: Sphinx) -> None:
    app.add_directive("view", View)
