"""Scores of the sentences of a test of bias, by what the model is.

blank       log p(word in the blank | the sentence), as `heedful fill` has it: masked models, CBOW, causal models;
            a word of several tokens is scored as a whole, and by a causal model with the text after the blank if any
            template has some: then probabilities are those among the words that are compared
sentence    causal models: log p of the sentence's tokens from left to right; masked ones: the pseudo-log-
            likelihood, each token's log p with that token masked (Salazar et al. 2020). The tokens of the group's
            member are left out, so that a rare name makes no difference of its own (Nangia et al. 2020, section 4),
            unless the test is `whole`. Of a pair of sentences a masked model counts the tokens that both have, as
            that paper does, a causal one all of them, as lm-evaluation-harness does.
label       the probability of a classifier's label, in percent

T templates, F values of their places and words, M members of a group
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np
import torch

from heedful.data.ragged import lengths_if_padded, pad_ids
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.evaluate.bias_tests import BLANK, BiasTest
from heedful.models.base import Batch, DecoderModel, Model
from heedful.models.encoder import EncoderModel
from heedful.models.heads import MaskedHead
from heedful.observe.fill import fill_template
from heedful.observe.template import Template
from heedful.tasks.classify import classify_texts
from heedful.tasks.embed import batch_by_length
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown

SLICE = 64  # sentences between two yields
SLICE_OF_BLANKS = 16  # in each of which every word is scored
MAX_LOGITS = 2**25  # at once

Scores = list[np.ndarray]  # (T, F, M) of each group; of pairs (1, F, 1)


def score_in_slices(model: Model, tokenizer: Tokenizer, test: BiasTest) -> Iterator[Scores | None]:
    """The scores of each group's sentences as the last value, after None for each slice of work."""
    texts = [member for member in test.members if member] + [p.first for p in test.pairs] + list(test.templates)
    warn_if_unknown(tokenizer, texts)
    if is_classifier(model):
        if test.has_blank:
            raise ValueError(
                'this model classifies, and fills in no blank: write whole sentences, as "{NAME} is a {JOB}."'
            )
        yield from _label_scores(model, tokenizer, test)
    elif test.label:
        raise ValueError(f"a {model.family} model of this kind has no labels: leave {test.label!r} out")
    elif test.has_blank:
        yield from _blank_scores(model, tokenizer, test)
    else:
        yield from _sentence_scores(model, tokenizer, test)


def is_classifier(model: Model) -> bool:
    """Whether the model gives a text one of several labels."""
    return "classify" in model.abilities


def label_of(model: Model, test: BiasTest) -> str:
    """The label whose probability is measured: the test's, or the model's last one."""
    labels = list(model.config.labels or [str(i) for i in range(model.config.n_labels)])
    if model.config.problem == "regression":
        raise ValueError("this model gives a number, not a label: a report of bias is for labels")
    label = test.label or labels[-1]
    if label not in labels:
        raise ValueError(f"this model has no label {label!r}: it has {', '.join(labels)}")
    return label


def scores_what_follows(model: Model, test: BiasTest) -> bool:
    """Whether words in a blank are scored together with the text after it, and compared with each other: by a causal
    model, if there is such text in any template."""
    after = "".join(BLANK.split(template)[-1] for template in test.templates)
    return isinstance(model, DecoderModel) and any(c.isalnum() for c in after)


def _split(test: BiasTest, values: Sequence[float]) -> Scores:
    """The scores of all sentences, in the order of `_sentences`, by group: (T, F, M)."""
    found = np.asarray(values, dtype=float)
    if test.pairs:
        return [found[0::2].reshape(1, -1, 1), found[1::2].reshape(1, -1, 1)]
    by_member = found.reshape(len(test.templates), -1, len(test.members))
    return np.split(by_member, np.cumsum([len(m) for m in test.groups.values()])[:-1], axis=2)


def _sentences(test: BiasTest) -> list[tuple[str, int, int]]:
    """Every sentence with the place of its member: template by template, then the values, then the members; of pairs
    the first and the second in turn."""
    if test.pairs:
        return [(text, 0, 0) for pair in test.pairs for text in (pair.first, pair.second)]
    return [
        test.sentence(template, values, member)
        for template in test.templates
        for values in test.combinations()
        for member in test.members
    ]


def _label_scores(model: Model, tokenizer: Tokenizer, test: BiasTest) -> Iterator[Scores | None]:
    label, texts, found = label_of(model, test), [text for text, _, _ in _sentences(test)], []
    for begin in range(0, len(texts), SLICE):
        for labels in classify_texts(model, tokenizer, texts[begin : begin + SLICE]):
            found += [100 * one.score for one in labels if one.name == label]
        yield None
    yield _split(test, found)


