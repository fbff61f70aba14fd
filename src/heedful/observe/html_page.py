"""Self-contained HTML pages: one file with its style, script and data, and nothing fetched from anywhere.

Whatever comes from a text or a model is escaped; a Content-Security-Policy forbids the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
MAX_NUMBERS = 4_000_000  # a page of about 25 MB
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_page(title: str, about: str, body: str, *, data: Mapping[str, Any] | None = None, script: str = "") -> str:
    """A whole page. `title` and `about` are text, `body` is safe HTML, `data` is embedded as JSON for the script."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_file('page.css')}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="about" tabindex="0">{escape(about)}</p>' if about else "",
        body,
    ]
    if data is not None:
        # Inside a script element only "<" could end it; \u003c is the same JSON.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="data">{text}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body></html>", ""])


@dataclass(frozen=True)
class HeatmapData:
    """The data of an interactive heatmap: values, labels, and how to colour them.

    The scale goes from 0, or `signed` from -top, to `top`, the largest absolute value unless given. `words` are written
    in the cells, `notes` shown for the cell under the cursor."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    row_name: str = ""
    column_name: str = ""
    scale: str = ""
    signed: bool = False
    top: float | None = None
    gamma: float = 1.0
    cell: int | None = None  # pixels
    words: Sequence[Sequence[str]] | None = None
    notes: Sequence[Sequence[str]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that page.js reads."""
        most = float(torch.nan_to_num(self.values).abs().max()) or 1.0 if self.top is None else self.top
        more = {"cell": self.cell, "words": self.words, "notes": self.notes}
        return {
            "title": self.title, "rows": list(self.rows), "columns": list(self.columns), "values": rounded(self.values),
            "signed": self.signed, "top": most, "gamma": self.gamma, "digits": 4, "rowName": self.row_name,
            "columnName": self.column_name, "scale": self.scale,
            **{name: value for name, value in more.items() if value is not None},
        }  # fmt: skip


def attention_page(
    title: str,
    about: str,
    maps: Mapping[str, Tensor],
    labels: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    *,
    head: int | None = None,
    overview: bool = False,
) -> str:
    """Attention weights (H, T, S) by name with their axis labels, to browse by layer, head and token. The last layer is
    selected first, with the mean of its heads or one `head`; `overview` adds a thumbnail of every head."""
    _check_size(maps.values(), "choose a layer, or a shorter text")
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
        ('<div class="scroll"><div class="heads" id="overview"></div></div>' if overview else "")
        + '<div class="controls"><label>layer <select id="layer"></select></label><span>heads</span>'
        '<span class="controls" id="heads" role="group" aria-label="heads"></span></div>'
        '<div class="views"><div class="view"><div class="drawing">'
        '<svg id="lines" tabindex="0" role="application" aria-label="who looks at whom: arrow keys read the tokens">'
        "</svg>"
        '</div><p class="told" id="told" aria-live="polite"></p></div><div class="view" id="heat"></div></div>'
    )
    first = {"overview": overview, "head": head}
    return html_page(title, about, body, data={"maps": data, **first}, script=_file("page.js"))


def heatmap_page(
    title: str,
    about: str,
    matrices: Sequence[HeatmapData],
    figures: Sequence[str] = (),
    tables: Sequence[str] = (),
) -> str:
    """Figures (SVG from figures.svg), interactive heatmaps, and tables (from `html_table`)."""
    _check_size([matrix.values for matrix in matrices], "choose a shorter text")
    views = "".join(f'<div class="view" id="matrix-{i}"></div>' for i in range(len(matrices)))
    data = {"matrices": [matrix.to_json() for matrix in matrices]}
    body = f'{_figures(figures, "photo")}<div class="views">{views}</div>{_tables(tables)}'
    return html_page(title, about, body, data=data, script=_file("page.js"))


def figure_page(title: str, about: str, figures: Sequence[str], tables: Sequence[str] = ()) -> str:
    """Figures (SVG from figures.svg) and tables (from `html_table`)."""
    return html_page(title, about, _figures(figures) + _tables(tables))


def token_page(title: str, about: str, tokens: Sequence[tuple[str, int, float | None]], tables: Sequence[str]) -> str:
    """Tokens (text, id, surprisal in bits) as boxes coloured by their surprisal."""
    most = max([8.0, *(bits for *_, bits in tokens if bits is not None)])
    made = []
    for text, index, bits in tokens:
        told = "" if bits is None else f' title="{bits:.2f} bits"'
        much = 0 if bits is None else round(70 * bits / most)
        made.append(f'<li style="--much:{much}%"{told}>{escape(text)}<small>{index}</small></li>')
    return html_page(title, about, f'<ol class="tokens">{"".join(made)}</ol>' + _tables(tables))


def _check_size(values: Iterable[Tensor], instead: str) -> None:
    count = sum(weights.numel() for weights in values)
    if count > MAX_NUMBERS:
        raise ValueError(f"{count:,} numbers do not fit into a page ({MAX_NUMBERS:,} do): {instead}")


def _figures(figures: Sequence[str], kind: str = "drawn") -> str:
    return "".join(f'<figure class="{kind}">{figure}</figure>' for figure in figures)


def _tables(tables: Sequence[str]) -> str:
    return f'<div class="tables">{"".join(f"<div class=scroll>{t}</div>" for t in tables)}</div>' if tables else ""


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table of texts and numbers."""

    def cells(kind: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(str(v))}</{kind}>" for v in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', head)}</thead><tbody>{body}</tbody></table>"


def rounded(values: Tensor, digits: int = 4) -> Any:
    """Nested lists of numbers with few digits; NaN is 0."""
    scaled = (values.cpu().double() * 10**digits).round() / 10**digits
    return torch.nan_to_num(scaled).tolist()


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
