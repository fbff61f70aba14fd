"""{chart}: a table of RESULTS.md as bars, drawn by matplotlib when the site is built.

    ```{chart} Generation on a CPU
    :table: 1
    :label: program
    :value: batch 1
    :where: precision = float32
    :unit: tokens per second
    ```

The argument is the heading that the table stands under. Rows without a number are left out; those of heedful have the
accent's colour. The text of a chart has the page's colour, so that it can be read on light and dark ones.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from extension.results import RESULTS, Table, tables_of
from heedful.plotting import ACCENT, GREY, RC_PARAMS

TEXT = "#010203"  # replaced by the page's own colour
Bars = list[tuple[str, float, bool]]  # label, value, whether it is heedful's


class Chart(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Callable[[str], object]]] = {
        "table": directives.positive_int, "label": directives.unchanged,
        "value": directives.unchanged_required, "where": directives.unchanged, "unit": directives.unchanged_required,
        "title": directives.unchanged,
    }  # fmt: skip

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RESULTS))
        o = self.options
        try:
            table = tables_of(self.arguments[0])[o.get("table", 1) - 1]
            bars = chosen(table, o["label"], o["value"], o.get("where", ""))
        except (LookupError, ValueError) as problem:
            raise self.error(f"{self.arguments[0]}: {problem!r}") from None
        if len(bars) < 2:
            raise self.error(f"{self.arguments[0]} has no two rows with a number under {o['value']!r}")
        title = o.get("title") or self.arguments[0]
        return [nodes.raw("", f'<figure class="chart">{drawn(bars, o["unit"], title)}</figure>', format="html")]


def chosen(table: Table, label: str, value: str, where: str) -> Bars:
    """The rows that the conditions keep, as bars; "A / compiled" with "1 / 2" is two."""
    head, *rows = table
    at, of = [head.index(name.strip()) for name in label.split(",")], head.index(value)
    wanted = [[part.strip() for part in one.split("=")] for one in where.split(" and ") if one]
    bars = []
    for row in rows:
        if any(plain(row[head.index(column)]) != cell for column, cell in wanted):
            continue
        words, numbers = ", ".join(plain(row[i]) for i in at), row[of].split(" / ")
        names = words.split(" / ") if " / " in words else [words]
        names[1:] = [f"{names[0]}, {more}" for more in names[1:]]
        for name, cell in zip(names, numbers, strict=False):
            if number := re.search(r"\d[\d,]*(?:\.\d+)?", cell):
                bars.append((name, float(number[0].replace(",", "")), name.startswith("heedful")))
    return bars


def plain(text: str) -> str:
    """A cell without emphasis and code."""
    return re.sub(r"\*\*|`", "", text)


def drawn(bars: Bars, unit: str, title: str) -> str:
    """The chart as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), TEXT)
    with matplotlib.rc_context({**RC_PARAMS, **colours, "font.size": 10, "svg.hashsalt": title}):
        labels, values = [textwrap.fill(label, 36) for label, _, _ in bars], [value for _, value, _ in bars]
        figure = Figure(figsize=(7.2, 0.6 + 0.34 * len(bars) + 0.12 * sum(label.count("\n") for label in labels)))
        axes = figure.subplots()
        places = range(len(bars))
        drawn = axes.barh(places, values, color=[ACCENT if ours else GREY for _, _, ours in bars], height=0.7)
        axes.bar_label(drawn, [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in values], padding=4)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.set_xlim(0, max(values) * 1.12)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"|<svg ', lambda m: f"<svg {m[1] or ''}", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def setup(app: Sphinx) -> None:
    app.add_directive("chart", Chart)
