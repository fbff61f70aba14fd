"""Hidden words, hidden spans, neighbours: against the papers' own examples and numbers."""

import numpy as np
import pytest
import torch

from heedful.data.corpus import Corpus
from heedful.data.corruption import (
    MaskedWindows,
    SpanCorruption,
    corrupt_spans,
    find_sentinels,
    noise_mask,
    span_counts,
    uncorrupted_length,
)
from heedful.data.dataset import Draw
from heedful.data.neighbour_windows import CBOWWindows
from heedful.text import byte_tokens, train_unigram, train_wordpiece, words

TEXT = "the cat sat on the mat and a dog ran over to it at once while we slept"


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([TEXT] * 5, 90)


def corpus(tokenizer, sizes=(70, 300, 5, 41, 1, 120), seed=0):
    """Documents d whose tokens are told apart by where they stand, as far as the vocabulary goes."""
    random = np.random.default_rng(seed)
    return Corpus.of([random.integers(5, tokenizer.vocab_size, n).tolist() for n in sizes])


def whole(data, epoch=0, seed=3):
    return data.batch([Draw(epoch, i) for i in range(len(data))], seed)


def restored(batch):
    return torch.where(batch.targets != -100, batch.targets, batch.tokens)


def find(tokens, part):
    """Every place where a list stands in an array."""
    n = len(part)
    return [i for i in range(len(tokens) - n + 1) if tokens[i : i + n].tolist() == part]


def test_bert_rows_are_two_spans_that_follow_each_other_or_do_not(tokenizer):
    text = corpus(tokenizer)
    data = MaskedWindows(text, tokenizer, 32)
    owner = np.searchsorted(text.starts, np.arange(len(text.tokens)), side="right")
    follows = []
    for epoch in range(8):
        batch = whole(data, epoch)
        rows = restored(batch)
        n_rows = torch.full((len(rows),), 32) if batch.lengths is None else batch.lengths
        for row, n, segments, other in zip(rows, n_rows, batch.segments, batch.next_sentence, strict=True):
            ids = row[: int(n)].tolist()
            first_sep = ids.index(tokenizer.sep_id)
            assert ids[0] == tokenizer.cls_id and ids[-1] == tokenizer.sep_id
            a, b = ids[1:first_sep], ids[first_sep + 1 : -1]
            assert a and b and len(ids) <= 32
            assert segments[: int(n)].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
            assert not segments[int(n) :].any()
            together = find(text.tokens, a + b)
            if other == 0:
                assert any(owner[i] == owner[i + len(a + b) - 1] for i in together)
            elif len(a) > 3 and len(b) > 3:  # long enough to be found in one place alone
                (place,), (start,) = find(text.tokens, a), find(text.tokens, b)
                assert owner[place] != owner[start] == owner[start + len(b) - 1]
            follows.append(int(other))
    assert 0.4 < np.mean(follows) < 0.6


def test_fifteen_percent_are_chosen_and_80_10_10_become_of_them(tokenizer):
    data = MaskedWindows(corpus(tokenizer, (4000, 4000)), tokenizer, 64, short=0.0)
    batches = [whole(data, epoch) for epoch in range(4)]
    tokens = torch.cat([b.tokens for b in batches])
    targets = torch.cat([b.targets for b in batches])
    chosen = targets != -100
    assert not torch.isin(targets[chosen], torch.tensor([0, 1, 2, 3, 4])).any()  # no special token is asked for
    share = chosen.sum(dim=1) / 61
    full = batches[0].lengths is None or (torch.cat([b.lengths for b in batches]) == 64)
    assert (share[full] - 0.15).abs().max() < 0.5 / 61
    masked = (tokens[chosen] == tokenizer.mask_id).float().mean()
    kept = (tokens[chosen] == targets[chosen]).float().mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1 - 0.1 / len(data.ordinary)) < 0.02
    assert not (tokens[~chosen] == tokenizer.mask_id).any()


def test_the_same_draw_is_the_same_and_another_epoch_another(tokenizer):
    data = MaskedWindows(corpus(tokenizer), tokenizer, 32)
    alone = data.batch([Draw(1, 4)], 3)
    among = data.batch([Draw(0, 2), Draw(1, 4), Draw(1, 5)], 3)
    assert torch.equal(alone.tokens[0], among.tokens[1])
    assert torch.equal(alone.targets[0], among.targets[1])
    assert not torch.equal(alone.targets, data.batch([Draw(2, 4)], 3).targets)
    assert not torch.equal(alone.targets, data.batch([Draw(1, 4)], 4).targets)


