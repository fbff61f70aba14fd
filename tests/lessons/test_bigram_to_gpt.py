"""C5: from counts to GPT on Shakespeare, with the loss of each step."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lessons.support import executed, verdict

SHAKESPEARE = Path(__file__).resolve().parents[3] / "shared" / "data" / "shakespeare.txt"


@pytest.fixture(scope="module")
def lesson():
    return executed("bigram-to-gpt")


def table_loss(text: str) -> float:
    """The validation loss of the table of pairs, one added, by dictionaries."""
    border, n = int(0.9 * len(text)), len(set(text))
    pairs, singles = {}, {}
    for a, b in pairwise(text[:border]):
        pairs[a, b] = pairs.get((a, b), 0) + 1
        singles[a] = singles.get(a, 0) + 1
    kept = text[border:]
    logs = [math.log((pairs.get((a, b), 0) + 1) / (singles.get(a, 0) + n)) for a, b in pairwise(kept)]
    return -sum(logs) / len(logs)


def test_counted_losses(lesson):
    losses = lesson.names["losses"]
    assert losses["uniform"] == pytest.approx(math.log(65)) == pytest.approx(4.17, abs=0.005)
    assert losses["bigram, counted"] == pytest.approx(table_loss(lesson.names["text"]), abs=1e-4)
    assert losses["bigram, counted"] == pytest.approx(2.44, abs=0.005)
    assert math.exp(2.44) == pytest.approx(11.5, abs=0.05) and 2.44 / math.log(2) == pytest.approx(3.52, abs=0.005)
    q, u = (lesson.names["id_of"][letter] for letter in "qu")
    assert lesson.names["counts"][q].sum() == lesson.names["counts"][q, u]  # "nothing but u ever came"
    assert 1 - lesson.names["table"][q, u] == pytest.approx(0.40, abs=0.005)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="Shakespeare's own text is not here")
def test_the_table_on_shakespeares_own_text():
    assert table_loss(SHAKESPEARE.read_text(encoding="utf-8")) == pytest.approx(2.48, abs=0.005)


def test_the_ladder(lesson):
    loss = lesson.names["losses"]
    counted = loss["bigram, counted"]
    assert counted - 0.02 < loss["bigram, learned"] < counted + 0.05 and lesson.names["difference"] < 0.05
    assert loss["average"] > counted + 0.5  # "more than half a nat"
    assert counted < loss["one head"] < counted + 0.1
    assert abs(loss["four heads"] - counted) < 0.06 and loss["four heads"] < loss["one head"] - 0.02
    steps = [loss[name] for name in ("four heads", "+ feed-forward", "+ residual", "+ norm")]
    assert steps[2] < counted - 0.1 and min(range(1, 4), key=lambda i: steps[i] - steps[i - 1]) == 2
    assert steps[2] - 0.02 < steps[3] < steps[2] + 0.1  # "it gains nothing"
    assert lesson.names["floor"] < loss["heedful's GPT"] < steps[2] - 0.03


def test_the_last_rung_is_heedfuls_gpt(lesson):
    assert lesson.names["parity"] < 1e-4
    assert "four heads: " in lesson.text and lesson.text.count("9,473 parameters") == 2


def test_what_the_cards_say(lesson):
    assert "tiny         2.037 nats per character,     6,048 parameters" in lesson.text
    assert "shakespeare  1.451 nats per character, 2,731,392 parameters" in lesson.text
    assert 10.65e6 / 2_731_392 == pytest.approx(4, abs=0.2)  # "a quarter of the parameters"


def table(ids, n, *, add=1.0):
    return torch.bincount(ids[:-1] * n + ids[1:], minlength=n * n).reshape(n, n) + add


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("these are counts", table),
        ("each row must", lambda ids, n: table(ids, n) / table(ids, n).sum()),
        ("columns sum to 1", lambda ids, n: table(ids, n) / table(ids, n).sum(0)),
        ("turned round", lambda ids, n: table(ids.flip(0), n) / table(ids.flip(0), n).sum(1, keepdim=True)),
        ("NaNs", lambda ids, n: table(ids, n, add=0.0) / table(ids, n, add=0.0).sum(1, keepdim=True)),
        (
            "a row does not sum to 1",
            lambda ids, n: table(ids, n) / table(ids, n, add=0.0).sum(1, keepdim=True).clamp(1),
        ),
    ],
)
def test_wrong_probabilities_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="bigram_probabilities")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("mean of all rows", lambda x: x.mean(0).expand_as(x)),
        ("these are sums", lambda x: x.cumsum(0)),
        ("divided by T", lambda x: x.cumsum(0) / len(x)),
        ("wrong triangle", lambda x: torch.ones(len(x), len(x)).triu().div(torch.arange(len(x), 0, -1)[:, None]) @ x),
        ("the future leaks: rows", lambda x: torch.cat([x[:1], x[1:].mean(0).expand(len(x) - 1, -1)])),
        ("only itself", lambda x: torch.cat([x[:1] * 0, x.cumsum(0)[:-1]])),
    ],
)
def test_wrong_means_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="mean_of_past")
