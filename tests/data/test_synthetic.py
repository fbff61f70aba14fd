"""Data that is made: what is promised of it can be counted."""

import math

import numpy as np
import pytest
import torch

from heedful.data.dataset import Draw
from heedful.data.synthetic import MarkovChain, Reversal


def test_reversal_is_the_lectures_task():
    data = Reversal(n_symbols=10, length=4, n_examples=2200)
    batch = data.batch([Draw(0, i) for i in range(len(data))], 0)
    assert batch.source.shape == (2200, 4) and len(batch.source.unique(dim=0)) == 2200
    assert (batch.source.min(), batch.source.max(), data.vocab_size) == (1, 10, 11)
    assert torch.equal(batch.targets, batch.source.flip(1))
    assert (batch.tokens[:, 0] == 0).all() and torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.lengths is None and data.lengths is None


def test_reversal_of_unequal_lengths_is_padded_and_ends():
    data = Reversal(n_symbols=5, length=6, n_examples=50, shortest=2, ends=True)
    batch = data.batch([Draw(0, i) for i in range(50)], 0)
    assert sorted(set(batch.source_lengths.tolist())) == [2, 3, 4, 5, 6]
    for source, n, targets in zip(batch.source, batch.source_lengths.tolist(), batch.targets, strict=True):
        assert targets.tolist() == [*source[:n].flip(0).tolist(), 6] + [-100] * (6 - n)
    assert batch.lengths.tolist() == (batch.source_lengths + 1).tolist() and data.vocab_size == 7


def test_reversal_hides_some_of_the_target_so_far():
    data = Reversal(n_symbols=8, length=20, n_examples=100, blanked=0.5)
    batch = data.batch([Draw(0, i) for i in range(100)], 0)
    assert abs((batch.tokens[:, 1:] == 0).float().mean() - 0.5) < 0.05
    assert torch.equal(batch.targets, batch.source.flip(1))
    assert not torch.equal(batch.tokens, data.batch([Draw(1, i) for i in range(100)], 0).tokens)
    assert torch.equal(batch.tokens[3:4], data.batch([Draw(0, 3)], 0).tokens)


def test_more_sequences_than_there_are_is_refused():
    with pytest.raises(ValueError, match="there are 16"):
        Reversal(n_symbols=2, length=4, n_examples=17)


def test_two_symbols_have_the_entropy_of_the_formula():
    """A chain that changes with probability p and q: h = (q H(p) + p H(q)) / (p + q) (Cover & Thomas, section 4.2)."""
    source = MarkovChain(2)
    p, q = 0.1, 0.3
    source.table = np.array([[1 - p, p], [q, 1 - q]])

    def entropy(x):
        return -x * math.log(x) - (1 - x) * math.log(1 - x)

    assert source.entropy == pytest.approx((q * entropy(p) + p * entropy(q)) / (p + q))
    assert source.stationary == pytest.approx([q / (p + q), p / (p + q)])


def test_what_markov_draws_has_its_table():
    source = MarkovChain(n_symbols=5, length=63, n_examples=2000)
    batch = source.batch([Draw(0, i) for i in range(2000)], 0)
    pairs = torch.zeros(5, 5).index_put_(
        (batch.tokens.flatten(), batch.targets.flatten()), torch.ones(()), accumulate=True
    )
    counted = pairs / pairs.sum(dim=1, keepdim=True)
    assert np.abs(counted.numpy() - source.table).max() < 0.02
    share = torch.bincount(batch.tokens.flatten()) / batch.tokens.numel()
    assert np.abs(share.numpy() - source.stationary).max() < 0.01
    surprise = -np.log(source.table)[batch.tokens.numpy(), batch.targets.numpy()].mean()
    assert surprise == pytest.approx(source.entropy, rel=0.01)
    assert source.entropy < source.unigram_entropy < math.log(5)


def test_epochs_of_markov_do_not_repeat():
    source = MarkovChain()
    one, other = (source.batch([Draw(e, 7)], 0).tokens for e in (0, 1))
    assert not torch.equal(one, other) and torch.equal(one, source.batch([Draw(0, 7)], 0).tokens)
    assert source.fingerprint != MarkovChain(seed=1).fingerprint
