"""Negative sampling: the paper's formula, its gradient, its noise, and what a model learns by it."""

import math

import numpy as np
import pytest
import torch

from heedful.data.corpus import Corpus
from heedful.data.dataset import Draw
from heedful.data.neighbour_windows import CBOWWindows
from heedful.models.base import Batch
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.train.negative_sampling import NOISE_POWER, negative_sampling
from heedful.train.objectives import cbow, make_objective


def small(vocab_size=11, **settings):
    torch.manual_seed(0)
    model = CBOW.create(CBOWConfig(vocab_size=vocab_size, d_model=6, window=2, **settings))
    with torch.no_grad():
        for p in (model.embed.weight, model.head.weight):
            p.copy_(torch.randn(p.shape))
    model.init_unigram(torch.arange(vocab_size) ** 2, NOISE_POWER)
    return model.train()


TOKENS = torch.tensor([[3, 7, 7, 1, 10], [2, 9, 4, 0, 0]])
LENGTHS = torch.tensor([5, 3])


@pytest.mark.parametrize("shared", [1, 3])
def test_the_loss_is_the_papers(shared):
    """-log σ(h·w) - k times the mean of log σ(-h·n) over the row's negatives."""
    model, k = small(), 4
    torch.manual_seed(5)
    loss = negative_sampling(model, Batch(TOKENS, LENGTHS), TOKENS.where(TOKENS > 0, -100), k, shared=shared)
    torch.manual_seed(5)
    windows = torch.randint(1, 3, (2,)).tolist()
    drawn = torch.multinomial(model.head.bias.softmax(0), 2 * k * shared, replacement=True).view(2, -1)
    sigma = torch.nn.functional.logsigmoid
    total = 0.0
    for row, window, negatives, n in zip(TOKENS, windows, drawn, LENGTHS.tolist(), strict=True):
        for t in range(n):
            around = [i for i in range(max(0, t - window), min(n, t + window + 1)) if i != t]
            h = model.embed.weight[row[around]].mean(dim=0)
            total -= sigma(h @ model.head.weight[row[t]])
            total -= sum(sigma(-h @ model.head.weight[w]) for w in negatives) / shared
    assert int(loss.n_targets) == 8
    torch.testing.assert_close(loss.sum, total)


def test_the_gradient_is_that_of_differences():
    model = small().double()

    def loss():
        torch.manual_seed(1)  # the same negatives each time
        return negative_sampling(model, Batch(TOKENS), TOKENS, 3).sum

    loss().backward()
    for p in (model.embed.weight, model.head.weight):
        found = torch.zeros_like(p)
        with torch.no_grad():
            for place in range(p.numel()):
                before = p.view(-1)[place].item()
                for step in (1e-5, -1e-5):
                    p.view(-1)[place] = before + step
                    found.view(-1)[place] += loss() / (2 * step)
                p.view(-1)[place] = before
        torch.testing.assert_close(p.grad, found, atol=1e-6, rtol=1e-5)
    assert model.head.bias.grad.abs().max() == 0  # the noise is not trained


def test_the_noise_is_the_frequency_to_the_power_of_three_quarters():
    counts = torch.tensor([15, 80, 0, 255])  # and one more of each
    model = CBOW.create(CBOWConfig(vocab_size=4, d_model=4))
    model.init_unigram(counts, NOISE_POWER)
    wanted = (counts + 1) ** 0.75
    torch.testing.assert_close(model.head.bias.softmax(0), wanted / wanted.sum())


def test_validation_is_the_cross_entropy_over_the_vocabulary():
    model, batch = small().eval(), Batch(TOKENS, targets=TOKENS)
    torch.testing.assert_close(cbow(model, batch, negatives=5).sum, cbow(model, batch).sum)
    assert make_objective({"name": "cbow", "negatives": 5})(model.train(), batch).n_targets == TOKENS.numel()
    with pytest.raises(ValueError, match="no setting 'negatives'"):
        make_objective({"name": "causal", "negatives": 5})


# --- subsampling -----------------------------------------------------------------------------------------------------


def test_frequent_words_are_dropped_as_often_as_the_paper_says():
    often = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    tokens = np.random.default_rng(0).choice(5, size=60_000, p=often)
    data = CBOWWindows(Corpus.of([tokens.tolist()]), 100, subsample=0.02)
    batch = data.batch([Draw(0, i) for i in range(len(data))], 7)
    kept = np.bincount(batch.targets[batch.targets >= 0].numpy(), minlength=5) / np.bincount(tokens)
    np.testing.assert_allclose(kept, [math.sqrt(0.02 / f) if f > 0.02 else 1 for f in often], rtol=0.05)
    assert torch.equal(data.batch([Draw(0, 3)], 7).tokens[0], batch.tokens[3, : batch.lengths[3]])
    assert not torch.equal(data.batch([Draw(1, 3)], 7).tokens[:, :9], data.batch([Draw(0, 3)], 7).tokens[:, :9])
    # The rest of a row moves together, in its order.
    sequence = CBOWWindows(Corpus.of([list(range(50)) + [0] * 50]), 100, shifted=False, subsample=0.02)
    row = sequence.batch([Draw(0, 0)], 7).targets[0]
    assert row[row > 0].tolist() == list(range(1, 50)) and len(row) < 80


def test_a_row_of_which_nothing_is_left_keeps_a_word():
    data = CBOWWindows(Corpus.of([[1] * 40]), 10, shifted=False, subsample=1e-9)
    batch = data.batch([Draw(0, i) for i in range(4)], 0)
    assert batch.tokens.shape == (4, 1) and (batch.targets == 1).all()
