"""Corrupted text: BERT's masked tokens and T5's span corruption.

The text is a `Corpus`, the concatenated tokens of all documents. It is cut into windows, at another offset in each
epoch; what is masked follows from the seed, the epoch and the window's index.

    B batch, T positions, N tokens of the corpus, D documents
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from heedful.data.corpus import Corpus
from heedful.data.dataset import IGNORED, Draw
from heedful.data.loader import random_bits
from heedful.data.pairs import pair_batch
from heedful.data.ragged import content_digest
from heedful.data.whole_words import choose_words, continues_word
from heedful.models.base import Batch
from heedful.text import Tokenizer

WINDOWS_PER_PART = 16


class DocumentWindows:
    """Documents cut into windows of `least` to `size` tokens that cover everything.

    If `shifted`, each document is cut at another random offset in each epoch.
    """

    def __init__(self, starts: np.ndarray, n_tokens: int, size: int, *, least: int, shifted: bool) -> None:
        starts = np.asarray(starts, dtype=np.int64)
        lengths = np.append(starts[1:], n_tokens) - starts
        long_enough = lengths >= least
        self.begins, self.lengths = starts[long_enough], lengths[long_enough]
        if not len(self.begins):
            raise ValueError(f"the text has no document of {least} tokens or more: give more text")
        self.size, self.least, self.shifted = size, least, shifted
        self.counts = -(-self.lengths // size)
        self.totals = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self.totals[-1])

    def at(self, draws: Sequence[Draw], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Begin and end of each window in the corpus, and which document it is in, (B,) each."""
        index = np.array([d.index for d in draws])
        document = np.searchsorted(self.totals, index, side="right")
        count, length = self.counts[document], self.lengths[document]
        number = index - (self.totals[document] - count)
        rest = length - (count - 1) * self.size  # tokens of the last window, if the first is full
        low = np.maximum(0, self.least - rest)
        shift = low
        if self.shifted:
            high = np.minimum(self.size - rest, self.size - self.least)
            spare = np.maximum(high - low + 1, 1)
            # One offset for all windows of a document, which would else overlap or leave gaps.
            keys = [(seed, d.epoch, x) for d, x in zip(draws, document.tolist(), strict=True)]
            shift = low + (np.array([_bits(*key) for key in keys]) % spare.astype(np.uint64)).astype(np.int64)
        begin = np.clip(number * self.size - shift, 0, length)
        end = np.clip((number + 1) * self.size - shift, 0, length)
        single = count == 1
        begin, end = np.where(single, 0, begin), np.where(single, length, end)
        return self.begins[document] + begin, self.begins[document] + end, document


@lru_cache(maxsize=2**14)
def _bits(seed: int, epoch: int, document: int) -> np.uint64:
    bits: np.uint64 = random_bits(1, seed, 3, epoch, document)[0]
    return bits


