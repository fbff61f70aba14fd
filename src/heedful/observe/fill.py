"""Fill in the blank: the probability of each word in every sentence of a template, and its association with the
alternatives.

    masked models   p(word | the sentence with [MASK]); a word of several tokens has as many masks, filled from left to
                    right (the chain rule)
    CBOW            p(word | the words around the blank)
    causal models   p(word | the text before the blank); where text follows the blank, each candidate is scored together
                    with it, and probabilities are normalized over the candidates

Words are compared by log ratios: how much more likely a word is in one sentence than in another, or than in the mean
of all (Pearce 2021, "What Have Language Models Learned?").

    N sentences, W words, A alternatives, V vocabulary
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Batch, DecoderModel, Model
from heedful.models.cbow import CBOW
from heedful.models.encoder import EncoderModel
from heedful.models.heads import MaskedHead
from heedful.observe.template import Sentence, Template, parse_template
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown

RESCORED = 200  # more candidates than this are not scored with the text after the blank: each is a row of its own
MAX_WORDS = 1_000  # given by the user
BUDGET = 2**25  # logits in one batch
NO_WORD = re.compile(r"##|\[unused|<0x[0-9A-F]{2}>$")  # continuations, unused and byte tokens
METHODS = {
    "masked": "probability at the mask",
    "around": "probability between the words around the blank",
    "pieces": "probability at the mask; words of several pieces filled from left to right",
    "next": "probability after what stands before the blank",
    "both": "probability among these words, scored with what follows the blank",
    "mixed": "probability by each model's own way: with the text on both sides of the blank, or with that before it",
}


@dataclass(frozen=True)
class Filled:
    """Words and their log-probabilities in every sentence of a template."""

    template: Template
    words: list[str]
    logprobs: Tensor  # (N, W), natural logarithms
    method: str  # a key of METHODS

    @property
    def sentences(self) -> tuple[Sentence, ...]:
        """The sentences of the template, the rows of `logprobs`."""
        return self.template.sentences

    @property
    def probabilities(self) -> Tensor:
        """exp(logprobs), (N, W)."""
        return self.logprobs.exp()

    def top(self, sentence: int = 0, k: int = 10) -> list[tuple[str, float]]:
        """The likeliest words of a sentence with their probabilities."""
        best = self.logprobs[sentence].topk(min(k, len(self.words)))
        return [(self.words[i], math.exp(p)) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def log_ratio(self, a: int = 0, b: int = 1) -> Tensor:
        """log p(word | sentence a) - log p(word | sentence b), (W,): 0 is no difference, 0.69 twice as likely."""
        return self.logprobs[a] - self.logprobs[b]

    def mean(self) -> Tensor:
        """The mean log-probability over all sentences, (W,)."""
        return self.logprobs.mean(dim=0)

    def against_mean(self) -> Tensor:
        """The log-probability of each word in each sentence above its mean over all, (N, W)."""
        return self.logprobs - self.mean()

    def association(self, slot: int) -> Tensor:
        """Association scores (A, W): log p above the mean for each alternative of a bracket, averaged over the rest."""
        rows = [
            self.logprobs[[s.choices[slot] == choice for s in self.sentences]].mean(dim=0)
            for choice in self.template.slots[slot]
        ]
        return torch.stack(rows) - self.mean()

    def extremes(self, scores: Tensor, k: int = 10) -> list[tuple[str, float]]:
        """The words with the highest and the lowest of the scores (W,), highest first."""
        order = scores.argsort(descending=True, stable=True).tolist()
        chosen = order if len(order) <= 2 * k else order[:k] + order[-k:]
        return [(self.words[i], float(scores[i])) for i in chosen]


@torch.no_grad()
def fill_template(
    model: Model,
    tokenizer: Tokenizer,
    template: str | Template,
    *,
    words: Sequence[str] | None = None,
    n: int | None = 30,
    rescore: bool | None = None,
) -> Filled:
    """The log-probability of each word at the blank of every sentence.

    Without `words`, the likeliest n single-token words of each sentence (n=None: all). `rescore` scores a causal
    model's candidates with the text after the blank; None: where there is any.
    """
    found = parse_template(template) if isinstance(template, str) else template
    given = None if words is None else _checked(words)
    if n is not None and n < 1:
        raise ValueError(f"n is {n}: it must be 1 or more, or None for all words")
    warn_if_unknown(tokenizer, (f"{sentence.before} {sentence.after}" for sentence in found.sentences))
    if isinstance(model, CBOW) or (isinstance(model, EncoderModel) and isinstance(model.head, MaskedHead)):
        if rescore:
            raise ValueError("this model sees what follows the blank anyway: leave rescore out")
        return _fill_masked(model, tokenizer, found, given, n)
    if isinstance(model, DecoderModel):
        return _fill_causal(model, tokenizer, found, given, n, rescore)
    raise ValueError(
        f"a {model.family} model of this kind cannot fill in a blank: masked models (BERT), causal ones (GPT) and "
        "CBOW can"
    )


def _checked(words: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(word.strip() for word in words))
    if not found or not all(found):
        raise ValueError("the words to compare are empty: give at least one, and none that is blank")
    if len(found) > MAX_WORDS:
        raise ValueError(f"{len(found)} words: at most {MAX_WORDS} can be compared")
    return found


@lru_cache(maxsize=4)
def word_tokens(tokenizer: Tokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """Tokens that are whole words, with a space before them and without; of WordPiece both are the same."""
    spaced: dict[int, str] = {}
    bare: dict[int, str] = {}
    for index, text in sorted(_texts(tokenizer).items()):
        if any(c.isalnum() for c in text) and "\ufffd" not in text:  # not part of a character
            (spaced if text.startswith(" ") else bare)[index] = text.strip()
    return (spaced or bare), bare  # a tokenizer without spaces in its tokens has one kind only


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """The text of every token that can begin a word, with its space; decoded in one batch, as there may be 250,000."""
    special = set(tokenizer.special_tokens.values())
    raw = {
        index: piece
        for piece, index in tokenizer.backend.get_vocab().items()
        if index < tokenizer.vocab_size and index not in special and not NO_WORD.match(piece)
    }
    example = next((index for index, piece in raw.items() if piece.startswith("Ġ") and len(piece) > 1), None)
    if example is not None and tokenizer.decode([example]).startswith(" "):  # bytes in GPT-2's alphabet
        return dict(zip(raw, tokenizer.backend.decode_batch([[index] for index in raw]), strict=True))
    return {index: piece.replace("▁", " ") for index, piece in raw.items()}


def candidate_tokens(tokenizer: Tokenizer, sentence: Sentence) -> dict[int, str]:
    """The single-token words that fit a sentence's blank: id to word."""
    spaced, bare = word_tokens(tokenizer)
    if sentence.before.strip():
        return spaced if sentence.before.endswith((" ", "\n")) else bare or spaced
    first = tokenizer.encode("a")[:1]  # SentencePiece writes a space before the first word too
    return spaced if first and first[0] in spaced else bare or spaced


