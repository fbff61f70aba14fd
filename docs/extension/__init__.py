"""What the documentation needs beside Sphinx, MyST-NB and Furo.

pages      pages that are written from other files: the lessons, the root's documents, the references
source     {src}`models/gpt.py::GPT.hidden`: a link to the line where that is now, and the pages it leads to
tables     {parity}: a family's rows of RESULTS.md; {sizes}: its published sizes
charts     {chart}: a table of RESULTS.md, drawn
view       {view}: an address of the playground, in lessons
mathml     formulas as MathML, which browsers show without a script
docstrings docstrings as reStructuredText
inline     no scripts and styles inside the pages, so that the server's content security policy needs no exception
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from extension import charts, docstrings, inline, mathml, pages, source, tables, view


def setup(app: Sphinx) -> dict[str, Any]:
    for part in (pages, source, tables, charts, view, mathml, docstrings, inline):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
