"""Bias of a model, measured: scores of sentences that differ in a group alone, and the differences between groups.

A test (bias_tests.py) is a full table: every template with every value of its places and every member of a group. So
are its scores (bias_scores.py), whatever the model is. Two groups are compared with each other, more of them each with
the mean of all. The 95 % intervals are those of a bootstrap that resamples templates, values and the members of each
group independently (Owen & Eckles 2012, "Bootstrapping data arrays of arbitrary order"): they are wide where the result
hangs on a few names, and say nothing of templates unlike these.

    T templates, F values of their places and words, M members of a group, R resamples
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heedful.evaluate.bias_scores import Scores, is_classifier, label_of, score_in_slices, scores_what_follows
from heedful.evaluate.bias_tests import BiasTest
from heedful.evaluate.bootstrap import RESAMPLES, resampled_counts
from heedful.evaluate.task import LoadedModel
from heedful.models.base import DecoderModel

PART = 2**22  # numbers in memory at a time


@dataclass(frozen=True)
class Effect:
    """A number with its 95 % interval, None where there is nothing to resample."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Contrast:
    """Groups compared: the difference over all, and for each value or word."""

    effect: Effect
    rows: list[Effect]
    share: Effect  # percent of the values for which it is above 0


@dataclass(frozen=True)
class BiasResult:
    """The scores of a test, and what follows from them."""

    test: BiasTest
    measure: str  # what a score is, in words
    unit: str  # "nats" or "%"
    rows: list[str]  # the value of each F
    scores: Scores  # (T, F, M) of each group

    @cached_property
    def groups(self) -> list[Effect]:
        """The mean score of each group."""
        means = []
        for i, name in enumerate(self.test.groups):
            weights = [float(i == j) for j in range(len(self.scores))]
            means.append(crossed_effect(name, self.scores, weights))
        return means

    @cached_property
    def members(self) -> dict[str, list[Effect]]:
        """The mean score of each member of a group; nothing for groups of one."""
        found = {}
        for (name, members), scores in zip(self.test.groups.items(), self.scores, strict=True):
            if len(members) > 1:
                each = enumerate(members)
                found[name] = [crossed_effect(member, [scores[:, :, i : i + 1]], [1.0]) for i, member in each]
        return found

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """The first group less the second; of more than two, each less the mean of all."""
        names, n = list(self.test.groups), len(self.scores)
        if n == 2:
            return [self._contrast(f"{names[0]} - {names[1]}", [1.0, -1.0])]
        return [
            self._contrast(f"{name} - mean", [float(i == j) - 1 / n for j in range(n)]) for i, name in enumerate(names)
        ]

    def _contrast(self, name: str, weights: Sequence[float]) -> Contrast:
        effect = crossed_effect(name, self.scores, weights)
        places: dict[str, list[int]] = {}
        for i, row in enumerate(self.rows):
            places.setdefault(row, []).append(i)
        rows = [crossed_effect(row, [s[:, at] for s in self.scores], weights) for row, at in places.items()]
        each = sum(w * s.mean(axis=(0, 2)) for w, s in zip(weights, self.scores, strict=True))  # (F,)
        above = 100.0 * (np.asarray(each) > 0) + 50.0 * (np.asarray(each) == 0)
        share = crossed_effect(f"{name} > 0", [above[None, :, None]], [1.0])
        return Contrast(effect, sorted(rows, key=lambda row: -row.value) if len(rows) > 1 else [], share)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "test": self.test.name,
            "about": self.test.about,
            "measure": self.measure,
            "unit": self.unit,
            "sentences": self.test.n_sentences,
            "groups": [asdict(group) for group in self.groups],
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
            "members": {name: [asdict(member) for member in found] for name, found in self.members.items()},
        }


def crossed_effect(name: str, scores: Sequence[np.ndarray], weights: Sequence[float]) -> Effect:
    """The weighted sum of the means of each group's scores (T, F, M) with its interval: templates and values are
    resampled alike for all groups, members within each."""
    value = float(sum(w * s.mean() for w, s in zip(weights, scores, strict=True)))
    n_templates, n_values = scores[0].shape[:2]
    if n_templates == n_values == 1 and all(s.shape[2] == 1 for s in scores):
        return Effect(name, value)
    templates, values = _frequencies(n_templates, 1), _frequencies(n_values, 2)
    drawn = np.zeros(RESAMPLES)
    for number, (weight, s) in enumerate(zip(weights, scores, strict=True)):
        if weight:
            drawn += weight * _resampled_means(s, templates, values, _frequencies(s.shape[2], 3 + number))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Effect(name, value, float(low), float(high))


def _frequencies(n: int, seed: int) -> np.ndarray:
    """How often each of n is drawn, as a share (R, n)."""
    return np.concatenate(list(resampled_counts(n, RESAMPLES, seed))) / n


def _resampled_means(scores: np.ndarray, templates: np.ndarray, values: np.ndarray, members: np.ndarray) -> np.ndarray:
    """The mean (R,) of scores (T, F, M) in each resample."""
    t, f, m = scores.shape
    step = max(1, PART // (f * m))
    found = []
    for begin in range(0, len(templates), step):
        part = slice(begin, begin + step)
        by_value = (templates[part] @ scores.reshape(t, f * m)).reshape(-1, f, m)  # (R, F, M)
        by_member = np.matmul(values[part, None, :], by_value)[:, 0]  # (R, M)
        found.append((by_member * members[part]).sum(axis=1))
    return np.concatenate(found)


def measure_in_slices(loaded: LoadedModel, test: BiasTest) -> Iterator[BiasResult | None]:
    """A test's result as the last value, after None for each slice of work."""
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, and reads no text")
    label = label_of(loaded.model, test) if is_classifier(loaded.model) else ""
    scores: Scores | None = None
    for part in score_in_slices(loaded.model, loaded.tokenizer, test):
        scores = part
        yield None
    assert scores is not None, "the last value it yields"
    if not all(np.isfinite(part).all() for part in scores):
        raise ValueError("the model computed a number that is not one")
    yield BiasResult(test, measure_name(loaded, test, label), "%" if label else "nats", _row_names(test), scores)


def measure_name(loaded: LoadedModel, test: BiasTest, label: str) -> str:
    """What a score of the test is, in words."""
    causal = isinstance(loaded.model, DecoderModel)
    if label:
        return f"probability of the label {label!r} in percent"
    if test.has_blank:
        what = "the word in the blank" if test.has_place else "the group's word in the blank"
        after = ", with what follows it and among the words compared" if scores_what_follows(loaded.model, test) else ""
        return f"log-probability of {what}{after}, in nats"
    how = "log-probability" if causal else "pseudo-log-likelihood"
    if test.pairs:
        return f"{how} of the sentence, in nats" if causal else f"{how} of the tokens that both sentences have, in nats"
    return f"{how} of the {'whole sentence' if test.whole else 'sentence without the group’s own words'}, in nats"


def _row_names(test: BiasTest) -> list[str]:
    if test.pairs:
        return [pair.category or "pairs" for pair in test.pairs]
    words = [(word,) for word in test.words] if test.has_place and test.has_blank else [()]
    return [" ".join((*values.values(), *word)) or "all" for values in test.combinations() for word in words]