@pytest.mark.parametrize("shifted", [True, False])
def test_windows_cover_every_token_of_a_document_once(tokenizer, shifted):
    text = corpus(tokenizer)
    for size, least in (29, 2), (7, 2), (3, 2), (8, 1):
        data = CBOWWindows(text, size, shifted=shifted)
        data.cuts = type(data.cuts)(text.starts, len(text.tokens), size, least=least, shifted=shifted)
        for epoch in 0, 1, 2:
            begin, end, _ = data.cuts.at([Draw(epoch, i) for i in range(len(data.cuts))], 5)
            seen = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
            sizes = np.diff([*text.starts, len(text.tokens)])
            lost = set(text.starts[sizes < least])
            assert seen.tolist() == [i for i in range(len(text.tokens)) if i not in lost]
            assert (end - begin).min() >= least and (end - begin).max() <= size


def test_without_pairs_documents_share_rows_and_keep_apart(tokenizer):
    text = corpus(tokenizer, (10, 3, 40, 6))
    data = MaskedWindows(text, tokenizer, 20, pairs=False, shifted=False)
    batch = whole(data)
    assert batch.segments is None and batch.next_sentence is None
    rows, n_rows = restored(batch), batch.lengths.tolist()
    inside = [row[1 : n - 1] for row, n in zip(rows, n_rows, strict=True)]
    assert torch.cat(inside).tolist() == text.tokens.tolist()
    assert all(r[0] == tokenizer.cls_id and r[n - 1] == tokenizer.sep_id for r, n in zip(rows, n_rows, strict=True))
    assert batch.documents[0].tolist() == [0] * 11 + [1] * 3 + [2] * 6


def test_the_parts_of_one_document_stand_for_documents(tokenizer):
    """So that a plain text file is enough for next-sentence prediction."""
    data = MaskedWindows(corpus(tokenizer, (2000,)), tokenizer, 32)
    assert len(data.cuts.begins) == 2000 // (16 * 29)
    labels = whole(data).next_sentence
    assert 0.2 < labels.float().mean() < 0.8
    assert len(MaskedWindows(corpus(tokenizer, (100,)), tokenizer, 32).cuts.begins) == 2


def test_bert_needs_some_text_and_a_mask(tokenizer):
    with pytest.raises(ValueError, match="two documents or more"):
        MaskedWindows(corpus(tokenizer, (3,)), tokenizer, 32)
    with pytest.raises(ValueError, match=r"no \[(MASK|CLS)\]"):
        MaskedWindows(corpus(tokenizer), train_unigram([TEXT] * 5, 60), 32)


def test_spans_are_those_of_the_papers_figure_2():
    """Thank you for inviting me to your party last week, with "for inviting" and "last" hidden."""
    sentence = "Thank you for inviting me to your party last week ."
    tokenizer = words([sentence])
    ids = np.array(tokenizer.encode(sentence))
    hidden = np.isin(np.arange(len(ids)), [2, 3, 8])
    x, y, z = 97, 98, 99
    source, target = corrupt_spans(ids, hidden, np.array([x, y, z]))

    def spoken(row):
        return " ".join({x: "<X>", y: "<Y>", z: "<Z>"}.get(i) or tokenizer.token(i) for i in row.tolist())

    assert spoken(source) == "Thank you <X> me to your party <Y> week ."
    assert spoken(target) == "<X> for inviting <Y> last <Z>"


def test_span_lengths_are_those_of_the_authors_code():
    """T5 reads 568 tokens for sources of 512 and targets of 114, sentinels and </s> counted."""
    n = uncorrupted_length(512, 0.15, 3.0)
    n_hidden, n_spans = span_counts(n, 0.15, 3.0)
    assert (n, n - n_hidden + n_spans + 1, n_hidden + n_spans + 1) == (568, 512, 114)


def test_noise_hides_the_share_in_spans_of_the_mean_length():
    random = np.random.default_rng(0)
    masks = np.stack([noise_mask(568, 0.15, 3.0, random) for _ in range(200)])
    assert (masks.sum(axis=1) == 85).all() and not masks[:, 0].any() and masks[:, -1].all()
    starts = masks[:, 1:] & ~masks[:, :-1]
    assert (starts.sum(axis=1) == 28).all()
    middle = masks[:, 20:-20].mean(axis=0)
    assert abs(middle.mean() - 0.15) < 0.01 and middle.std() < 0.05  # every place alike
    for n in range(2, 30):
        assert 1 <= noise_mask(n, 0.5, 1.0, random).sum() <= n - 1