def _choose(scores: Tensor, tables: list[dict[int, str]], n: int | None) -> tuple[list[str], Tensor]:
    """The union of the n likeliest words of each sentence, and their scores (N, W), from log-probabilities (N, V)."""
    words: dict[str, None] = {}
    of_word = [{word: index for index, word in reversed(table.items())} for table in tables]
    for row, known in zip(scores, of_word, strict=True):
        found, ids = list(known), torch.tensor(list(known.values()), device=scores.device)
        order = row[ids].argsort(descending=True, stable=True)[:n].tolist()
        words |= dict.fromkeys(found[i] for i in order)
    kept = [word for word in words if all(word in known for known in of_word)]
    if not kept:
        raise ValueError("no token of this model is a word in every sentence: give the words to compare")
    ids = torch.tensor([[known[word] for word in kept] for known in of_word], device=scores.device)
    return kept, scores.gather(1, ids).cpu()


# --- masked models ---------------------------------------------------------------------------------------------------


def _fill_masked(
    model: Model, tokenizer: Tokenizer, template: Template, words: list[str] | None, n: int | None
) -> Filled:
    method = "around" if isinstance(model, CBOW) else "masked"
    mask = 0 if method == "around" else tokenizer.mask_id  # CBOW does not read the token that it predicts
    if mask is None:
        raise ValueError("this tokenizer has no mask token")
    blanks = _Blanks(model, tokenizer, template.sentences, mask)
    single = blanks.logprobs([[mask]] * len(template.sentences), 0)  # (N, V)
    if words is None:
        tables = [candidate_tokens(tokenizer, s) for s in template.sentences]
        return Filled(template, *_choose(single, tables, n), method)
    columns, several = [], False
    for word in words:
        pieces = [_pieces(tokenizer, s, word) for s in template.sentences]
        one = all(len(p) == 1 for p in pieces)
        several |= not one
        if several and method == "around":
            raise ValueError(f"{word!r} is several tokens of this model: CBOW fills in single words")
        ids = torch.tensor([p[:1] for p in pieces], device=single.device)
        columns.append(single.gather(1, ids)[:, 0] if one else blanks.chain(pieces))
    return Filled(template, words, torch.stack(columns, dim=1).cpu(), "pieces" if several else method)