class MaskedWindows:
    """BERT's pre-training data (Devlin et al. 2019, section 3.1): [CLS] A [SEP] B [SEP] with masked tokens.

    B follows A in the text, or comes from another document, half of the time each; a text of one document is cut into
    parts of WINDOWS_PER_PART windows that stand for documents. A "sentence" is any span of text, as
    in the paper: a window of a document is cut in two at a random place. 15 % of the tokens are chosen as targets; of
    these 80 % become [MASK], 10 % a random token, 10 % stay. One window in ten is shortened, as in the authors' code,
    so that a model sees short texts too.

    Without `pairs` a row is one window, [CLS] ... [SEP] (RoBERTa, DistilBERT), of concatenated documents with attention
    kept inside each. All rows are padded to `length`, which `objectives.masked` relies on.

    With `whole_words` all pieces of a word are targets, or none (BERT's second release): words are chosen in random
    order as long as they fit into the 15 %.
    """

    lengths: None = None

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        length: int = 128,
        *,
        pairs: bool = True,
        share: float = 0.15,
        short: float = 0.1,
        shifted: bool = True,
        segments: bool = True,
        documents: bool = True,
        whole_words: bool = False,
    ) -> None:
        self.cls_id = _needed(tokenizer.cls_id if tokenizer.cls_id is not None else tokenizer.bos_id, "[CLS]")
        self.sep_id = _needed(tokenizer.sep_id if tokenizer.sep_id is not None else tokenizer.eos_id, "[SEP]")
        self.mask_id = _needed(tokenizer.mask_id, "[MASK]")
        self.corpus, self.length, self.pairs = corpus, length, pairs
        self.share, self.short, self.segments = share, short if shifted else 0.0, segments and pairs
        special = set(tokenizer.special_tokens.values())
        self.ordinary = np.array([i for i in range(tokenizer.vocab_size) if i not in special])
        self.continues = continues_word(tokenizer) if whole_words else None
        self.tokens = corpus.tokens.view(np.ndarray)  # a memmap's own indexing is slow
        room = length - (3 if pairs else 2)
        if room < 4:
            raise ValueError(f"rows of {length} tokens leave no room for a text: set data.length to 8 or more")
        starts = corpus.starts if pairs else np.zeros(1, dtype=np.int64)
        if pairs and len(starts) == 1:  # the parts of one long document stand for documents
            n_parts = max(2, len(self.tokens) // (WINDOWS_PER_PART * room))
            starts = np.linspace(0, len(self.tokens), n_parts, endpoint=False).astype(np.int64)
        self.cuts = DocumentWindows(starts, len(self.tokens), room, least=2, shifted=shifted)
        self.documents = documents and not pairs and len(corpus.starts) > 1
        if pairs and len(self.cuts.begins) < 2:
            raise ValueError(
                "next-sentence prediction needs two documents or more, or one of at least 4 tokens: give more text, or "
                "set data.pairs to false"
            )

    def __len__(self) -> int:
        return len(self.cuts)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        made = (
            self.length,
            self.pairs,
            self.share,
            self.short,
            self.cuts.shifted,
            self.segments,
            self.documents,
            *(["whole words"] if self.continues is not None else []),
        )
        return content_digest("masked", self.corpus.fingerprint, self.mask_id, self.cls_id, self.sep_id, *made)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        # Six random numbers choose the texts, three per position the masking.
        chance = np.stack([d.random(seed).random(6 + 3 * self.length) for d in draws])
        where, fates = chance[:, :6].T, chance[:, 6:].reshape(len(draws), 3, -1).transpose(1, 0, 2)
        begin, end, document = self.cuts.at(draws, seed)
        n = end - begin
        n = np.where(where[0] < self.short, 2 + np.floor(where[1] * (n - 1)).astype(np.int64), n)
        place = np.arange(self.length)
        after = None
        if self.pairs:
            n_first = 1 + np.floor(where[2] * (n - 1)).astype(np.int64)
            other, n_second, after = self._second(where[3:], document, begin + n_first, n - n_first)
            n_inside = n_first + 1 + n_second  # with the [SEP] between them
            in_first = place[None] <= n_first[:, None]
            source = np.where(in_first, (begin - 1)[:, None] + place, (other - n_first - 2)[:, None] + place)
            marks = (place == 0) | (place == n_first[:, None] + 1) | (place == n_inside[:, None] + 1)
        else:
            n_inside = n
            source = (begin - 1)[:, None] + place
            marks = (place == 0) | (place == n_inside[:, None] + 1)
        real = place < n_inside[:, None] + 2  # (B, T)
        inner = real & ~marks
        source = np.clip(source, 0, len(self.tokens) - 1)
        ids = np.where(inner, self.tokens[source].astype(np.int64), 0)
        ids[marks & real] = self.sep_id
        ids[:, 0] = self.cls_id
        targets, ids = self._mask(ids, inner, fates)
        full = bool(real.all())
        return Batch(
            torch.from_numpy(ids),
            None if full else torch.from_numpy(n_inside + 2),
            segments=torch.from_numpy((real & (place > n_first[:, None] + 1)).astype(np.int64))
            if self.segments
            else None,
            documents=self._numbers(begin, n) if self.documents else None,
            targets=torch.from_numpy(targets),
            next_sentence=None if after is None else torch.from_numpy(after),
        )

    def _second(
        self, where: np.ndarray, document: np.ndarray, begin: np.ndarray, n: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start and length of B, and the label: 1 if it is from another document, 0 if it follows A."""
        strange = where[0] < 0.5
        cuts = self.cuts
        other = np.floor(where[1] * (len(cuts.begins) - 1)).astype(np.int64)
        other += other >= document  # any but this one
        n_other = np.minimum(n, cuts.lengths[other])
        place = np.floor(where[2] * (cuts.lengths[other] - n_other + 1)).astype(np.int64)
        begin_other = cuts.begins[other] + place
        return np.where(strange, begin_other, begin), np.where(strange, n_other, n), strange.astype(np.int64)

    def _mask(self, ids: np.ndarray, inner: np.ndarray, fates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Targets, and ids with the chosen tokens masked; every row has the same fraction of targets."""
        lot, fate, token = fates
        n_chosen = np.maximum(1, np.round(self.share * inner.sum(axis=1))).astype(np.int64)
        if self.continues is None:
            lot = np.where(inner, lot, 2.0)
            chosen = lot <= np.take_along_axis(np.sort(lot, axis=1), n_chosen[:, None] - 1, axis=1)
        else:
            chosen = choose_words(inner, self.continues[ids], lot, n_chosen)
        targets = np.where(chosen, ids, IGNORED)
        random = self.ordinary[(token * len(self.ordinary)).astype(np.int64)]
        hidden = np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, random, ids))
        return targets, np.where(chosen, hidden, ids)

    def _numbers(self, begin: np.ndarray, n: np.ndarray) -> Tensor:
        """The document number of each token; [CLS] belongs to the first document, [SEP] to the last."""
        place = np.clip(np.arange(self.length) - 1, 0, n[:, None] - 1)
        number = np.searchsorted(self.corpus.starts, begin[:, None] + place, side="right")
        return torch.from_numpy(number - number[:, :1])


