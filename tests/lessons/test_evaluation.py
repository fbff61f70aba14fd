"""C6: perplexity, multiple choice, intervals; which differences of the lecture's table are significant."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch.nn import functional as F

from heedful.evaluate.bootstrap import interval, mean_metric
from lessons.support import executed, verdict

RESULTS = Path(__file__).parents[2] / "RESULTS.md"


@pytest.fixture(scope="module")
def lesson():
    return executed("evaluation").names


def test_the_order_by_perplexity_is_not_that_by_bytes(lesson):
    scores = lesson["scores"]
    assert sorted(scores, key=lambda name: scores[name].perplexity) == ["shakespeare", "books", "tiny-books", "chat"]
    assert sorted(scores, key=lambda name: scores[name].bits_per_byte) == ["books", "tiny-books", "chat", "shakespeare"]


def test_perplexity_is_the_exponential_of_pytorchs_loss(lesson):
    loaded, text = lesson["books"], lesson["text"]
    ids = torch.tensor([loaded.tokenizer.encode(text)])
    assert ids.shape[1] <= 512
    with torch.inference_mode():
        loss = F.cross_entropy(loaded.model(ids).logits[0, :-1], ids[0, 1:]).item()
    assert lesson["scores"]["books"].perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_more_context_costs_fewer_bits(lesson):
    by_stride = lesson["by_stride"]
    assert by_stride[64] > by_stride[32] + 0.03 and by_stride[32] >= by_stride[16]
    assert by_stride[16] > lesson["scores"]["books"].bits_per_byte
    assert lesson["evaluation"]["bits per byte"] == pytest.approx(by_stride[32], abs=1e-3)


def test_the_sum_prefers_short_endings(lesson):
    right, by_length, lengths = lesson["right"]["books"], lesson["right_by_length"]["books"], lesson["lengths"]
    assert (int((~right).sum()), int((~by_length).sum())) == (3, 2)
    assert (lengths[~right, 0] > 2 * lengths[~right, 1]).all()  # the right ending is the long one
    assert (lengths[~by_length, 0] < lengths[~by_length, 1]).all()


def test_paired(lesson):
    ours, theirs = lesson["right_by_length"]["books"], lesson["right_by_length"]["tiny-books"]
    assert (int((ours & ~theirs).sum()), int((theirs & ~ours).sum())) == (7, 1)
    assert 2 * (math.comb(8, 0) + math.comb(8, 1)) / 2**8 == pytest.approx(0.07, abs=0.005)


@pytest.mark.skipif(not RESULTS.exists(), reason="RESULTS.md is in the repository alone")
def test_the_table_is_that_of_the_results(lesson):
    rows = dict(re.findall(r"^\| (GPT-[^|*]+?)\*? \|([^\n]+)", RESULTS.read_text(encoding="utf-8"), re.MULTILINE))
    for name, row in lesson["table"].items():
        published = [float(cell) for cell in rows[name].strip(" |").split(" | ")]
        assert tuple(published[1:]) == row, name


def test_which_differences_are_significant(lesson):
    found = {key for key, (value, half) in lesson["differences"].items() if abs(value) > half}
    assert len(lesson["differences"]) == 24 and len(found) == 10 and len(lesson["strict"]) == 6
    for pair in (("GPT-J 6B", "GPT-3 6.7B"), ("GPT-Neo 2.7B", "GPT-3 1.3B")):
        assert not [task for first, task in found if first == pair]
    assert {task for pair, task in found if pair == ("GPT-3 13B", "GPT-3 175B")} == {"LAMBADA", "HellaSwag"}
    assert ("GPT-Neo 2.7B", "GPT-3 2.7B") in {pair for pair, _ in found}
    value, half = lesson["differences"][("GPT-J 6B", "GPT-3 6.7B"), "HellaSwag"]
    assert round(value, 1) == round(half, 1) == 1.3
    assert NormalDist().inv_cdf(1 - 0.025 / 24) == pytest.approx(3.08, abs=0.005)


def test_the_formula_gives_the_bootstraps_interval():
    """SmolLM2's 29.44 % of LAMBADA, 28.20 to 30.78 by the bootstrap (RESULTS.md)."""
    right = [1.0] * 1517 + [0.0] * (5153 - 1517)
    half = 1.96 * math.sqrt(29.44 * 70.56 / 5153)
    assert interval(mean_metric("right", right), 5153) == pytest.approx((29.44 - half, 29.44 + half), abs=0.15)
    assert (29.44 - half, 29.44 + half) == pytest.approx((28.20, 30.78), abs=0.15)


def test_what_the_answers_count():
    assert 2 * 0.7 * 0.3 * (1.96 / 0.01) ** 2 == pytest.approx(16_000, rel=0.01)
    assert 0.1 * (1.96 / 0.01) ** 2 == pytest.approx(3_800, rel=0.02)
    assert 1.96 * math.sqrt(50.4 * 49.6 / 1267) == pytest.approx(2.8, abs=0.05)


def n_bytes(text):
    return len(text.encode())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("negative", lambda p, t: p.sum() / math.log(2) / n_bytes(t)),
        ("nats per byte", lambda p, t: -p.sum() / n_bytes(t)),
        ("multiplies", lambda p, t: -p.sum() * math.log(2) / n_bytes(t)),
        ("per character", lambda p, t: -p.sum() / math.log(2) / len(t)),
        ("per token", lambda p, t: -p.mean() / math.log(2)),
        ("whole text", lambda p, t: -p.sum() / math.log(2)),
        ("a number", lambda p, t: -p / math.log(2) / n_bytes(t)),
    ],
)
def test_wrong_bits_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="bits_per_byte")


def per(scores, numbers):
    return int((scores / torch.tensor(numbers)).argmax())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("short endings", lambda s, e: int(s.argmax())),
        ("lowest", lambda s, e: int(s.argmin())),
        ("number of words", lambda s, e: per(s, [len(one.split()) for one in e])),
        ("its place", lambda s, e: e[per(s, [len(one) for one in e])]),
        ("right", lambda s, e: per(s, [len(one) for one in e])),
    ],
)
def test_a_wrong_choice_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="choose_ending")


def around(middle, half):
    return middle - half, middle + half


def variance(p, n):
    return p * (1 - p) / n


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("p - q", lambda p, q, n: around(p - q, 0.05)),
        ("one standard deviation", lambda p, q, n: around(q - p, math.sqrt(variance(p, n) + variance(q, n)))),
        ("root is missing", lambda p, q, n: around(q - p, 1.96 * (variance(p, n) + variance(q, n)))),
        (
            "variances add",
            lambda p, q, n: around(q - p, 1.96 * (math.sqrt(variance(p, n)) + math.sqrt(variance(q, n)))),
        ),
        ("one share alone", lambda p, q, n: around(q - p, 1.96 * math.sqrt(variance(p, n)))),
        ("number of items", lambda p, q, n: around(q - p, 1.96 * math.sqrt(variance(p, 1) + variance(q, 1)))),
        ("low and high", lambda p, q, n: q - p),
        ("above high", lambda p, q, n: around(q - p, -0.05)),
    ],
)
def test_a_wrong_interval_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="difference_interval")
