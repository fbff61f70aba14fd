"""Pictures for papers and pages: small, light, one accent colour, every label readable.

Each function makes a matplotlib Figure; `save` writes it as PNG, SVG or PDF, `svg` gives it as text for a page.
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
    from torch import Tensor

ENDINGS = (".png", ".svg", ".pdf")
SLATE = "#3f5468"  # the other side of zero
SIDE = 6.4  # inches: no map is larger
CELL = 0.24  # inches: none of its cells, either
MOST_LABELS = 64  # more cannot be read
READABLE = 0.07  # inches: of smaller cells not every one has a label
OURS: Any = {**RC_PARAMS, "text.parse_math": False, "svg.hashsalt": "heedful"}  # a token "$" is a dollar


@contextmanager
def figure_style() -> Iterator[None]:
    """Our settings; a character that no font here has is drawn as a box, and that is no reason to complain."""
    import matplotlib

    with matplotlib.rc_context(OURS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=220, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a picture is written as {', '.join(ENDINGS)}")
    with figure_style():
        figure.savefig(path, bbox_inches="tight", pad_inches=0.08, metadata=_dateless(path.suffix.lower()))


def _dateless(ending: str) -> dict[str, Any]:
    """The same picture is the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})


def svg(figure: Figure) -> str:
    """The picture as an SVG element to stand in a page."""
    file = io.StringIO()
    with figure_style():
        figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def colormap(signed: bool = False) -> Any:
    """White to the accent; where zero is in the middle, from slate through white."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = [SLATE, "#ffffff", ACCENT] if signed else ["#ffffff", "#f3d3ca", ACCENT, "#7c2c1c"]
    return LinearSegmentedColormap.from_list("heedful", stops)


# --- maps ------------------------------------------------------------------------------------------------------------


def heatmap(
    values: Tensor | np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str = "",
    row_name: str = "",
    column_name: str = "",
    scale: str = "",
    signed: bool = False,
    top: float | None = None,
    gamma: float = 1.0,
) -> Figure:
    """A matrix with its labels; the scale goes from 0 to `top`, the largest value unless given, and with a `gamma`
    below 1 shows more of what is small."""
    matrix = np.asarray(values, dtype=float)
    n_rows, n_columns = matrix.shape
    cell = min(CELL, SIDE / max(n_rows, n_columns))
    with figure_style():
        figure = new_figure(max(1.6, n_columns * cell) + 1.3, max(1.2, n_rows * cell) + 1.0)
        axes = figure.add_subplot()
        image = _draw(axes, matrix, signed, top, gamma)
        _label(axes, rows, columns, cell)
        _name(axes, row_name, column_name)
        if title:
            axes.set_title(title, fontsize=9, color=INK, loc="left", pad=8)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, shrink=0.7, aspect=18)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2, width=0.5, labelsize=7)
        bar.set_label(scale, fontsize=7.5)
    return figure


def head_heatmaps(
    values: Tensor | np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    names: Sequence[str],
    *,
    title: str = "",
    across: int | None = None,
) -> Figure:
    """Several matrices (N, T, S) side by side, each scaled from 0 to 1: the heads of a layer."""
    matrices = np.asarray(values, dtype=float)
    count, n_rows, n_columns = matrices.shape
    across = across or _across(count, max(n_columns, n_rows))
    down = -(-count // across)
    cell = min(CELL * 0.8, SIDE / (across * max(n_columns, n_rows)))
    room = 0.085 * max((len(label) for label in rows), default=0) * min(1.0, cell / 0.15)
    with figure_style():
        figure = new_figure(across * (n_columns * cell + 0.18) + room + 0.3, down * (n_rows * cell + 0.32) + room + 0.3)
        grid = figure.subplots(down, across, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i >= count:
                axes.axis("off")
                continue
            _draw(axes, matrices[i], False, 1.0)
            first, left = i < across, i % across == 0
            _label(axes, rows if left else None, columns if first else None, cell)
            axes.set_title(names[i], fontsize=7.5, color=GREY, pad=3, y=-0.16 if first and n_rows < 3 else None)
        if title:
            figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _across(count: int, side: int) -> int:
    """How many maps of so many cells a side stand beside each other: fewer where their labels would be too small."""
    usual = next((n for n in (4, 3, 5) if count % n == 0), min(count, 4))
    fewer = [n for n in (usual, 3, 2) if n <= usual and count % n == 0 and count // n * SIDE / n <= 1.4 * SIDE]
    return next((n for n in fewer if SIDE / (n * side) >= READABLE), min(fewer, default=usual))


def head_thumbnails(values: Tensor | np.ndarray, *, title: str = "", row_name: str = "layer") -> Figure:
    """Every head of every layer (L, H, T, S): a row for each layer."""
    matrices = np.asarray(values, dtype=float)
    n_layers, n_heads = matrices.shape[:2]
    size = max(0.28, min(0.9, 7.0 / n_heads))
    tall = size * min(2.0, max(0.5, matrices.shape[2] / matrices.shape[3]))
    with figure_style():
        figure = new_figure(n_heads * (size + 0.05) + 0.6, n_layers * (tall + 0.05) + 0.5)
        grid = figure.subplots(n_layers, n_heads, squeeze=False)
        for layer in range(n_layers):
            for head in range(n_heads):
                axes = grid[layer, head]
                _draw(axes, matrices[layer, head], False, None)
                axes.set(xticks=[], yticks=[])
                if layer == 0:
                    axes.set_title(f"head {head}" if head == 0 else str(head), fontsize=7, color=GREY, pad=3)
                if head == 0:
                    axes.set_ylabel(f"{row_name} {layer}", fontsize=7, color=GREY, rotation=0, ha="right", va="center")
        figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.02, hspace=0.02)  # type: ignore[union-attr,call-arg]
        if title:
            figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _draw(axes: Axes, matrix: np.ndarray, signed: bool, top: float | None, gamma: float = 1.0) -> Any:
    from matplotlib.colors import Normalize, PowerNorm

    most = float(np.nanmax(np.abs(matrix))) or 1.0 if top is None else top
    norm = PowerNorm(gamma, 0, most) if gamma != 1 and not signed else Normalize(-most if signed else 0, most)
    image = axes.imshow(matrix, cmap=colormap(signed), norm=norm, aspect="equal", interpolation="nearest")
    for spine in axes.spines.values():
        spine.set(edgecolor=PALE, linewidth=0.6)
    axes.set(xticks=[], yticks=[])
    return image


def _label(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None, cell: float) -> None:
    """Tokens beside the rows and above the columns, in letters that fit the cells."""
    for labels, axis in ((rows, axes.yaxis), (columns, axes.xaxis)):
        if labels is None:
            continue
        step = max(1, -(-len(labels) // MOST_LABELS), int(np.ceil(READABLE / cell)))
        size = max(4.0, min(8.0, step * cell * 72 * 0.72))
        axis.set_ticks(range(0, len(labels), step), [shorten_label(t) for t in labels[::step]], fontsize=size)
        axis.set_tick_params(length=0, pad=2, labelcolor=INK)
    if columns is not None:
        axes.xaxis.tick_top()
        numbers = all(text.lstrip("-").isdecimal() and len(text) <= 2 for text in columns) and cell * step > 0.15
        for label in axes.get_xticklabels():
            upright = len(label.get_text().strip()) <= 1 and cell * step > 0.1
            label.set(rotation=0 if upright or numbers else 90)


def _name(axes: Axes, row_name: str, column_name: str) -> None:
    axes.set_ylabel(row_name, fontsize=8, color=GREY)
    axes.set_xlabel(column_name, fontsize=8, color=GREY)
    axes.xaxis.set_label_position("bottom")


def shorten_label(text: str, most: int = 16) -> str:
    """A label: one line, no more than fits."""
    text = " ".join(text.split()) if text.strip() else text
    return text if len(text) <= most else text[: most - 1] + "…"
