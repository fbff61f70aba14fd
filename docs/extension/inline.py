"""Moves scripts and styles that stand inside the built pages into files: `heedful serve` allows none inside a page.

A `<script>` and a `<style>` become a file that is named by the hash of its content. An attribute style="..." becomes
data-style="HASH", with a rule in such a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ELEMENT = re.compile(r'<(script|style)(?: type="text/css")?>(.+?)</\1>', re.DOTALL)
ATTRIBUTE = re.compile(r'(<[a-z][^<>]*) style="([^"]*)"')


def move_inline(app: Sphinx, problem: Exception | None) -> None:
    if problem is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        moved = without_inline(text, out / "_static", os.path.relpath(out / "_static", page.parent))
        if moved != text:
            page.write_text(moved, encoding="utf-8")


def without_inline(text: str, folder: Path, address: str) -> str:
    """A page whose scripts and styles are in files of a folder, which the page reaches at an address."""
    styles = {short_hash(style): style for _, style in ATTRIBUTE.findall(text)}
    text = ELEMENT.sub(lambda found: linked(found[1], found[2], folder, address), text)
    if styles:
        text = ATTRIBUTE.sub(lambda found: f'{found[1]} data-style="{short_hash(found[2])}"', text)
        rules = "".join(f'[data-style="{name}"] {{ {style} }}\n' for name, style in sorted(styles.items()))
        text = text.replace("</head>", linked("style", rules, folder, address) + "</head>", 1)
    return text


def linked(kind: str, content: str, folder: Path, address: str) -> str:
    """The element that loads a script or a style sheet from the file that it is written to."""
    name = f"inline-{short_hash(content)}.{'js' if kind == 'script' else 'css'}"
    (folder / name).write_text(content, encoding="utf-8")
    if kind == "script":
        return f'<script src="{address}/{name}"></script>'
    return f'<link rel="stylesheet" href="{address}/{name}">'


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def setup(app: Sphinx) -> None:
    app.connect("build-finished", move_inline)
