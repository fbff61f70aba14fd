"""Pages that stand alone: one HTML file with its style, its program and its numbers, nothing fetched from anywhere.

Whatever comes from a text or a model is written as text: nothing in it is markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
MOST_NUMBERS = 4_000_000  # a page of about 25 MB
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    title: str, about: str, body: str, *, data: Mapping[str, Any] | None = None, script: str = ""
) -> str:
    """A whole page. `title` and `about` are text; `body` is HTML that is safe already; `data` goes to the script."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_file('page.css')}</style></head><body>",
        f'<h1>{escape(title)}</h1><p class="about">{escape(about)}</p>',
        body,
    ]
    if data is not None:
        # Inside a script element only "<" could end it; as an escape it is the same JSON.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="data">{text}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body></html>", ""])


def attention_page(
    title: str,
    about: str,
    maps: Mapping[str, Tensor],
    labels: Mapping[str, tuple[Sequence[str], Sequence[str]]],
) -> str:
    """Maps (H, T, S) by name with the labels of rows and columns: choose a layer and heads, hover a token."""
    count = sum(weights.numel() for weights in maps.values())
    if count > MOST_NUMBERS:
        raise ValueError(
            f"{count:,} weights do not fit into a page ({MOST_NUMBERS:,} do): choose a layer, or a shorter text"
        )
    data = [
        {
            "name": name.removesuffix(".weights"),
            "rows": list(labels[name][0]),
            "columns": list(labels[name][1]),
            "weights": rounded(weights[:, : len(labels[name][0]), : len(labels[name][1])]),
        }
        for name, weights in maps.items()
    ]
    body = (
        '<div class="controls"><label>layer <select id="layer"></select></label>'
        '<span>heads</span><span class="controls" id="heads" style="margin:0"></span></div>'
        '<div class="views"><div class="view"><svg id="lines" role="img" aria-label="who looks at whom"></svg></div>'
        '<div class="view"><canvas id="heat" role="img" aria-label="attention as a heatmap"></canvas>'
        '<p id="told" aria-live="polite">rows look at columns</p></div></div>'
    )
    return page(title, about, body, data={"maps": data}, script=_file("page.js"))


def figure_page(title: str, about: str, figures: Sequence[str], tables: Sequence[str] = ()) -> str:
    """Pictures (SVG from figures.svg) and tables (from `table`)."""
    body = "".join(f"<figure>{figure}</figure>" for figure in figures)
    return page(title, about, body + "".join(f'<div class="scroll">{t}</div>' for t in tables))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table of texts and numbers."""

    def cells(kind: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(str(v))}</{kind}>" for v in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', head)}</thead><tbody>{body}</tbody></table>"


def rounded(values: Tensor, digits: int = 4) -> Any:
    """Nested lists of short numbers."""
    scaled = (values.double() * 10**digits).round() / 10**digits
    return torch.nan_to_num(scaled).tolist()


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