def _needed(token: int | None, name: str) -> int:
    if token is None:
        raise ValueError(
            f"this tokenizer has no {name}, and hidden words need one: train a WordPiece (tokenizer.kind wordpiece)"
        )
    return token


class SpanCorruption:
    """T5's span corruption (Raffel et al. 2020, section 3.1.4): spans become sentinels, the target restores them.

        Thank you <X> me to your party <Y> week.       ->       <X> for inviting <Y> last <Z>

    15 % of the tokens are corrupted, in spans of 3 on average. A window has as many tokens as give a source of `length`
    after each span is replaced by a sentinel and </s> is added. Documents are concatenated, as in the authors' code.
    """

    lengths: None = None

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        length: int = 512,
        *,
        start_id: int,
        vocab_size: int | None = None,
        share: float = 0.15,
        mean: float = 3.0,
        shifted: bool = True,
    ) -> None:
        """`vocab_size` is the model's: its last tokens are the sentinels if the tokenizer has no <extra_id_0>."""
        if tokenizer.eos_id is None:
            raise ValueError("this tokenizer has no token that ends a text, and the target must end")
        self.corpus, self.share, self.mean = corpus, share, mean
        self.start_id, self.eos_id = start_id, tokenizer.eos_id
        self.tokens = corpus.tokens.view(np.ndarray)
        self.size = uncorrupted_length(length, share, mean)
        n_spans = span_counts(self.size, share, mean)[1]
        self.sentinels = find_sentinels(tokenizer, vocab_size, n_spans + 1)
        self.cuts = DocumentWindows(np.zeros(1, dtype=np.int64), len(self.tokens), self.size, least=2, shifted=shifted)

    def __len__(self) -> int:
        return len(self.cuts)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        made = (self.size, self.share, self.mean, self.start_id, self.eos_id, self.cuts.shifted)
        return content_digest("spans", self.corpus.fingerprint, self.sentinels, *made)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        begins, ends, _ = self.cuts.at(draws, seed)
        sources, targets = [], []
        for draw, begin, end in zip(draws, begins, ends, strict=True):
            tokens = self.tokens[begin:end].astype(np.int64)
            noise = noise_mask(len(tokens), self.share, self.mean, draw.random(seed))
            source, target = corrupt_spans(tokens, noise, self.sentinels)
            sources.append(np.append(source, self.eos_id))
            targets.append(target)
        return pair_batch(sources, targets, self.start_id, self.eos_id)


