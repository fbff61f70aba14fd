"""Heatmaps as matplotlib figures: attention by head, the logit lens, position encodings, similarities, images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.observe.figures import (
    CELL,
    READABLE,
    SIDE,
    add_colorbar,
    colormap,
    draw_matrix,
    figure_style,
    label_axes,
    name_axes,
    new_figure,
    plain_axes,
    shorten_label,
    style_colorbar,
)  # fmt: skip
from heedful.plotting import ACCENT, GREY, INK
from heedful.text.plural import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from heedful.observe.lens import Lens

PAGE = 8.5  # inches: no figure is taller


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
    """A labelled matrix with a colour bar; the scale ends at `top`, the largest value unless given, and a `gamma` below
    1 shows more of the small values."""
    matrix = np.asarray(values, dtype=float)
    n_rows, n_columns = matrix.shape
    cell = min(CELL, SIDE / max(n_rows, n_columns))
    with figure_style():
        figure = new_figure(max(1.6, n_columns * cell) + 1.3, max(1.2, n_rows * cell) + 1.0)
        axes = figure.add_subplot()
        image = draw_matrix(axes, matrix, signed, top, gamma)
        label_axes(axes, rows, columns, cell)
        name_axes(axes, row_name, column_name)
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
    """The attention weights of the heads of a layer (H, T, S), side by side on a scale from 0 to 1."""
    matrices = np.asarray(values, dtype=float)
    count, n_rows, n_columns = matrices.shape
    across = across or _columns(count, max(n_columns, n_rows))
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
            draw_matrix(axes, matrices[i], False, 1.0)
            first, left = i < across, i % across == 0
            label_axes(axes, rows if left else None, columns if first else None, cell)
            axes.set_title(names[i], fontsize=7.5, color=GREY, pad=3, y=-0.16 if first and n_rows < 3 else None)
        if title:
            figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _columns(count: int, side: int) -> int:
    """The number of columns for `count` heatmaps of `side` cells: fewer where labels would be too small to read."""
    usual = next((n for n in (4, 3, 5) if count % n == 0), min(count, 4))
    fewer = [n for n in (usual, 3, 2) if n <= usual and count % n == 0 and count // n * SIDE / n <= 1.4 * SIDE]
    return next((n for n in fewer if SIDE / (n * side) >= READABLE), min(fewer, default=usual))


def head_thumbnails(values: Tensor | np.ndarray, *, title: str = "", row_name: str = "layer") -> Figure:
    """The attention weights of every head of every layer (L, H, T, S), small, a row for each layer."""
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
                draw_matrix(axes, matrices[layer, head], False, None)
                axes.set(xticks=[], yticks=[])
                if layer == 0:
                    axes.set_title(f"head {head}" if head == 0 else str(head), fontsize=7, color=GREY, pad=3)
                if head == 0:
                    axes.set_ylabel(f"{row_name} {layer}", fontsize=7, color=GREY, rotation=0, ha="right", va="center")
        figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.02, hspace=0.02)  # type: ignore[union-attr,call-arg]
        if title:
            figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def lens_heatmap(found: Lens, tokens: Sequence[str], pieces: Sequence[Sequence[str]], *, title: str = "") -> Figure:
    """The logit lens: the likeliest token after each layer (rows, the first at the bottom) at each position, coloured
    by its probability. A long text is wrapped into strips; of one that is too long the end is shown."""
    chances = np.asarray(found.probabilities[:, :, 0], dtype=float)
    n_layers, n_all = chances.shape
    longest = max(4, *(len(shorten_label(word, 9)) for row in (*pieces, tokens) for word in row))
    wide, tall = 0.085 * longest + 0.06, 0.25
    per = max(1, int(SIDE / wide))
    most = max(1, int(PAGE / (n_layers * tall + 0.4)))
    n_strips = min(most, -(-n_all // per))
    first = max(0, n_all - per * n_strips)
    per = -(-(n_all - first) // n_strips)  # strips of about equal length
    strips = [range(begin, min(begin + per, n_all)) for begin in range(first, n_all, per)]
    with figure_style():
        figure = new_figure(per * wide + 1.2, len(strips) * (n_layers * tall + 0.35) + 0.7)
        grid: Any = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
        for axes, places in zip(grid, strips, strict=True):
            shades = np.full((n_layers, per), np.nan)
            shades[:, : len(places)] = chances[:, places.start : places.stop]
            image = axes.imshow(shades, cmap=colormap(), vmin=0, vmax=1, aspect=tall / wide, origin="lower")
            for layer, place in np.ndindex(n_layers, len(places)):
                word, colour = pieces[layer][places[place]], "white" if shades[layer, place] > 0.5 else INK
                axes.text(place, layer, shorten_label(word, 9), ha="center", va="center", fontsize=7.5, color=colour)
            axes.set_xticks(range(len(places)), [shorten_label(tokens[i], 9) for i in places], fontsize=7.5)
            axes.set_yticks(range(n_layers), found.layers, fontsize=7.5)
            plain_axes(axes)
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        left = f" (the last {n_all - first} of {counted(n_all, 'token')})" if first else ""
        figure.supylabel("after layer", fontsize=8, color=GREY)
        grid[-1].set_xlabel(f"read{left}", fontsize=8, color=GREY)
        if title:
            grid[0].set_title(title, fontsize=9, loc="left", pad=8)
        bar = figure.colorbar(image, ax=list(grid), fraction=0.05, pad=0.02, shrink=0.7 / len(strips), aspect=18)
        style_colorbar(bar, "probability")
    return figure


def position_heatmap(values: Tensor | np.ndarray, *, title: str = "", column_name: str = "dimension") -> Figure:
    """Position encodings, positions by dimensions: the stripes of Vaswani et al. 2017."""
    matrix = np.asarray(values, dtype=float)
    n, width = matrix.shape
    with figure_style():
        figure = new_figure(5.6, max(1.6, min(6.0, 4.6 * n / width)) + 0.7)
        axes = figure.add_subplot()
        image = draw_matrix(axes, matrix, True, robust_max(matrix))
        axes.set_aspect("auto")
        for axis, count in ((axes.xaxis, width), (axes.yaxis, n)):
            axis.set_ticks(_round_ticks(count))
            axis.set_tick_params(length=2, width=0.5, labelsize=7.5)
        name_axes(axes, "position", column_name)
        if title:
            axes.set_title(title, fontsize=9, loc="left", pad=8)
        add_colorbar(figure, image, axes, "")
    return figure


def robust_max(values: Tensor | np.ndarray) -> float:
    """The 99.8 % quantile of the absolute values, as the end of a colour scale that outliers do not stretch."""
    return float(np.quantile(np.abs(np.asarray(values, dtype=float)), 0.998)) or 1.0


def _round_ticks(count: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 512, 10**9) if count / s <= 9)
    return list(range(0, count, step))


def similarity_heatmaps(
    matrices: Sequence[Tensor], names: Sequence[str], labels: Sequence[str], *, title: str = ""
) -> Figure:
    """Cosine similarities between the tokens of a text (T, T), in several layers side by side."""
    count, n = len(matrices), len(labels)
    cell = min(CELL * 0.8, 7.0 / (count * n))
    room = 0.075 * max((len(shorten_label(label)) for label in labels), default=0)
    with figure_style():
        figure = new_figure(count * (n * cell + 0.15) + room + 0.8, n * cell + room + 0.6)
        grid: Any = figure.subplots(1, count, squeeze=False)[0]
        image: Any = None
        for i, axes in enumerate(grid):
            image = draw_matrix(axes, np.asarray(matrices[i], dtype=float), True, 1.0)
            label_axes(axes, labels if i == 0 else None, labels, cell)
            axes.set_xlabel(names[i], fontsize=7.5, color=GREY)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        bar = figure.colorbar(image, ax=list(grid), fraction=0.03, pad=0.02, shrink=0.7, aspect=18)
        style_colorbar(bar, "cosine")
    return figure


def image_overlay(image: Tensor, weights: Tensor, *, title: str = "", prediction: str = "") -> Figure:
    """An image (C, height, width) from -1 to 1, alone and with the weights of its patches (rows, columns) over it."""
    pixels = np.clip((np.asarray(image, dtype=float).transpose(1, 2, 0) + 1) / 2, 0, 1)
    pixels = pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels
    heat = np.asarray(weights, dtype=float)
    height, width = pixels.shape[:2]
    with figure_style():
        from matplotlib.colors import to_rgb

        figure = new_figure(4.6, 2.5)
        grid: Any = figure.subplots(1, 2)
        for axes in grid:
            axes.imshow(pixels, interpolation="nearest", extent=(0, width, height, 0))
            plain_axes(axes)
            axes.set(xticks=[], yticks=[])
        tint = np.broadcast_to(np.array(to_rgb(ACCENT)), (*heat.shape, 3))
        overlay = np.dstack([tint, 0.9 * heat / (heat.max() or 1.0)])  # opacity is the weight
        grid[1].imshow(overlay, interpolation="nearest", extent=(0, width, height, 0))
        grid[0].set_xlabel(prediction, fontsize=8, color=GREY)
        grid[1].set_xlabel(f"where [CLS] looked (at most {100 * heat.max():.0f} %)", fontsize=8, color=GREY)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure
