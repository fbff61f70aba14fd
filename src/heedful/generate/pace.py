"""How much prefill fits into a time: the speed of the passes so far, and how a prompt's cost grows with its length.

A token's cost is that of its matrix products, 1, and of attending to the tokens before it. Two prompts of the same
number of tokens may differ much: a step that prefills a fixed number would take longer and longer.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from heedful.models.base import GenerativeModel
from heedful.nn.attention import Attention

ATTENTION = 2.0  # seconds per operation of attention, relative to those of the products with weights
FIRST = 64.0  # cost of the first chunk, before any time is known
LEAST = 16.0  # cost of a chunk while nothing is decoded: fewer tokens wait for the weights more than for anything else
WEIGHT = 0.5  # of the newest measurement
PREFILL_SHARE = 1.25  # seconds of prefill per second of decoding, in a step that does both
MIN_PREFILL = 0.005  # seconds of prefill that nobody notices in a step: small models need not divide short prompts
MAX_DEBT = 4.0  # steps without prefill at most, after one that took too long
REFRESH = 32  # steps after which a decode pass is timed again without company


def cost_per_key(model: GenerativeModel[Any]) -> float:
    """What attending to one token costs, in multiples of a token's products with the weights."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    products = sum(4 * layer.n_heads * layer.d_head for layer in layers)  # with keys and values, two operations each
    return ATTENTION * products / max(1, 2 * model.n_parameters())


class PrefillPace:
    """Costs of prompt tokens in multiples of a first token's, the time that a cost takes, and so what a step may do.

    `per_key` is the cost of attending to one token, 0 if it does not count; `step_time` the seconds of prefill in a
    step while no row decodes, None for no bound.
    """

    def __init__(self, per_key: float = 0.0, step_time: float | None = None) -> None:
        self.per_key, self.step_time = per_key, step_time
        self.speed: float | None = None  # cost per second
        self.decode_seconds = 0.0  # of a decode pass without prefill
        self._debt = 0.0  # seconds by which prefill beside decoding took more than its share
        self._since = REFRESH  # steps since that was measured

    def cost(self, start: int, n: int) -> float:
        """The cost of n tokens from position `start` on."""
        return n * (1 + self.per_key * (start + n / 2))

    def fitting(self, start: int, cost: float) -> int:
        """How many tokens from position `start` on have at most this cost."""
        if math.isinf(cost):
            return sys.maxsize
        if not self.per_key:
            return int(cost)
        linear = 1 + self.per_key * start
        return int((math.sqrt(linear**2 + 2 * self.per_key * max(0.0, cost)) - linear) / self.per_key)

    def budget(self, *, decoding: bool) -> float:
        """The cost of what a step may prefill; beside rows that decode less than alone, and nothing after steps whose
        prefill took too long: a few tokens of a long prompt may take longer than a decode pass."""
        if self.step_time is None:
            return math.inf
        seconds = self.step_time
        if decoding:
            seconds = self._share - self._debt
            if seconds <= 0:
                return 0.0
        cost = FIRST if self.speed is None else seconds * self.speed
        return cost if decoding else max(LEAST, cost)

    @property
    def _share(self) -> float:
        """Seconds of prefill in a step that decodes too. All of the step should take no more than step_time."""
        assert self.step_time is not None
        left = max(self.step_time - self.decode_seconds, self.decode_seconds / 4)
        return max(MIN_PREFILL, min(PREFILL_SHARE * self.decode_seconds, left))

    def may_combine(self) -> bool:
        """Whether decode and prefill may share a pass in this step; now and then not, to time each."""
        self._since += 1
        return self._since < REFRESH

    def record_decode(self, seconds: float) -> None:
        """Learn from a decode pass without prefill."""
        before = self.decode_seconds or seconds
        self.decode_seconds, self._since = before + WEIGHT * (seconds - before), 0

    def record(self, cost: float, seconds: float, *, decoding: bool = False, combined: bool = False) -> None:
        """Learn from a step's prefill, in a step that decodes too or not, `combined` in one pass or not. Small ones,
        which mostly wait for the weights, count less."""
        if combined:
            seconds = max(seconds - self.decode_seconds, 0.2 * seconds)
        if self.step_time is not None:
            debt = self._debt + (seconds if cost > 0 else 0.0) - self._share
            self._debt = min(max(0.0, debt), MAX_DEBT * self._share) if decoding else 0.0
        if cost <= 0 or seconds <= 0:
            return
        measured, weight = cost / seconds, WEIGHT * min(1.0, cost / FIRST)
        self.speed = measured if self.speed is None else (1 - weight) * self.speed + weight * measured