def span_counts(n: int, share: float, mean: float) -> tuple[int, int]:
    """How many of n tokens are corrupted, and in how many spans."""
    n_hidden = min(max(round(n * share), 1), n - 1)
    n_spans = max(round(n_hidden / mean), 1)
    return n_hidden, min(n_spans, n_hidden, n - n_hidden)


def uncorrupted_length(length: int, share: float, mean: float) -> int:
    """How many tokens give a corrupted source of `length`: 568 for 512 in T5."""

    def read(n: int) -> int:
        n_hidden, n_spans = span_counts(n, share, mean)
        return n - n_hidden + n_spans + 1

    if length < read(2):
        raise ValueError(f"a source of {length} tokens has no room for a span: set data.length to 3 or more")
    n = 2
    while read(n + 1) <= length:
        n += 1
    return n


def noise_mask(n: int, share: float, mean: float, random: np.random.Generator) -> np.ndarray:
    """A mask (n,) of the corrupted tokens: spans of random lengths, alternating with uncorrupted text."""
    n_hidden, n_spans = span_counts(n, share, mean)
    kept, hidden = (_parts(k, n_spans, random) for k in (n - n_hidden, n_hidden))
    sizes = np.stack([kept, hidden], axis=1).reshape(-1)
    mask: np.ndarray = np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)
    return mask


def _parts(n: int, n_parts: int, random: np.random.Generator) -> np.ndarray:
    """A uniformly random composition of n into n_parts positive numbers."""
    cuts = np.sort(np.argsort(random.random(n - 1))[: n_parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [n]]))


def corrupt_spans(tokens: np.ndarray, hidden: np.ndarray, sentinels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source and target: in the source each corrupted span is a sentinel, in the target the text between spans."""

    def replaced(gone: np.ndarray) -> np.ndarray:
        first = gone & ~np.concatenate([[False], gone[:-1]])
        number = np.clip(np.cumsum(first) - 1, 0, None)
        out: np.ndarray = np.where(first, sentinels[number], tokens)[~gone | first]
        return out

    return replaced(hidden), replaced(~hidden)


def find_sentinels(tokenizer: Tokenizer, vocab_size: int | None, n: int) -> np.ndarray:
    """The ids of <extra_id_0>, <extra_id_1>, ...; without them the last ids of the vocabulary, descending."""
    named = [tokenizer.id(f"<extra_id_{i}>") for i in range(n)]
    if named[0] is None:
        size = vocab_size or 0
        if size - n < tokenizer.vocab_size:
            raise ValueError(
                f"{n} tokens are needed that stand for hidden spans: the tokenizer has {tokenizer.vocab_size}, so give "
                f"the model a vocab_size of {tokenizer.vocab_size + n} or more, or set data.length lower"
            )
        return np.arange(size - 1, size - 1 - n, -1)
    found = [index for index in named if index is not None]
    if len(found) < n:
        raise ValueError(
            f"{n} spans are hidden in a row, and the tokenizer has {len(found)} <extra_id_>: set data.length lower"
        )
    return np.array(found)
