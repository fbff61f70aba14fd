"""Matplotlib figures: style, colormap, axes, and saving as PNG, SVG or PDF (or as SVG text for an HTML page).

Figures are small and light, with one accent colour, so that they fit a paper and every label can be read.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.plotting import ACCENT, GREY, INK, PALE, RC_PARAMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
SLATE = "#3f5468"  # negative values
SIDE = 6.4  # inches, the largest heatmap
CELL = 0.24  # inches, the largest cell of one
MAX_LABELS = 64  # on an axis
READABLE = 0.07  # inches: where cells are smaller, not every one has a label
OURS: Any = {**RC_PARAMS, "text.parse_math": False, "svg.hashsalt": "heedful"}  # a token "$" begins no formula


@contextmanager
def figure_style() -> Iterator[None]:
    """Our rc parameters; the warning about characters that no font has (they are drawn as boxes) is off."""
    import matplotlib

    with matplotlib.rc_context(OURS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, independent of pyplot and of any display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=220, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of the path."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a picture is written as {', '.join(ENDINGS)}")
    with figure_style():
        figure.savefig(path, bbox_inches="tight", pad_inches=0.08, metadata=_dateless(path.suffix.lower()))


def _dateless(ending: str) -> dict[str, Any]:
    """Metadata without a date, so that the same figure is the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})


def svg(figure: Figure) -> str:
    """The figure as an <svg> element, for an HTML page."""
    file = io.StringIO()
    with figure_style():
        figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def colormap(signed: bool = False) -> Any:
    """Sequential from white to the accent colour, or `signed`: diverging from slate through white at zero."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = [SLATE, "#ffffff", ACCENT] if signed else ["#ffffff", "#f3d3ca", ACCENT, "#7c2c1c"]
    return LinearSegmentedColormap.from_list("heedful", stops)


# --- axes ------------------------------------------------------------------------------------------------------------


def draw_matrix(axes: Axes, matrix: np.ndarray, signed: bool, top: float | None, gamma: float = 1.0) -> Any:
    """Show a matrix as an image; the scale ends at `top`, the largest absolute value if None."""
    from matplotlib.colors import Normalize, PowerNorm

    most = float(np.nanmax(np.abs(matrix))) or 1.0 if top is None else top
    norm = PowerNorm(gamma, 0, most) if gamma != 1 and not signed else Normalize(-most if signed else 0, most)
    image = axes.imshow(matrix, cmap=colormap(signed), norm=norm, aspect="equal", interpolation="nearest")
    for spine in axes.spines.values():
        spine.set(edgecolor=PALE, linewidth=0.6)
    axes.set(xticks=[], yticks=[])
    return image


def label_axes(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None, cell: float) -> None:
    """Tick labels beside the rows and above the columns, in a font size that fits cells of `cell` inches."""
    for labels, axis in ((rows, axes.yaxis), (columns, axes.xaxis)):
        if labels is None:
            continue
        step = max(1, -(-len(labels) // MAX_LABELS), int(np.ceil(READABLE / cell)))
        size = max(4.0, min(8.0, step * cell * 72 * 0.72))
        axis.set_ticks(range(0, len(labels), step), [shorten_label(t) for t in labels[::step]], fontsize=size)
        axis.set_tick_params(length=0, pad=2, labelcolor=INK)
    if columns is not None:
        axes.xaxis.tick_top()
        numbers = all(text.lstrip("-").isdecimal() and len(text) <= 2 for text in columns) and cell * step > 0.15
        for label in axes.get_xticklabels():
            upright = len(label.get_text().strip()) <= 1 and cell * step > 0.1
            label.set(rotation=0 if upright or numbers else 90)


def name_axes(axes: Axes, row_name: str, column_name: str) -> None:
    """Name the rows and the columns."""
    axes.set_ylabel(row_name, fontsize=8, color=GREY)
    axes.set_xlabel(column_name, fontsize=8, color=GREY)
    axes.xaxis.set_label_position("bottom")


def add_colorbar(figure: Figure, image: Any, axes: Axes, name: str, shrink: float = 0.7) -> None:
    """A colour bar beside the axes."""
    style_colorbar(figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, shrink=shrink, aspect=18), name)


def style_colorbar(bar: Any, name: str) -> None:
    """A thin colour bar with small ticks, and its name."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, labelsize=7)
    bar.set_label(name, fontsize=7.5)


def plain_axes(axes: Axes) -> None:
    """No tick marks, and a pale frame."""
    axes.tick_params(length=0, pad=3, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set(edgecolor=PALE, linewidth=0.6)


def shorten_label(text: str, most: int = 16) -> str:
    """A label on one line, cut to `most` characters with an ellipsis."""
    text = " ".join(text.split()) if text.strip() else text
    return text if len(text) <= most else text[: most - 1] + "…"
