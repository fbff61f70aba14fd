"""Perplexity and bits per byte against their definition, token by token."""

from __future__ import annotations

import math

import pytest
import torch

import heedful
from heedful.evaluate.perplexity import TextScore, negative_log_likelihood, score_text, sliding_windows
from support.families import CASES

TEXT = "ROMEO:\nWhat light through yonder window breaks? It is the east, and Juliet is the sun.\n" * 3


@pytest.fixture(scope="module")
def shakespeare():
    return heedful.load("shakespeare", dtype=torch.float32)


@pytest.mark.parametrize("n, window, stride", [(2, 4, 4), (5, 4, 4), (23, 8, 8), (23, 8, 3), (23, 8, 1), (9, 20, 5)])
def test_every_token_but_the_first_is_scored_once(n, window, stride):
    scored = []
    for part in sliding_windows(n, window, stride):
        assert 0 <= part.begin < part.end <= part.begin + window and part.n_new <= part.end - part.begin
        new = range(part.end + 1 - part.n_new, part.end + 1)
        assert all(t - part.begin >= min(t, window - stride + 1) for t in new)  # what stands before it
        scored += new
    assert scored == list(range(1, n))


@pytest.mark.parametrize("window, stride", [(256, 256), (64, 64), (64, 16), (40, 7)])
def test_a_score_is_the_sum_over_tokens(shakespeare, window, stride):
    ids = shakespeare.tokenizer.encode(TEXT)[:150]
    expected = 0.0
    with torch.no_grad():
        for t in range(1, len(ids)):
            # The first window that reaches the token reads from here.
            first = max(0, math.ceil((t - window) / stride) * stride)
            logits = shakespeare.model(torch.tensor([ids[first:t]])).logits[0, -1].double()
            expected -= logits.log_softmax(-1)[ids[t]].item()
    assert negative_log_likelihood(shakespeare.model, ids, window=window, stride=stride) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_text_in_numbers(shakespeare):
    model, tokenizer = shakespeare.model, shakespeare.tokenizer
    ids = tokenizer.encode(TEXT)
    read = score_text(model, tokenizer, TEXT, window=128, stride=64)
    assert read.n_tokens == len(ids) - 1
    assert read.n_bytes == len(TEXT.encode()) - 1  # one character is one token, and the first is not scored
    assert read.total == pytest.approx(negative_log_likelihood(model, ids, window=128, stride=64))
    begun = score_text(model, tokenizer, TEXT, window=128, stride=64, begin=tokenizer.encode("\n")[0])
    assert (begun.n_tokens, begun.n_bytes) == (len(ids), len(TEXT.encode()))
    assert 1 < read.perplexity < 6  # of 65 characters, in a text of its kind


def test_the_two_measures():
    guess = TextScore(total=100 * math.log(50), n_tokens=100, n_bytes=400)
    assert guess.perplexity == pytest.approx(50)
    assert guess.bits_per_byte == pytest.approx(math.log2(50) / 4)


def test_mistakes_are_told(shakespeare):
    model = shakespeare.model
    with pytest.raises(ValueError, match="stride"):
        list(sliding_windows(10, 4, 5))
    with pytest.raises(ValueError, match="two tokens"):
        negative_log_likelihood(model, [1], window=8, stride=8)
    with pytest.raises(ValueError, match="do not fit"):
        negative_log_likelihood(model, list(range(60)) * 10, window=500, stride=500)
    bert = next(c for c in CASES if c.name == "bert-masked")
    with pytest.raises(ValueError, match="left to right"):
        negative_log_likelihood(bert.model(), [1, 2, 3], window=8, stride=8)


def test_scoring_leaves_the_model_as_it_was(shakespeare):
    model = shakespeare.model
    model.train()
    first = negative_log_likelihood(model, list(range(40)), window=16, stride=8)
    assert model.training and first == negative_log_likelihood(
        model, list(range(40)), window=16, stride=8
    )  # no dropout in it
    model.eval()
