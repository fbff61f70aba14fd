"""More pictures: the logit lens, tokens with their surprise, positions, embeddings, and what fills a blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from heedful.observe.figures import (
    CELL,
    SIDE,
    SLATE,
    _draw,
    _label,
    _name,
    colormap,
    figure_style,
    new_figure,
    shorten_label,
)
from heedful.plotting import ACCENT, GREY, INK, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from heedful.observe.fill import Filled
    from heedful.observe.lens import Lens

MONOSPACE = "DejaVu Sans Mono"
PAGE = 8.5  # inches: nothing is taller
LINE = 84  # characters of a line of tokens
CROWDED = 60  # words: names stand on their own side of the diagonal alone
LABELLED = 14  # points of a chart on each side that have names


def lens(found: Lens, tokens: Sequence[str], pieces: Sequence[Sequence[str]], *, title: str = "") -> Figure:
    """The best token after each layer (rows, the first at the bottom) at each position, tinted by its probability; a
    long text goes on below, and of one that is too long the end is shown."""
    chances = np.asarray(found.probabilities[:, :, 0], dtype=float)
    n_layers, n_all = chances.shape
    longest = max(4, *(len(shorten_label(word, 9)) for row in (*pieces, tokens) for word in row))
    wide, tall = 0.085 * longest + 0.06, 0.25
    per = max(1, int(SIDE / wide))
    most = max(1, int(PAGE / (n_layers * tall + 0.4)))
    n_strips = min(most, -(-n_all // per))
    first = max(0, n_all - per * n_strips)
    per = -(-(n_all - first) // n_strips)  # of about one length
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
            _quiet(axes)
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        left = f" (the last {n_all - first} of {n_all} tokens)" if first else ""
        figure.supylabel("after layer", fontsize=8, color=GREY)
        grid[-1].set_xlabel(f"read{left}", fontsize=8, color=GREY)
        if title:
            grid[0].set_title(title, fontsize=9, loc="left", pad=8)
        bar = figure.colorbar(image, ax=list(grid), fraction=0.05, pad=0.02, shrink=0.7 / len(strips), aspect=18)
        _trim(bar, "probability")
    return figure


def tokens(labels: Sequence[str], ids: Sequence[int], surprise: Sequence[float | None], *, title: str = "") -> Figure:
    """A text cut into its tokens, each with its number, tinted by how surprised the model was (bits)."""
    boxes, lines, at = [], 0, 0.0
    for label, index, bits in zip(labels, ids, surprise, strict=True):
        text = shorten_label(label, 24) if label.strip() else label
        width = max(len(text), len(str(index)) * 0.8) + 1.2
        if at and at + width > LINE:
            at, lines = 0.0, lines + 1
        boxes.append((at, lines, width, text, index, bits))
        at += width + 0.35
    across = max((x + width for x, _, width, *_ in boxes), default=1.0)
    known = [bits for bits in surprise if bits is not None]
    most = max([*known, 8.0])
    with figure_style():
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.patches import FancyBboxPatch

        figure = new_figure(across * 0.082 + (1.0 if known else 0.3), (lines + 1) * 0.46 + (0.5 if title else 0.2))
        axes = figure.add_subplot()
        scale = colormap()
        for x, line, width, text, index, bits in boxes:
            tint = "#f4f4f2" if bits is None else scale(0.85 * bits / most)
            dark = bits is not None and bits / most > 0.62
            style_of: Any = {
                "boxstyle": "round,pad=0,rounding_size=0.28",
                "linewidth": 0,
                "mutation_aspect": 0.3,
            }
            axes.add_patch(FancyBboxPatch((x, -line - 0.36), width, 0.66, facecolor=tint, **style_of))
            middle = x + width / 2
            axes.text(
                middle, -line + 0.06, text, ha="center", va="center", fontsize=8, family=MONOSPACE,
                color="white" if dark else INK,
            )  # fmt: skip
            axes.text(
                middle, -line - 0.23, str(index), ha="center", va="center", fontsize=5, family=MONOSPACE,
                color="white" if dark else GREY,
            )  # fmt: skip
        axes.set(xlim=(-0.2, across + 0.2), ylim=(-lines - 0.55, 0.45))
        axes.axis("off")
        if title:
            axes.set_title(title, fontsize=9, loc="left", color=INK)
        if known:
            image = ScalarMappable(Normalize(0, most), colormap())
            _bar(figure, image, axes, "surprise (bits)", shrink=min(1.0, 1.2 / ((lines + 1) * 0.46)))
    return figure


def positions(values: Tensor | np.ndarray, *, title: str = "", column_name: str = "dimension") -> Figure:
    """What tells positions (rows) apart, dimension by dimension: the stripes of Vaswani et al."""
    matrix = np.asarray(values, dtype=float)
    n, width = matrix.shape
    with figure_style():
        figure = new_figure(5.6, max(1.6, min(6.0, 4.6 * n / width)) + 0.7)
        axes = figure.add_subplot()
        image = _draw(axes, matrix, True, usual_reach(matrix))
        axes.set_aspect("auto")
        for axis, count in ((axes.xaxis, width), (axes.yaxis, n)):
            axis.set_ticks(_round_ticks(count))
            axis.set_tick_params(length=2, width=0.5, labelsize=7.5)
        _name(axes, "position", column_name)
        if title:
            axes.set_title(title, fontsize=9, loc="left", pad=8)
        _bar(figure, image, axes, "")
    return figure


def usual_reach(values: Tensor | np.ndarray) -> float:
    """The largest of what is shown in full colour: a few outliers must not make the rest pale."""
    return float(np.quantile(np.abs(np.asarray(values, dtype=float)), 0.998)) or 1.0


def curves(x: Sequence[float], lines: Tensor | np.ndarray, *, title: str, x_name: str, y_name: str) -> Figure:
    """A line for each head (H, N): what distance adds to the scores."""
    values = np.asarray(lines, dtype=float)
    with figure_style():
        figure = new_figure(5.2, 2.9)
        axes = figure.add_subplot()
        shade = [colormap()(0.3 + 0.65 * i / max(1, len(values) - 1)) for i in range(len(values))]
        for i, row in enumerate(values):
            axes.plot(x, row, color=shade[i], linewidth=1.0)
        gap, height = 0.045 * float(np.ptp(values)), -np.inf
        for i in np.argsort(values[:, -1], kind="stable").tolist():  # one above the other
            height = max(float(values[i, -1]), height + gap)
            axes.annotate(
                str(i), (x[-1], height), xytext=(4, 0), textcoords="offset points", fontsize=6.5, color=shade[i],
                va="center", annotation_clip=False,
            )  # fmt: skip
        axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(x_name, fontsize=8, color=GREY)
        axes.set_ylabel(y_name, fontsize=8, color=GREY)
        axes.set_title(title, fontsize=9, loc="left", pad=8)
    return figure


def similarities(matrices: Sequence[Tensor], names: Sequence[str], labels: Sequence[str], *, title: str = "") -> Figure:
    """Cosines between the tokens of a text, in several layers: how context makes them alike."""
    count, n = len(matrices), len(labels)
    cell = min(CELL * 0.8, 7.0 / (count * n))
    room = 0.075 * max((len(shorten_label(label)) for label in labels), default=0)
    with figure_style():
        figure = new_figure(count * (n * cell + 0.15) + room + 0.8, n * cell + room + 0.6)
        grid: Any = figure.subplots(1, count, squeeze=False)[0]
        image: Any = None
        for i, axes in enumerate(grid):
            image = _draw(axes, np.asarray(matrices[i], dtype=float), True, 1.0)
            _label(axes, labels if i == 0 else None, labels, cell)
            axes.set_xlabel(names[i], fontsize=7.5, color=GREY)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        bar = figure.colorbar(image, ax=list(grid), fraction=0.03, pad=0.02, shrink=0.7, aspect=18)
        _trim(bar, "cosine")
    return figure


def over_image(image: Tensor, weights: Tensor, *, title: str = "", said: str = "") -> Figure:
    """An image (C, height, width) from -1 to 1, and how much of each patch (rows, columns) came to [CLS]."""
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
            _quiet(axes)
            axes.set(xticks=[], yticks=[])
        tint = np.broadcast_to(np.array(to_rgb(ACCENT)), (*heat.shape, 3))
        veil = np.dstack([tint, 0.9 * heat / (heat.max() or 1.0)])  # the more it looked, the less one sees through
        grid[1].imshow(veil, interpolation="nearest", extent=(0, width, height, 0))
        grid[0].set_xlabel(said, fontsize=8, color=GREY)
        grid[1].set_xlabel(f"where [CLS] looked (at most {100 * heat.max():.0f} %)", fontsize=8, color=GREY)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure


# --- what fills a blank ----------------------------------------------------------------------------------------------


def blank(found: Filled, *, title: str = "", pairs: Sequence[tuple[int, int]] | None = None) -> Figure:
    """One sentence: bars. Two: the likelihoods of each word in both, and the difference against the mean. More: the
    likelihoods of chosen pairs, side by side (the first sentence with each other one unless given)."""
    n = len(found.sentences)
    if n == 1:
        return _bars(found, title)
    if n == 2:
        chosen: list[tuple[int, int, bool]] = [(0, 1, False), (0, 1, True)]
    else:
        chosen = [(a, b, False) for a, b in (pairs or [(0, i) for i in range(1, min(n, 7))])]
    across = min(3, len(chosen)) if len(chosen) != 4 else 2
    down = -(-len(chosen) // across)
    with figure_style():
        figure = new_figure(across * 3.3, down * 3.3 + (0.3 if title else 0))
        grid: Any = figure.subplots(down, across, squeeze=False)
        for axes in list(grid.flat)[len(chosen) :]:
            axes.axis("off")
        points = [
            _scatter(axes, found, a, b, difference) for axes, (a, b, difference) in zip(grid.flat, chosen, strict=False)
        ]
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        figure.draw_without_rendering()  # from here on a point has its place
        for axes, (a, b, difference), place in zip(grid.flat, chosen, points, strict=False):
            gap = (found.logprobs[a] - found.logprobs[b]).numpy()
            _name_points(axes, found.words, place, gap, left=not difference)
    return figure


def _bars(found: Filled, title: str) -> Figure:
    best = found.top(0, 20)
    with figure_style():
        figure = new_figure(4.6, 0.19 * len(best) + 0.7)
        axes = figure.add_subplot()
        chances = [100 * p for _, p in best]
        axes.barh(range(len(best)), chances, color=ACCENT, height=0.68)
        axes.set_yticks(range(len(best)), [shorten_label(word, 24) for word, _ in best], fontsize=8)
        axes.invert_yaxis()
        for i, chance in enumerate(chances):
            axes.annotate(
                f"{chance:.2g} %", (chance, i), xytext=(3, 0), textcoords="offset points", fontsize=7, color=GREY,
                va="center",
            )  # fmt: skip
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.margins(x=0.12)
        axes.set_title(title or shorten_label(str(found.sentences[0]), 70), fontsize=9, loc="left")
    return figure


def _scatter(axes: Axes, found: Filled, a: int, b: int, difference: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each word a point: its likelihood in both sentences; or the mean of both, and by how much they differ."""
    rows = found.logprobs.numpy() / np.log(10)
    one, other = rows[a], rows[b]
    gap = one - other
    x, y = ((one + other) / 2, gap) if difference else (other, one)
    most = max(float(np.abs(gap).max()), 1e-6)
    axes.scatter(x, y, c=gap, cmap=colormap(signed=True), vmin=-most, vmax=most, s=9, linewidths=0.25, edgecolors=GREY)
    names = shorten_label(found.sentences[a].name, 24), shorten_label(found.sentences[b].name, 24)
    if difference:
        axes.axhline(0, color=PALE, linewidth=0.7, zorder=0)
        axes.set_xlabel("mean of log₁₀ p", fontsize=8, color=GREY)
        axes.set_ylabel(f"← {names[1]}    log₁₀ ratio    {names[0]} →", fontsize=8, color=GREY)
    else:
        low, high = float(min(one.min(), other.min())), float(max(one.max(), other.max()))
        axes.plot([low, high], [low, high], color=PALE, linewidth=0.7, zorder=0)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel(f"log₁₀ p   {names[1]}", fontsize=8, color=GREY)
        axes.set_ylabel(f"log₁₀ p   {names[0]}", fontsize=8, color=GREY)
    axes.margins(0.1)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return x, y


