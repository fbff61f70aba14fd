"""Windows of tokens: what each epoch shows of them, and documents that stay apart."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.corpus import Corpus, TokenWindows, uniform_cross_entropy, unigram_entropy
from heedful.data.dataset import IGNORED, Draw
from heedful.models.base import Batch
from heedful.models.gpt import GPT, GPTConfig
from heedful.train.objectives import causal


def epoch_of(data: TokenWindows, epoch: int = 0, seed: int = 1) -> Batch:
    return data.batch([Draw(epoch, index) for index in range(len(data))], seed)


def counted(n: int) -> Corpus:
    return Corpus.of([np.arange(n)], n_bytes=4 * n)


@settings(deadline=None)
@given(n=st.integers(2, 200), length=st.integers(1, 40), epoch=st.integers(0, 5))
def test_training_windows_are_whole_and_apart(n, length, epoch):
    if n < length + 1:
        with pytest.raises(ValueError, match=f"set data.length to at most {n - 1}"):
            TokenWindows(counted(n), length)
        return
    batch = epoch_of(TokenWindows(counted(n), length), epoch)
    assert batch.lengths is None and batch.documents is None
    assert (batch.targets == batch.ids + 1).all() and batch.targets.max() < n
    assert batch.ids.unique().numel() == batch.ids.numel()  # no token twice an epoch
    assert n - batch.ids.numel() <= 2 * length  # and at most a window at either end left out


@settings(deadline=None)
@given(n=st.integers(2, 200), length=st.integers(1, 40))
def test_validation_windows_cover_everything(n, length):
    data = TokenWindows(counted(n), length, shifted=False)
    batch = epoch_of(data)
    assert batch.targets[batch.targets != IGNORED].tolist() == list(range(1, n))
    lengths = [length] * len(data) if batch.lengths is None else batch.lengths.tolist()
    assert sum(lengths) == n - 1
    assert torch.equal(batch.ids, epoch_of(data, epoch=3, seed=9).ids)


def test_every_epoch_begins_elsewhere():
    data = TokenWindows(counted(1000), 10)
    begins = [int(epoch_of(data, epoch).ids[0, 0]) for epoch in range(300)]
    assert set(begins) == set(range(10))
    assert begins == [int(epoch_of(data, epoch).ids[0, 0]) for epoch in range(300)]
    straddling = data.batch([Draw(0, 5), Draw(1, 5)], 1).ids[:, 0].tolist()
    assert straddling == [begins[0] + 50, begins[1] + 50]


def test_texts_too_short():
    with pytest.raises(ValueError, match="the text has 57 tokens, and a window of 256 needs 257"):
        TokenWindows(counted(57), 256)
    with pytest.raises(ValueError, match="at least 2"):
        TokenWindows(counted(1), 4, shifted=False)
    with pytest.raises(ValueError, match="at least 1"):
        TokenWindows(counted(10), 0)


def test_documents_are_numbered_and_never_foretell_each_other():
    corpus = Corpus.of([[10, 11, 12], [20], [30, 31, 32, 33, 34], [40, 41]])
    batch = epoch_of(TokenWindows(corpus, 4, shifted=False))
    assert batch.ids[:2].tolist() == [[10, 11, 12, 20], [30, 31, 32, 33]]
    assert batch.documents[:2].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    x = IGNORED
    assert batch.targets.tolist() == [[11, 12, x, x], [31, 32, 33, 34], [x, 41, x, x]]
    assert batch.documents[2, :2].tolist() == [0, 1] and batch.lengths.tolist() == [4, 4, 2]
    through = epoch_of(TokenWindows(corpus, 4, shifted=False, documents=False))
    assert through.documents is None and (through.targets != IGNORED).sum() == 10


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=20),
    length=st.integers(1, 15),
    seed=st.integers(0, 9),
)
def test_documents_of_any_sizes(sizes, length, seed):
    documents = [np.arange(size) + 100 * number for number, size in enumerate(sizes)]
    corpus = Corpus.of(documents)
    for shifted in (True, False):
        if shifted and sum(sizes) < length + 1:
            continue
        batch = epoch_of(TokenWindows(corpus, length, shifted=shifted), seed=seed)
        real = np.full(len(batch.ids), length) if batch.lengths is None else batch.lengths.numpy()
        for row, n in enumerate(real):
            ids, targets = batch.ids[row, :n].numpy(), batch.targets[row, :n].numpy()
            inside = targets != IGNORED
            assert (targets[inside] == ids[inside] + 1).all()
            ends = np.isin(ids, [document[-1] for document in documents])
            assert (inside == ~ends).all()
            if batch.documents is not None:
                assert (np.diff(batch.documents[row, :n]) == (np.diff(ids // 100) > 0)).all()


def test_packed_documents_are_learnt_from_as_if_they_were_separate():
    torch.manual_seed(1)
    model = GPT.create(GPTConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=50, max_len=32, dropout=0.0))
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 50, size=n) for n in (5, 1, 9, 3, 14)]
    corpus = Corpus.of(documents)
    packed = causal(model, epoch_of(TokenWindows(corpus, 32, shifted=False)))
    total, n_targets = 0.0, 0
    for document in documents:
        if len(document) > 1:
            alone = causal(model, epoch_of(TokenWindows(Corpus.of([document]), 32, shifted=False)))
            total, n_targets = total + alone.sum, n_targets + int(alone.n_targets)
    assert int(packed.n_targets) == n_targets == 27
    torch.testing.assert_close(packed.sum, total, rtol=1e-6, atol=1e-5)
    unpacked = causal(model, epoch_of(TokenWindows(corpus, 32, shifted=False, documents=False)))
    assert abs(unpacked.sum.item() - packed.sum.item()) > 1  # the numbers of documents matter
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (packed.sum, total)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_baselines():
    assert uniform_cross_entropy(65) == pytest.approx(4.1744, abs=1e-4)
    assert unigram_entropy(np.array([3, 3, 3, 3])) == 0
    assert unigram_entropy(np.arange(64, dtype=np.uint16).repeat(3)) == pytest.approx(math.log(64))
    many = np.random.default_rng(0).choice(4, p=[0.5, 0.25, 0.125, 0.125], size=2**19)
    assert unigram_entropy(many) == pytest.approx(1.75 * math.log(2), rel=1e-3)
    assert unigram_entropy(many, n_most=2**17) == pytest.approx(1.75 * math.log(2), rel=1e-2)


def test_fingerprints_and_bytes():
    corpus = counted(100)
    assert TokenWindows(corpus, 10).bytes_per_token == 4
    prints = {
        TokenWindows(corpus, 10).fingerprint,
        TokenWindows(corpus, 9).fingerprint,
        TokenWindows(corpus, 10, shifted=False).fingerprint,
        TokenWindows(counted(101), 10).fingerprint,
    }
    assert len(prints) == 4
    assert TokenWindows(corpus, 10).fingerprint == TokenWindows(counted(100), 10).fingerprint
