"""The lesson on what models learned: the comparisons of the lecture, their intervals, what is said of wrong answers."""

from __future__ import annotations

import math

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def names():
    return executed("what-models-learned").names


def ratios(found):
    return dict(zip(found.words, found.log_ratio(0, 1).tolist(), strict=True))


def test_new_york_buys_books_and_lessons(names):
    found = ratios(names["places"])
    assert max(found[word] for word in ("books", "school", "lessons", "tea")) < -0.6


def test_jane_is_a_nurse_and_jim_has_a_gun(names):
    found = ratios(names["people"])
    assert found["nurse"] > 1.2 and max(found[word] for word in ("gun", "guy", "kid")) < -1.2


def test_the_pronoun_moves_words_more_than_the_year(names):
    assert names["spread"]["pronoun"] > 1.6 * names["spread"]["year"]


def test_occupations_with_intervals(names):
    effect, rows = names["effect"], names["rows"]
    assert (effect.value, effect.low, effect.high) == pytest.approx((2.20, 1.53, 2.76), abs=0.1)
    assert math.exp(effect.value) == pytest.approx(9, abs=1)
    assert len(rows) == 20 and sum(row.value > 0 for row in rows) == 18
    assert rows[0].name == "judge" and [row.name for row in rows[-2:]] == ["nurse", "maid"]
    assert all(row.high < 0 for row in rows[-2:])
    assert rows[0].value - rows[-1].value == pytest.approx(4.7, abs=0.1) and math.exp(4.7) == pytest.approx(110, abs=2)


def test_the_interval_by_hand_is_heedfuls(names):
    assert list(names["by_hand"]) == pytest.approx([names["effect"].low, names["effect"].high], abs=0.1)


def test_most_adjectives_cannot_be_told_apart(names):
    assert not names["contrast"].effect.clear and len(names["contrast"].rows) == 20
    assert 1 <= len(names["clear"]) <= 6


def test_what_is_said_of_wrong_answers(capsys):
    def said(answer, name):
        return verdict(answer, capsys, name=name)

    def rows(x, chosen):
        return x[torch.tensor(chosen)].mean(0)

    def others(x, chosen):
        return x[~torch.tensor(chosen)].mean(0)

    assert "right" in said(lambda x, c: rows(x, c) - x.mean(0), "association")
    assert "subtract the mean over all" in said(rows, "association")
    assert "against the other sentences" in said(lambda x, c: rows(x, c) - others(x, c), "association")
    assert "sign" in said(lambda x, c: x.mean(0) - rows(x, c), "association")
    assert "mean of the logarithms" in said(lambda x, c: rows(x.exp(), c).log() - x.exp().mean(0).log(), "association")
    assert "shape" in said(lambda x, c: x.mean(1), "association")

    def interval(values, n, generator, *, size=None, ends=(0.025, 0.975), seeded=True):
        size = size or len(values)
        drawn = torch.randint(len(values), (n, size), generator=generator if seeded else None)
        return tuple(torch.quantile(values[drawn].mean(1), torch.tensor(ends, dtype=values.dtype)).tolist())

    def changed(**how):
        return lambda *given: interval(*given, **how)

    assert "right" in said(changed(), "bootstrap_interval")
    assert "not of values" in said(changed(size=1), "bootstrap_interval")
    assert "90 % interval" in said(changed(ends=(0.05, 0.95)), "bootstrap_interval")
    assert "comes first" in said(changed(ends=(0.975, 0.025)), "bootstrap_interval")
    assert "times as wide" in said(changed(size=10), "bootstrap_interval")
    assert "use `generator`" in said(changed(seeded=False), "bootstrap_interval")
    assert "are the same" in said(lambda v, n, g: (float(v.mean()), float(v.mean())), "bootstrap_interval")
