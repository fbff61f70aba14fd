"""The picture of a training: its loss, thin as it was and smoothed; validation; what to compare it with.

One colour says what the run did; all that it is compared with is grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heedful.plotting import ACCENT, GREY, INK, PALE, RC_PARAMS

SIZE = (5.4, 3.3)  # inches: a column and a half of most papers
MOST_POINTS = 4000
GAP = 0.05  # between two labels, as a share of the height


def draw(
    path: Path,
    training: tuple[Sequence[float], Sequence[float]],
    validation: tuple[Sequence[float], Sequence[float]],
    baselines: Mapping[str, float],
    *,
    unit: str = "",
) -> None:
    """Write the picture; steps and losses come in pairs of equal length. Losses that are not finite are left out."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = _finite(*training)
    points, scores = _finite(*validation)
    mean = smooth(losses)
    labels = [(value, f"{name} {value:.2f}", GREY) for name, value in baselines.items()]
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=SIZE, dpi=220, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for value in baselines.values():
            axes.axhline(value, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=2)
        if len(steps):
            thin = slice(None, None, max(1, len(steps) // MOST_POINTS))
            axes.plot(steps[thin], losses[thin], color=PALE, linewidth=0.5, zorder=1)
            axes.plot(steps[thin], mean[thin], color=ACCENT, linewidth=1.4, zorder=3)
            labels.append((mean[-1], f"training {mean[-1]:.2f}", ACCENT))
        if len(points):
            dots: dict[str, Any] = {"markersize": 3.8, "marker": "o", "linestyle": "none"}
            dots |= {"markeredgecolor": "white", "markeredgewidth": 0.5}
            axes.plot(points, scores, color=INK, zorder=4, **dots)
            labels.append((scores[-1], f"validation {scores[-1]:.2f}", INK))
        low, high = _limits(losses, [*mean, *scores, *baselines.values()])
        axes.set_ylim(low, high)
        axes.margins(x=0.015)
        for height, (_, text, colour) in _spread(labels, (high - low) * GAP):
            axes.annotate(
                text, (1, height), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                va="center", color=colour, fontsize=7.5, annotation_clip=False,
            )  # fmt: skip
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss ({unit})" if unit else "loss")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def smooth(losses: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean over a sixtieth of the run on each side; over less at the beginning, where the loss falls steeply, and
    over what there is at the end."""
    n = len(losses)
    place = np.arange(n)
    reach = np.minimum(n // 60, place // 8)
    begin, end = place - reach, np.minimum(place + reach + 1, n)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(losses, dtype=float))])
    return (sums[end] - sums[begin]) / (end - begin)


def _finite(steps: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    good = np.isfinite(y)
    return x[good], y[good]


def _limits(losses: np.ndarray, shown: list[float]) -> tuple[float, float]:
    """All that is shown but for spikes of the thin curve, which may leave the picture."""
    if not shown:
        return 0.0, 1.0
    low = min(min(shown), float(np.quantile(losses, 0.01)) if len(losses) else math.inf)
    room = 0.05 * (max(shown) - low) or 0.5
    return low - room, max(shown) + room


def _spread(labels: list[tuple[float, str, str]], gap: float) -> list[tuple[float, tuple[float, str, str]]]:
    """The height of each label: its value, or above the label below it."""
    placed: list[tuple[float, tuple[float, str, str]]] = []
    for label in sorted(labels):
        placed.append((max(label[0], placed[-1][0] + gap) if placed else label[0], label))
    return placed
