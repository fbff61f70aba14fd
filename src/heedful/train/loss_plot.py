"""The plot of a run's losses: training loss raw and smoothed, validation loss, baselines.

The run's own curve is in the accent colour, everything it is compared with in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heedful.plotting import ACCENT, GREY, INK, PALE, RC_PARAMS

SIZE = (5.4, 3.3)  # inches: a column and a half of most papers
MAX_POINTS = 4000
LABEL_GAP = 0.05  # between two labels, as a fraction of the height


def plot_losses(
    path: Path,
    training: tuple[Sequence[float], Sequence[float]],
    validation: tuple[Sequence[float], Sequence[float]],
    baselines: Mapping[str, float],
    *,
    unit: str = "",
) -> None:
    """Write the plot to a file. `training` and `validation` are (steps, losses); non-finite losses are left out."""
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
            thin = slice(None, None, max(1, len(steps) // MAX_POINTS))
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
        for height, (_, text, colour) in _spread(labels, (high - low) * LABEL_GAP):
            axes.annotate(
                text, (1, height), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                va="center", color=colour, fontsize=7.5, annotation_clip=False,
            )  # fmt: skip
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss ({unit})" if unit else "loss")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def smooth(losses: Sequence[float] | np.ndarray) -> np.ndarray:
    """A centred moving average over n/60 points on each side; narrower at the start, where the loss falls steeply, and
    at the end."""
    n = len(losses)
    place = np.arange(n)
    reach = np.minimum(n // 60, place // 8)
    begin, end = place - reach, np.minimum(place + reach + 1, n)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(losses, dtype=float))])
    return (sums[end] - sums[begin]) / (end - begin)


def _finite(steps: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The points whose value is finite."""
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    good = np.isfinite(y)
    return x[good], y[good]


def _limits(losses: np.ndarray, shown: list[float]) -> tuple[float, float]:
    """Limits of the y axis: spikes of the raw training loss may leave the plot."""
    if not shown:
        return 0.0, 1.0
    low = min(min(shown), float(np.quantile(losses, 0.01)) if len(losses) else math.inf)
    margin = 0.05 * (max(shown) - low) or 0.5
    return low - margin, max(shown) + margin


def _spread(labels: list[tuple[float, str, str]], gap: float) -> list[tuple[float, tuple[float, str, str]]]:
    """The y position of each label: its value, moved up where it would overlap the label below."""
    placed: list[tuple[float, tuple[float, str, str]]] = []
    for label in sorted(labels):
        placed.append((max(label[0], placed[-1][0] + gap) if placed else label[0], label))
    return placed
