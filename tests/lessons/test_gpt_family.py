"""C1, C2: the sizes of the papers counted, what changed from GPT-1 to GPT-3, and what came after."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.models.registry import sizes
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("gpt-family")


def test_c1_gpt3_is_as_the_lecture_says(lesson):
    largest = lesson.names["models"]["gpt3-175b"]
    assert round(largest.n_parameters() / 1e9) == 175
    assert (largest.config.n_layers, largest.config.max_len) == (96, 2048)


def test_the_formula_counts_every_size_but_one(lesson):
    for name, model in lesson.names["models"].items():
        c = model.config
        formula = lesson.names["count"](c.d_model, c.n_layers, c.vocab_size, c.max_len, c.norm_first)
        assert (formula == sizes()[name].parameters) == (name != "gpt3-13b"), name


def test_the_errors_of_the_published_tables(lesson):
    count, models, published = (lesson.names[name] for name in ("count", "models", "published"))
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        c = models[name].config
        assert round(count(c.d_model, c.n_layers, 40478, c.max_len) / 1e6) == published[name]
        assert round(count(c.d_model, c.n_layers, 50257, c.max_len) / 1e6) != published[name]
    as_printed = heedful.create("gpt3-1.3b", device="meta", n_heads=24, d_head=128).n_parameters()
    assert round(as_printed / 1e9, 1) == 1.5
    assert lesson.text.count("but the width is") == 2


def test_shares_of_the_parameters(lesson):
    shares = lesson.names["shares"]
    assert shares["gpt3-175b"] == pytest.approx((1 / 3, 2 / 3, 0.004), abs=0.003)
    assert shares["gpt1"][2] == pytest.approx(0.3, abs=0.04) and shares["gpt2"][2] == pytest.approx(0.3, abs=0.04)


def test_smaller_first_weights_hold_the_stream_at_every_depth(lesson):
    last = {key: stream[-1] for key, stream in lesson.names["streams"].items()}
    assert 2.5 < last[48, False] / last[6, False] < 3  # "nearly three times"
    assert max(last[n, True] for n in (6, 48)) / min(last[n, True] for n in (6, 48)) < 1.1


def test_the_band(lesson):
    reach = lesson.names["two_bands"]
    assert (reach.sum(dim=1)[10:] == 11).all()  # twice 5 back, and itself
    assert "band of 256: 491,648 (23%)" in lesson.text and "both in turn: 62%" in lesson.text


def test_each_change_is_its_formula(lesson):
    assert set(lesson.names["difference"]) == {"RMSNorm", "SwiGLU", "rotary", "grouped queries"}
    assert max(lesson.names["difference"].values()) < 1e-5
    scores = lesson.names["scores"]
    assert scores[5, 3] == pytest.approx(scores[105, 103], abs=1e-4) != pytest.approx(scores[5, 2], abs=1e-2)
    x = torch.randn(3, 8)
    assert torch.allclose(lesson.names["norm"](x), torch.nn.RMSNorm(8, eps=1e-6)(x), atol=1e-6)
    assert "is 11008" in lesson.text and sizes()["llama-7b"].settings["d_ff"] == 11008


def test_what_the_table_of_later_models_says(lesson):
    rows = lesson.names["rows"]
    assert rows["gpt3-6.7b"][:5] == ("LayerNorm", "learned", "GELU", "32/32", "yes")
    assert all(row[0] == "RMSNorm" and row[1].startswith("rotary") for row in list(rows.values())[1:])
    assert [name for name, row in rows.items() if row[4] == "yes"] == ["gpt3-6.7b", "qwen2-7b"]
    assert rows["llama3-8b"][3] == rows["mistral-7b-v0.1"][3] == "32/8"
    assert "llama-7b     262,144 numbers per token" in lesson.text
    assert "llama3-8b     65,536 numbers per token" in lesson.text


def test_what_the_answers_count():
    assert 6 * 255 == 1530 and round(32 * 4096, -3) == 131_000
    assert round(3 * 4096 * 11008 / 1e6) == 135 and round(2 * 4096 * 16384 / 1e6) == 134


def distances(n):
    return torch.arange(n)[:, None] - torch.arange(n)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("no band", lambda n, w: distances(n) >= 0),
        ("the future leaks", lambda n, w: distances(n).abs() < w),
        ("wrong triangle", lambda n, w: (distances(n) <= 0) & (distances(n) > -w)),
        ("one position too many", lambda n, w: (distances(n) >= 0) & (distances(n) <= w)),
        ("see itself", lambda n, w: (distances(n) > 0) & (distances(n) <= w)),
        ("other way round", lambda n, w: (distances(n) < 0) | (distances(n) >= w)),
        ("booleans", lambda n, w: ((distances(n) >= 0) & (distances(n) < w)).float()),
    ],
)
def test_a_wrong_band_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="banded_mask")


def llama(d, n_layers, n_heads, n_kv_heads, d_ff, vocabulary, *, matrices=3, embeddings=2, norms=2, last=1):
    attention = 2 * d * d + 2 * d * (d // n_heads * n_kv_heads)
    return n_layers * (attention + matrices * d * d_ff + norms * d) + last * d + embeddings * vocabulary * d


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("n_kv_heads heads", lambda d, n, h, kv, f, v: llama(d, n, h, h, f, v)),
        ("three matrices", lambda *settings: llama(*settings, matrices=2)),
        ("not tied", lambda *settings: llama(*settings, embeddings=1)),
        ("last norm is missing", lambda *settings: llama(*settings, last=0)),
        ("norms of the blocks", lambda *settings: llama(*settings, norms=0)),
        ("no bias", lambda *settings: llama(*settings, norms=4, last=2)),
        ("counted once", lambda d, n, *others: llama(d, 1, *others)),
        ("right", llama),
    ],
)
def test_wrong_counts_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="llama_parameters")