def _blank_scores(model: Model, tokenizer: Tokenizer, test: BiasTest) -> Iterator[Scores | None]:
    members = test.members if test.has_place else [""]
    words = test.words if test.has_place else test.members
    if len(set(words)) < len(words):
        raise ValueError("a word stands twice among those that are compared in the blank")
    sentences = [
        test.blank(template, values, member)
        for template in test.templates
        for values in test.combinations()
        for member in members
    ]
    rescore = scores_what_follows(model, test) or None
    found = []
    for begin in range(0, len(sentences), SLICE_OF_BLANKS):
        part = Template(test.name, (), tuple(sentences[begin : begin + SLICE_OF_BLANKS]))
        filled = fill_template(model, tokenizer, part, words=words, rescore=rescore)
        found.append(filled.logprobs.double().numpy())
        yield None
    scores = np.concatenate(found)  # (T · values · members, words)
    if test.has_place:  # members before words, and words are values
        scores = scores.reshape(-1, len(members), len(words)).transpose(0, 2, 1)
    yield _split(test, scores.reshape(-1).tolist())


# --- whole sentences -------------------------------------------------------------------------------------------------


def _sentence_scores(model: Model, tokenizer: Tokenizer, test: BiasTest) -> Iterator[Scores | None]:
    masked = isinstance(model, EncoderModel) and isinstance(model.head, MaskedHead)
    if not masked and not (isinstance(model, DecoderModel) and "generate" in model.abilities):
        raise ValueError(
            f"a {model.family} model of this kind scores no sentences: masked models (BERT) and causal ones (GPT) do; "
            "CBOW fills in blanks, _"
        )
    ids, counted = [], []
    for text, begin, end in _sentences(test):
        tokens = tokenizer.encode_with_offsets(text)
        if not tokens:
            raise ValueError("a sentence is empty")
        begin = len(text[:begin].rstrip())  # the space before a word is part of it
        ids.append([token for token, _, _ in tokens])
        counted.append([test.whole or last <= begin or first >= end for _, first, last in tokens])
    if test.pairs and masked:
        counted = _shared(ids)
    score = _pseudo_log_likelihoods if masked else log_likelihoods
    found: list[float] = []
    for begin in range(0, len(ids), SLICE):
        part = slice(begin, begin + SLICE)
        found += score(model, tokenizer, ids[part], counted[part])
        yield None
    yield _split(test, found)


def _shared(ids: Sequence[list[int]]) -> list[list[bool]]:
    """Which tokens of each sentence of a pair stand in the other too, in the same order."""
    masks = []
    for first, second in zip(ids[0::2], ids[1::2], strict=True):
        one, other = [False] * len(first), [False] * len(second)
        for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
            one[block.a : block.a + block.size] = [True] * block.size
            other[block.b : block.b + block.size] = [True] * block.size
        masks += [one, other]
    return masks


@torch.no_grad()
def log_likelihoods(
    model: Model, tokenizer: Tokenizer, ids: Sequence[list[int]], counted: Sequence[list[bool]]
) -> list[float]:
    """The sum of log p of the counted tokens of each text under a causal model, after its token for the beginning of a
    text; where it has none, the first token is not counted."""
    start = SpecialTokenTemplate(tokenizer).before
    start = start or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    rows = [[*start, *row] for row in ids]
    masks = [[False] * len(start) + list(mask) for mask in counted]
    model.check_length(max(map(len, rows)))
    found = [0.0] * len(rows)
    for batch in _batches(model, rows):
        tokens, logits = _forward(model, [rows[i] for i in batch])
        told = logits[:, :-1].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]  # (B, T - 1)
        for row, i in zip(told.cpu().double(), batch, strict=True):
            found[i] = float(sum(p for p, count in zip(row.tolist(), masks[i][1:], strict=False) if count))
    return found


@torch.no_grad()
def _pseudo_log_likelihoods(
    model: Model, tokenizer: Tokenizer, ids: Sequence[list[int]], counted: Sequence[list[bool]]
) -> list[float]:
    """The sum of log p of the counted tokens of each text, each masked in turn (Salazar et al. 2020)."""
    frame, mask = SpecialTokenTemplate(tokenizer), tokenizer.mask_id
    if mask is None:
        raise ValueError("this tokenizer has no mask token")
    rows, places = [], []  # a row for each counted token
    for i, (row, counts) in enumerate(zip(ids, counted, strict=True)):
        whole = frame.wrap(row).tolist()
        for at in (len(frame.before) + t for t, count in enumerate(counts) if count):
            rows.append([*whole[:at], mask, *whole[at + 1 :]])
            places.append((i, at, whole[at]))
    found = [0.0] * len(ids)
    if not rows:
        return found
    model.check_length(max(map(len, rows)))
    for batch in _batches(model, rows):
        _, logits = _forward(model, [rows[i] for i in batch])
        columns = torch.tensor([places[i][1] for i in batch], device=logits.device)
        told = logits[torch.arange(len(batch)), columns].log_softmax(dim=-1).cpu().double()
        for row, i in zip(told, batch, strict=True):
            found[places[i][0]] += float(row[places[i][2]])
    return found


def _batches(model: Model, rows: Sequence[list[int]]) -> Iterator[list[int]]:
    return batch_by_length([len(row) for row in rows], max(1, min(1024, MAX_LOGITS // model.config.vocab_size)))


def _forward(model: Model, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens (B, T) and their logits (B, T, V) in float32."""
    lengths = lengths_if_padded(rows)
    tokens = pad_ids(rows, 0).to(model.device)
    logits = model(Batch(tokens, None if lengths is None else lengths.to(model.device))).logits
    assert logits is not None, "checked"
    return tokens, logits.float()
