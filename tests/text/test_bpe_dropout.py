"""BPE-dropout: the same text, cut as the library's own dropout cuts it on average, and the same for the same draw."""

import numpy as np
import pytest
import tokenizers

from heedful.data.dataset import Draw
from heedful.data.pairs import Pairs
from heedful.text import BPEDropout, train_bpe, train_unigram

TEXTS = [
    "a man rides a bicycle down the street",
    "two dogs are running in the snow",
    "the man is running",
    "streets",
] * 9


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 330, special=("<|endoftext|>", "<pad>"))


def test_text_stays_and_the_mean_length_is_that_of_the_library(tokenizer):
    cut, chance = BPEDropout(tokenizer, 0.3), np.random.default_rng(0)
    ids = [tokenizer.encode(text) for text in TEXTS[:4]]
    ours = [cut(row, chance) for row in ids for _ in range(400)]
    assert {tokenizer.decode(row) for row in ours} == set(TEXTS[:4])
    theirs = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    theirs.model.dropout = 0.3
    lengths = [len(theirs.encode(text).ids) for text in TEXTS[:4] for _ in range(400)]
    assert np.mean([len(row) for row in ours]) == pytest.approx(np.mean(lengths), rel=0.05)
    assert len({tuple(row) for row in ours}) > 100


def test_nothing_is_left_out_at_rate_zero_and_special_tokens_stay(tokenizer):
    ids = [*tokenizer.encode(TEXTS[0]), tokenizer.eos_id]
    assert BPEDropout(tokenizer, 0.0)(ids, np.random.default_rng(0)) == ids
    assert BPEDropout(tokenizer, 0.9)(ids, np.random.default_rng(0))[-1] == tokenizer.eos_id
    with pytest.raises(ValueError, match="byte-pair encoding"):
        BPEDropout(train_unigram(TEXTS, 60), 0.1)


def test_pairs_are_cut_anew_in_each_epoch_and_alike_for_a_draw(tokenizer):
    rows = tokenizer.encode_batch(TEXTS[:4])
    plain = Pairs(rows, rows, start_id=tokenizer.pad_id, eos_id=tokenizer.eos_id)
    data = plain.with_dropout(tokenizer, 0.3)
    first, again, later = (data.batch([Draw(epoch, 0), Draw(epoch, 1)], 1) for epoch in (0, 0, 1))
    assert first.source.equal(again.source) and first.targets.equal(again.targets)
    assert first.source.shape != later.source.shape or not first.source.equal(later.source)
    assert data.fingerprint != plain.fingerprint and plain.dropouts is None
    fresh = plain.with_dropout(tokenizer, 0.3).batch([Draw(0, 0), Draw(0, 1)], 1)  # what was cached plays no part
    assert fresh.source.equal(first.source)


def test_a_pair_that_would_become_too_long_stays_as_it_is(tokenizer):
    rows = tokenizer.encode_batch(TEXTS[:4])
    longest = max(map(len, rows))
    data = Pairs(rows, rows, start_id=0, eos_id=None, max_length=longest + 1).with_dropout(tokenizer, 0.9)
    for epoch in range(20):
        batch = data.batch([Draw(epoch, i) for i in range(4)], 1)
        assert batch.source.shape[1] <= longest + 1 and batch.tokens.shape[1] <= longest + 1
