"""Moves the scripts that stand inside the built pages into files: `heedful serve` allows none inside a page."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

INLINE = re.compile(r"<script>(.+?)</script>", re.DOTALL)


def move_scripts(app: Sphinx, problem: Exception | None) -> None:
    if problem is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        moved = INLINE.sub(lambda found, page=page: reference(out, page, found[1]), text)
        if moved != text:
            page.write_text(moved, encoding="utf-8")


def reference(out: Path, page: Path, code: str) -> str:
    """The element that loads a script, which is written to a file by its hash."""
    name = f"inline-{hashlib.sha256(code.encode()).hexdigest()[:12]}.js"
    (out / "_static" / name).write_text(code, encoding="utf-8")
    return f'<script src="{os.path.relpath(out / "_static", page.parent)}/{name}"></script>'


def setup(app: Sphinx) -> None:
    app.connect("build-finished", move_scripts)