def test_spans_put_back_together_are_the_text():
    tokenizer = byte_tokens(extra=100)
    text = Corpus.of([list(range(3, 203)), list(range(30, 130))])
    data = SpanCorruption(text, tokenizer, 40, start_id=0, shifted=False)
    batch = whole(data)
    n_sources = batch.source_lengths if batch.source_lengths is not None else torch.full((len(data),), 40)
    top = tokenizer.id("<extra_id_0>")
    said = []
    for source, n, target in zip(batch.source, n_sources, batch.targets, strict=True):
        parts = target[target != -100].tolist()
        assert parts.pop() == tokenizer.eos_id and source[n - 1] == tokenizer.eos_id
        spans = {}
        for i in parts:
            if i > 258:
                spans[i] = last = []
            else:
                last.append(i)
        assert [*spans] == [top - k for k in range(len(spans))] or [*spans] == [top + k for k in range(len(spans))]
        for i in source[: n - 1].tolist():
            said += spans[i] if i in spans else [i]
    assert said == text.tokens.tolist()
    shifted = torch.cat([torch.zeros(len(data), 1, dtype=torch.long), batch.targets[:, :-1]], dim=1)
    counts = batch.targets != -100
    assert torch.equal(batch.tokens[counts], shifted[counts])


def test_sentinels_are_the_tokenizers_or_the_models_last_tokens():
    plain = train_unigram([TEXT] * 5, 40)
    n = plain.vocab_size
    assert find_sentinels(plain, n + 4, 3).tolist() == [n + 3, n + 2, n + 1]
    with pytest.raises(ValueError, match=f"vocab_size of {n + 8}"):
        find_sentinels(plain, n + 4, 8)
    extra = train_unigram([TEXT] * 5, 60, special=[f"<extra_id_{i}>" for i in range(5)])
    assert find_sentinels(extra, None, 3).tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="has 5"):
        find_sentinels(extra, None, 6)


def test_neighbours_are_their_own_targets_within_documents(tokenizer):
    text = corpus(tokenizer, (10, 3, 40, 6))
    batch = whole(CBOWWindows(text, 16, shifted=False))
    counts = batch.targets != -100
    assert torch.equal(batch.tokens[counts], batch.targets[counts])
    assert batch.targets[counts].tolist() == text.tokens.tolist()
    assert batch.documents[0].tolist() == [1] * 10 + [2] * 3 + [3] * 3
    assert counts.sum(dim=1).tolist() == batch.lengths.tolist()


def test_fingerprints_follow_the_data_and_how_it_is_cut(tokenizer):
    text, other = corpus(tokenizer), corpus(tokenizer, seed=1)
    made = [
        MaskedWindows(text, tokenizer, 32),
        MaskedWindows(other, tokenizer, 32),
        MaskedWindows(text, tokenizer, 33),
        MaskedWindows(text, tokenizer, 32, pairs=False),
        CBOWWindows(text, 32),
        CBOWWindows(text, 33),
    ]
    assert len({m.fingerprint for m in made}) == len(made)
    assert made[0].fingerprint == MaskedWindows(text, tokenizer, 32).fingerprint


def test_whole_words_are_hidden_together_and_never_too_many():
    tokenizer = train_wordpiece(["unbelievable understanding of the cats and dogs"] * 3, 60)
    assert len(tokenizer.encode("unbelievable")) > 1
    texts = ["the cats unbelievable dogs understanding of dogs the and unbelievable cats of understanding the"] * 40
    text = Corpus.of([tokenizer.encode(text) for text in texts])
    data = MaskedWindows(text, tokenizer, 34, pairs=False, whole_words=True, share=0.25, documents=False)
    shares, words = [], []
    for epoch in range(6):
        batch = whole(data, epoch)
        for ids, targets, n in zip(restored(batch), batch.targets, batch.lengths.tolist(), strict=True):
            hidden = (targets != -100).tolist()
            assert not hidden[0] and not any(hidden[n - 1 :])
            groups: list[list[int]] = []
            for place in range(1, n - 1):  # a window may begin inside a word
                if place > 1 and tokenizer.token(int(ids[place])).startswith("##"):
                    groups[-1].append(place)
                else:
                    groups.append([place])
            chosen = [group for group in groups if any(hidden[place] for place in group)]
            assert chosen and all(all(hidden[place] for place in group) for group in chosen)
            assert sum(hidden) <= max(round(0.25 * (n - 2)), len(chosen[0]))
            shares.append(sum(hidden) / (n - 2))
            words += [len(group) for group in chosen]
    assert 0.15 < np.mean(shares) < 0.25 and max(words) > 1
    alone = MaskedWindows(text, tokenizer, 34, pairs=False, share=0.25, documents=False)
    assert alone.fingerprint != data.fingerprint
