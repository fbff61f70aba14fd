"""Charts as matplotlib figures: tokens with their surprisal, lines by distance, the words that fill a blank, and
differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from heedful.observe.figures import SLATE, add_colorbar, colormap, figure_style, new_figure, shorten_label
from heedful.plotting import ACCENT, GREY, INK, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from heedful.observe.fill import Filled

MONOSPACE = "DejaVu Sans Mono"
LINE = 84  # characters of a line of tokens
CROWDED = 60  # words: labels stand on their own side of the diagonal alone
LABELLED = 14  # points of a chart on each side that have labels


def token_chart(
    labels: Sequence[str], ids: Sequence[int], surprisal: Sequence[float | None], *, title: str = ""
) -> Figure:
    """The tokens of a text with their ids, each coloured by its surprisal, -log2 p (bits)."""
    boxes, lines, at = [], 0, 0.0
    for label, index, bits in zip(labels, ids, surprisal, strict=True):
        text = shorten_label(label, 24) if label.strip() else label
        width = max(len(text), len(str(index)) * 0.8) + 1.2
        if at and at + width > LINE:
            at, lines = 0.0, lines + 1
        boxes.append((at, lines, width, text, index, bits))
        at += width + 0.35
    across = max((x + width for x, _, width, *_ in boxes), default=1.0)
    known = [bits for bits in surprisal if bits is not None]
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
            add_colorbar(figure, image, axes, "surprise (bits)", shrink=min(1.0, 1.2 / ((lines + 1) * 0.46)))
    return figure


def line_chart(x: Sequence[float], lines: Tensor | np.ndarray, *, title: str, x_name: str, y_name: str) -> Figure:
    """A line for each head (H, N): the attention bias by distance."""
    values = np.asarray(lines, dtype=float)
    with figure_style():
        figure = new_figure(5.2, 2.9)
        axes = figure.add_subplot()
        shade = [colormap()(0.3 + 0.65 * i / max(1, len(values) - 1)) for i in range(len(values))]
        for i, row in enumerate(values):
            axes.plot(x, row, color=shade[i], linewidth=1.0)
        gap, height = 0.045 * float(np.ptp(values)), -np.inf
        for i in np.argsort(values[:, -1], kind="stable").tolist():  # labels one above the other
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


def interval_chart(
    points: Sequence[tuple[str, float, float | None, float | None]], x_name: str, whole: float | None = None
) -> Figure:
    """Names with a value each and its interval (low, high), one under the other; a line at 0, one at `whole`."""
    with figure_style():
        figure = new_figure(5.6, 0.19 * len(points) + 0.7)
        axes = figure.add_subplot()
        axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
        if whole is not None:
            axes.axvline(whole, color=PALE, linewidth=1.4, zorder=0)
        for i, (_, value, low, high) in enumerate(points):
            clear = low is not None and high is not None and (low > 0 or high < 0)
            tint = (ACCENT if value > 0 else SLATE) if clear else GREY
            if low is not None and high is not None:
                axes.plot([low, high], [i, i], color=tint, linewidth=1.4, solid_capstyle="butt")
            axes.plot([value], [i], marker="o", markersize=3.6, color=tint)
        axes.set_yticks(range(len(points)), [shorten_label(name, 32) for name, *_ in points], fontsize=8)
        axes.set_ylim(len(points) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
        axes.set_xlabel(x_name, fontsize=8, color=GREY)
    return figure


def fill_chart(found: Filled, *, title: str = "", pairs: Sequence[tuple[int, int]] | None = None) -> Figure:
    """The words that fill a blank. One sentence: a bar chart. Two: scatter plots of their log-probabilities in both,
    and of the difference against the mean. More: a scatter plot for each of `pairs`, by default the first sentence with
    each other one."""
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
        figure.draw_without_rendering()  # fixes the layout, so that points have pixel coordinates
        for axes, (a, b, difference), place in zip(grid.flat, chosen, points, strict=False):
            gap = (found.logprobs[a] - found.logprobs[b]).numpy()
            _label_points(axes, found.words, place, gap, left=not difference)
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
    """A point for each word: its log p in sentences a and b, or with `difference` their mean and their difference."""
    rows = found.logprobs.numpy()
    one, other = rows[a], rows[b]
    gap = one - other
    x, y = ((one + other) / 2, gap) if difference else (other, one)
    most = max(float(np.abs(gap).max()), 1e-6)
    axes.scatter(x, y, c=gap, cmap=colormap(signed=True), vmin=-most, vmax=most, s=9, linewidths=0.25, edgecolors=GREY)
    names = shorten_label(found.sentences[a].name, 24), shorten_label(found.sentences[b].name, 24)
    if difference:
        axes.axhline(0, color=PALE, linewidth=0.7, zorder=0)
        axes.set_xlabel("mean of log p", fontsize=8, color=GREY)
        axes.set_ylabel(f"← {names[1]}    log ratio    {names[0]} →", fontsize=8, color=GREY)
    else:
        low, high = float(min(one.min(), other.min())), float(max(one.max(), other.max()))
        axes.plot([low, high], [low, high], color=PALE, linewidth=0.7, zorder=0)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel(f"log p   {names[1]}", fontsize=8, color=GREY)
        axes.set_ylabel(f"log p   {names[0]}", fontsize=8, color=GREY)
    axes.margins(0.1)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return x, y


def _label_points(
    axes: Axes, words: Sequence[str], points: tuple[np.ndarray, np.ndarray], gap: np.ndarray, *, left: bool
) -> None:
    """Label the words with the largest differences and the likeliest ones, where a label fits and overlaps no other;
    with `left`, points above the diagonal have theirs on the left."""
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
            if inside and not any(_overlap(box, other) for other in taken):
                taken += [box, (px - 2 * scale, py - 2 * scale, px + 2 * scale, py + 2 * scale)]
                made = axes.annotate(
                    word, (x[i], y[i]), xytext=(-4 if side == "right" else 4, 0), textcoords="offset points",
                    fontsize=font, color=ACCENT if gap[i] > 0 else SLATE, ha=side, va="center",
                )  # fmt: skip
                made.set_in_layout(False)
                break
        if len(taken) >= 4 * LABELLED:
            break


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
