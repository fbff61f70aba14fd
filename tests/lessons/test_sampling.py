"""C3, C4: every rule of choosing on one distribution, by hand and by heedful, transformers and torch."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("sampling")


def test_the_distribution_that_the_text_describes(lesson):
    assert lesson.names["words"][:3] == ["fire", "window", "side"]
    assert "    1  fire      11.67       38.8%       38.8%" in lesson.text
    assert "and 8,184 others with 20.5% together" in lesson.text  # "a fifth"
    assert "T 0.5: fire 81.5%, fire/window  6.98" in lesson.text
    assert "T 1.5: fire 11.7%, fire/window  1.91, the 8,184 of the tail 66.1%" in lesson.text  # "two thirds"


def test_filters_are_those_of_transformers(lesson):
    z, kept = lesson.names["z"], lesson.names["kept"]
    for name, warper in {
        "top-k 5": TopKLogitsWarper(5),
        "top-p 0.8": TopPLogitsWarper(0.8),
        "min-p 0.1": MinPLogitsWarper(0.1),
    }.items():
        assert torch.equal(warper(None, z[None].clone())[0].isfinite(), kept[name]), name
    assert [int(mask.sum()) for mask in kept.values()] == [5, 9, 6]
    order = [TemperatureLogitsWarper(1.5), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]
    theirs = LogitsProcessorList(order)(None, z[None].clone())[0]
    assert torch.equal(theirs.isfinite(), lesson.names["step_by_step"].isfinite())


def test_top_p_follows_the_certainty_and_top_k_does_not(lesson):
    assert "In the morning they went to the            5         444          85" in lesson.text
    assert "Once upon a                                5           4           2" in lesson.text


def test_penalties(lesson):
    z, written = lesson.names["z"], torch.tensor([lesson.names["written"]])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(written, z[None].clone())[0]
    assert torch.allclose(theirs, lesson.names["by_hand"]["repetition 1.3"], atol=1e-5)
    assert "fire 11.67 -> 9.67, window 10.70 -> 9.70" in lesson.text
    assert "repetition 1.3 fire 11.67 -> 8.98" in lesson.text  # "2.7 less"


def test_a_division_depends_on_where_zero_is(lesson):
    shares = [line.split()[-1] for line in lesson.text.splitlines() if line.startswith("all logits")]
    assert shares == ["5.2%", "14.1%", "1.7%"]


def test_draws_follow_the_nucleus(lesson):
    draws, expected = lesson.names["draws"], lesson.names["expected"]
    shares = torch.bincount(draws, minlength=len(expected)) / len(draws)
    assert (shares[expected == 0] == 0).all()
    assert (shares - expected).abs().max() < 0.035  # three standard deviations of 2,000 draws


def test_beams_by_hand_are_heedfuls(lesson):
    ours = lesson.names["beams"]
    assert [choice.text for choice in lesson.names["by_search"]] == [text for _, text in ours]
    assert [choice.score for choice in lesson.names["by_search"]] == pytest.approx([t for t, _ in ours], abs=1e-3)


def test_beams_find_likelier_texts_that_repeat(lesson):
    nats = {name: found.mean().item() for name, found in lesson.names["surprises"].items()}
    assert nats["four beams"] < nats["greedy"] < nats["top-p 0.9"]
    assert lesson.names["found"]["four beams"].count("What is it?") >= 2
    falling = lesson.names["by_repetition"].tolist()
    assert falling == sorted(falling, reverse=True) and falling[1] < falling[0] / 2


def test_stop_texts_are_not_in_the_answer(lesson):
    assert [choice.finish_reason for choice in lesson.names["choices"]] == ["stop"] * 3
    assert not any(sign in choice.text for choice in lesson.names["choices"] for sign in ".;")


def cut(logits, p, *, more=0, sort=False, divide=True):
    shares, order = logits.softmax(-1).sort(descending=True)
    n = int((shares.cumsum(0) < p).sum()) + more
    shares = torch.cat([shares[:n], torch.zeros(len(shares) - n)])
    shares = shares / shares.sum() if divide else shares
    return shares if sort else torch.zeros_like(logits).scatter(0, order, shares)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("nothing is cut", lambda z, p: z.softmax(-1)),
        ("divided by its sum", lambda z, p: cut(z, p, more=1, divide=False)),
        ("crosses the border", lambda z, p: cut(z, p)),
        ("sorted order", lambda z, p: cut(z, p, more=1, sort=True)),
        ("exactly 0", lambda z, p: cut(z, p, more=1, divide=False).softmax(-1)),
        ("the likeliest token alone", lambda z, p: cut(z, max(p, 0.5), more=1)),
        ("right", lambda z, p: cut(z, p, more=1)),
    ],
)
def test_a_wrong_nucleus_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="nucleus")


def counted(z, written):
    return torch.bincount(torch.tensor(written, dtype=torch.long), minlength=len(z))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("not added", lambda z, w, f, p: z + counted(z, w) * f + (counted(z, w) > 0) * p),
        ("counts", lambda z, w, f, p: z - (counted(z, w) > 0) * (f + p)),
        ("taken once", lambda z, w, f, p: z - counted(z, w) * (f + p)),
        ("exchanged", lambda z, w, f, p: z - counted(z, w) * p - (counted(z, w) > 0) * f),
        ("not for all", lambda z, w, f, p: z - counted(z, w) * f - p),
        ("presence penalty is missing", lambda z, w, f, p: z - counted(z, w) * f),
        ("frequency penalty is missing", lambda z, w, f, p: z - (counted(z, w) > 0) * p),
    ],
)
def test_wrong_penalties_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="penalized_logits")
