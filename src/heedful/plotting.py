"""The colours and matplotlib settings that every figure of the package shares."""

from __future__ import annotations

from typing import Any

ACCENT, GREY, PALE, INK = "#c8553d", "#8a8a8a", "#c9c9c9", "#222222"
RC_PARAMS: Any = {  # for matplotlib.rc_context
    "font.family": "sans-serif", "font.size": 8.5, "axes.linewidth": 0.7, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "xtick.major.size": 3, "ytick.major.size": 3, "svg.fonttype": "none",
}  # fmt: skip
