"""Quantization by hand is heedful's, groups confine outliers, and speculation keeps the target's distribution."""

from __future__ import annotations

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("fewer-bits-fewer-steps")


def test_integers_by_hand_are_heedfuls(lesson):
    assert "heedful's integers and scales are the same: True" in lesson.text
    assert "by hand and by heedful the same: True" in lesson.text
    assert lesson.names["worst"] <= 0.501 and lesson.names["spread"] == pytest.approx(12**-0.5, abs=0.005)


def test_int8_rows_are_pytorchs(lesson):
    weight, scales = lesson.names["weight"].detach(), lesson.names["scales"]
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
    ours = lesson.names["ints"] * scales[:, None]
    assert torch.isclose(ours, theirs).float().mean() > 0.999  # it multiplies by 1 / scale: halves may round otherwise


def test_an_outlier_spoils_its_row_or_its_group(lesson):
    plain, damaged = lesson.names["plain"], lesson.names["damaged"]
    assert plain["int8 rows"] < 0.01 < plain["int4 groups"] < plain["int4 rows"]
    assert damaged["int4 rows"] == pytest.approx(1, abs=0.01)  # "the error is 100 %"
    outside = lesson.names["relative_error"]("int4 groups", lesson.names["spoilt"], first=32)
    assert outside == pytest.approx(plain["int4 groups"], rel=0.02)


def test_fewer_bits_are_smaller_and_lose_more(lesson):
    sizes, _, lost = zip(*lesson.names["table"].values(), strict=True)
    assert list(sizes) == sorted(sizes, reverse=True) and sizes[0] / sizes[3] > 5
    assert abs(lost[0]) < 1e-6 and lost[2] < 0.01 < lost[3] < 0.5  # float32, int8, int4


def test_the_rule_keeps_the_distribution(lesson):
    largest = lesson.names["largest"]
    assert largest["speculative"] < 1e-12
    assert largest["always accept"] > 0.5 and largest["else from p"] > 0.1


def test_drawn_letters_follow_the_target(lesson):
    target, n = lesson.names["target"].double(), 2000
    distances = lesson.names["distances"]
    typical = (target * (1 - target) / n).sqrt().sum().item() * (2 / torch.pi) ** 0.5 / 2  # of a sample of n
    assert distances["target"] < 1.5 * typical and distances["draft"] > 5 * typical


def test_speculated_texts_are_those_of_plain_decoding(lesson):
    counts = {name: counts for name, (_, counts) in lesson.names["speculated"].items()}
    assert all(same for same, _ in lesson.names["speculated"].values())
    assert counts["tiny for shakespeare"].tokens_per_step > 1.5
    assert counts["lookup for books"].tokens_per_step > 2
    assert counts["lookup for shakespeare"].accepted == 0
    assert "4.33 (formula 4.33)" in lesson.text


def quantize(w, top, *, size=torch.abs, dim=1, rounding=torch.round):
    scales = size(w).amax(dim=dim) / top
    return rounding(w / (scales[:, None] if dim == 1 else scales)), scales


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("right", lambda w, bits: quantize(w, 2 ** (bits - 1) - 1)),
        ("becomes 128", lambda w, bits: quantize(w, 2 ** (bits - 1))),
        ("one bit is for the sign", lambda w, bits: quantize(w, 2**bits - 1)),
        ("absolute values", lambda w, bits: quantize(w, 2 ** (bits - 1) - 1, size=lambda w: w)),
        ("columns", lambda w, bits: quantize(w, 2 ** (bits - 1) - 1, dim=0)),
        ("not rounded", lambda w, bits: quantize(w, 2 ** (bits - 1) - 1, rounding=torch.trunc)),
        ("not whole", lambda w, bits: quantize(w, 2 ** (bits - 1) - 1, rounding=lambda w: w)),
        ("whole matrix", lambda w, bits: ((w / w.abs().max() * 127).round(), w.abs().max() / 127)),
    ],
)
def test_wrong_quantization_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="quantize_symmetric")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("p itself", lambda p, q: p),
        ("other way round", lambda p, q: (q - p).relu() / (q - p).relu().sum()),
        ("not divided", lambda p, q: (p - q).relu()),
        ("negative", lambda p, q: p - q),
        ("divides by 0", lambda p, q: (p - q).relu() / (p - q).relu().sum()),
    ],
)
def test_a_wrong_rest_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="leftover")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("own token is missing", lambda a: a.long().cumprod(1).sum(1).float().mean()),
        ("after a rejection", lambda a: (a.sum(1) + 1.0).mean()),
        ("share of accepted", lambda a: a.float().mean()),
        ("mean over passes", lambda a: a.long().cumprod(1).sum(1) + 1),
    ],
)
def test_wrong_counts_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="tokens_per_pass")