class _Blanks:
    """The sentences with tokens and [MASK]s in their blanks."""

    def __init__(self, model: Model, tokenizer: Tokenizer, sentences: Sequence[Sentence], mask: int) -> None:
        self.model, self.mask, self.frame = model, mask, SpecialTokenTemplate(tokenizer)
        self.around = [(tokenizer.encode(s.before.rstrip()), tokenizer.encode(s.after)) for s in sentences]

    def logprobs(self, shown: Sequence[Sequence[int]], step: int) -> Tensor:
        """Log-probabilities (N, V) of the token `step` of each blank, or of its last one."""
        rows = [self.frame.wrap([*a, *p, *b]).tolist() for (a, b), p in zip(self.around, shown, strict=True)]
        begin = len(self.frame.before)
        at = [begin + len(a) + min(step, len(p) - 1) for (a, _), p in zip(self.around, shown, strict=True)]
        return _logprobs_at(self.model, rows, at)

    def chain(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """log p of several tokens by the chain rule, from left to right, (N,)."""
        total = torch.zeros(len(pieces), device=self.model.device)
        for step in range(max(map(len, pieces))):
            found = self.logprobs([[*p[:step], *[self.mask] * (len(p) - step)] for p in pieces], step)
            for i, p in enumerate(pieces):
                if step < len(p):
                    total[i] += found[i, p[step]]
        return total


def _pieces(tokenizer: Tokenizer, sentence: Sentence, word: str) -> list[int]:
    gap = " " if sentence.before.endswith((" ", "\n")) else ""
    ids = tokenizer.encode(gap + word)
    if not ids or tokenizer.unk_id in ids:
        raise ValueError(f"this model has no token for {word!r}")
    return ids


def _logprobs_at(model: Model, rows: list[list[int]], at: list[int]) -> Tensor:
    """Log-probabilities (N, V) at one position of each row."""
    model.check_length(max(map(len, rows)))
    found = []
    per = max(1, BUDGET // (model.config.vocab_size * max(map(len, rows))))
    for begin in range(0, len(rows), per):
        part, places = rows[begin : begin + per], at[begin : begin + per]
        logits = model(_batch(part, model.device)).logits
        assert logits is not None
        found.append(logits[torch.arange(len(part)), places].float().log_softmax(dim=-1))
    return torch.cat(found)


def _batch(rows: Sequence[Sequence[int]], device: torch.device) -> Batch:
    counts = [len(row) for row in rows]
    tokens = torch.tensor([[*row, *[0] * (max(counts) - len(row))] for row in rows], device=device)
    return Batch(tokens, None if min(counts) == max(counts) else torch.tensor(counts, device=device))


# --- causal models ---------------------------------------------------------------------------------------------------


def _fill_causal(
    model: DecoderModel,
    tokenizer: Tokenizer,
    template: Template,
    words: list[str] | None,
    n: int | None,
    rescore: bool | None,
) -> Filled:
    sentences = template.sentences
    begin = SpecialTokenTemplate(tokenizer).before
    if not begin and not all(s.before.strip() for s in sentences):  # a blank at the beginning needs a token before it
        begin = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    if rescore is None:
        rescore = template.has_text_after_blank
    if words is None:
        whole = (
            " " if word_tokens(tokenizer)[0] is not word_tokens(tokenizer)[1] else ""
        )  # the space belongs to the word
        rows = [[*begin, *tokenizer.encode(s.before.rstrip(whole) if whole else s.before)] for s in sentences]
        if not all(rows):
            raise ValueError("nothing stands before the blank, and this model has no token to begin a text with")
        scores = _logprobs_at(model, rows, [len(row) - 1 for row in rows])
        tables = [candidate_tokens(tokenizer, s) for s in sentences]
        found, chosen = _choose(scores, tables, n)
        if not rescore or len(found) > RESCORED:
            return Filled(template, found, chosen, "next")
        words = found
    joint = torch.stack([_continuations(model, tokenizer, begin, s, words, rescore) for s in sentences])
    if not rescore:
        return Filled(template, words, joint, "next")
    return Filled(template, words, joint.log_softmax(dim=-1), "both")


def _continuations(
    model: DecoderModel,
    tokenizer: Tokenizer,
    begin: list[int],
    sentence: Sentence,
    words: list[str],
    rescore: bool,
) -> Tensor:
    """log p(word | text before the blank), with `rescore` of the word and the text after it, (W,)."""
    base = [*begin, *tokenizer.encode(sentence.before.rstrip(" "))]
    texts = [sentence.with_word(word) if rescore else sentence.before + word for word in words]
    rows = [[*begin, *tokenizer.encode(text)] for text in texts]
    # The tokenizer may merge a word with the text before it: the common prefix of all rows is the context.
    given = min(_common(base, row) for row in rows)
    if given == 0:
        raise ValueError("nothing stands before the blank, and this model has no token to begin a text with")
    model.check_length(max(map(len, rows)))
    per = max(1, BUDGET // (model.config.vocab_size * max(map(len, rows))))
    found = []
    for first in range(0, len(rows), per):
        part = rows[first : first + per]
        batch = _batch(part, model.device)
        logits = model(batch).logits
        assert logits is not None
        steps = logits[:, given - 1 : -1].float().log_softmax(dim=-1)
        told = steps.gather(-1, batch.ids[:, given:, None])[..., 0]  # (rows, T - given)
        counts = torch.tensor([len(row) - given for row in part], device=told.device)
        real = torch.arange(told.shape[1], device=told.device) < counts[:, None]
        found.append(told.masked_fill(~real, 0).sum(dim=-1).cpu())
    return torch.cat(found)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