def _name_points(
    axes: Axes, words: Sequence[str], points: tuple[np.ndarray, np.ndarray], gap: np.ndarray, *, left: bool
) -> None:
    """Names for the most extreme words and for the likeliest, as many as lie neither on one another nor outside; those
    above the diagonal have them on the `left`."""
    x, y = points
    extreme = np.argsort(-np.abs(gap), kind="stable")[: 4 * LABELLED]
    likely = np.argsort(-x, kind="stable")[:LABELLED]
    frame, scale = axes.get_window_extent(), axes.figure.dpi / 72  # pixels of a point
    font, taken = 6.5, list[tuple[float, float, float, float]]()
    for i in dict.fromkeys([*extreme.tolist(), *likely.tolist()]):
        word, (px, py) = shorten_label(words[i], 16), axes.transData.transform((x[i], y[i]))
        wide, tall = (0.62 * font * len(word) + 2) * scale, 1.15 * font * scale
        sides: list[Literal["left", "right"]] = ["right", "left"] if gap[i] > 0 and left else ["left", "right"]
        for side in sides[
            : 1 if left and len(words) > CROWDED else 2
        ]:  # where the text is held: a text on the left ends at its point
            begin = px - wide - 3 * scale if side == "right" else px + 3 * scale
            box = begin, py - tall / 2, begin + wide, py + tall / 2
            inside = box[0] > frame.x0 and box[2] < frame.x1 and box[1] > frame.y0 and box[3] < frame.y1
            if inside and not any(_meet(box, other) for other in taken):
                taken += [box, (px - 2 * scale, py - 2 * scale, px + 2 * scale, py + 2 * scale)]
                made = axes.annotate(
                    word, (x[i], y[i]), xytext=(-4 if side == "right" else 4, 0), textcoords="offset points",
                    fontsize=font, color=ACCENT if gap[i] > 0 else SLATE, ha=side, va="center",
                )  # fmt: skip
                made.set_in_layout(False)
                break
        if len(taken) >= 4 * LABELLED:
            break


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# --- small things ----------------------------------------------------------------------------------------------------


def _quiet(axes: Axes) -> None:
    axes.tick_params(length=0, pad=3, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set(edgecolor=PALE, linewidth=0.6)


def _bar(figure: Figure, image: Any, axes: Axes, name: str, shrink: float = 0.7) -> None:
    _trim(figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, shrink=shrink, aspect=18), name)


def _trim(bar: Any, name: str) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, labelsize=7)
    bar.set_label(name, fontsize=7.5)


def _round_ticks(count: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 512, 10**9) if count / s <= 9)
    return list(range(0, count, step))
