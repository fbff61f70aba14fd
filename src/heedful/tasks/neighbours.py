"""Nearest words and analogies among a model's embeddings (Mikolov et al. 2013, section 4).

    king                  the words nearest to a word, by the cosine
    king - man + woman    sums and differences of words, each scaled to length 1 first, as in the authors' evaluation
    man:king::woman:?     the same as an analogy: man is to king as woman is to which word?

The embeddings are those of the input, one for each token wherever it stands (static); or with `layer`, that layer's
output for the word read alone. What is found are the tokens that begin a word, without those
asked for: nearly all are whole words, but a vocabulary does not say which are beginnings of longer ones. A word that
takes several tokens is the mean of their vectors, with a warning: it means less than a vector of its own, and most
vocabularies are too small to refuse all such words.

    N words, B batch, T positions, E model width
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from heedful.data.ragged import lengths_if_padded, pad_ids
from heedful.models.base import DecoderModel, Model
from heedful.nn.embed import nearest
from heedful.observe.capture import capture
from heedful.observe.names import activation_names, stack_names
from heedful.tasks.embed import MAX_BATCH, batch_by_length, last_hidden_states
from heedful.text.plural import counted
from heedful.text.prompt import special_affixes
from heedful.text.tokenizer import Tokenizer
from heedful.text.warn import warn
from heedful.text.word_tokens import whole_words, word_ids

MAX_WORDS = 5000  # that a layer's output is computed of: the first, which are frequent ones in most vocabularies
MAX_TERMS = 20  # words of an expression
MAX_CHARACTERS = 100  # of a word
ANALOGY = re.compile(r"\s*(.+?)\s*:\s*(.+?)\s*::\s*(.+?)\s*(?::\s*\?\s*)?")


class SplitWordWarning(UserWarning):
    """A word takes several tokens, and the mean of their vectors stands for it."""


@dataclass(frozen=True)
class Neighbour:
    """A word and the cosine of the angle between its vector and the one asked for."""

    word: str
    similarity: float


@dataclass(frozen=True)
class WordVectors:
    """The vectors (N, E) of the words of a model's vocabulary."""

    model: Model
    tokenizer: Tokenizer
    layer: int | None
    matrix: Tensor

    def nearest(self, expression: str, n: int = 10) -> list[Neighbour]:
        """The n words nearest to a word or to what an expression of words comes to, nearest first."""
        terms, words = parse_expression(expression), [*_words(self.tokenizer, self.layer).values()]
        asked = {word.casefold() for _, word in terms}
        but = [i for i, word in enumerate(words) if word.casefold() in asked]
        vector = sum((sign * self.vector(word) for sign, word in terms), torch.zeros(self.matrix.shape[1]))
        most = len(words) - len(but)
        if n < 1 or not most:
            raise ValueError(f"n is {n}: it must be 1 or more" if n < 1 else "no other word is left to be near")
        indices, cosines = nearest(self.matrix, vector.to(self.matrix), min(n, most), but=but)
        return [Neighbour(words[i], x) for i, x in zip(indices.tolist(), cosines.tolist(), strict=True)]

    def vector(self, word: str) -> Tensor:
        """The vector of any word (E,), of length 1, on the CPU."""
        ids = word_ids(self.tokenizer, word)
        if len(ids) > 1:
            told = f"{word!r} takes {len(ids)} tokens of this model: the mean of their vectors stands for it"
            warn(told, SplitWordWarning)
        ((_, vectors),) = _vectors(self.model, self.tokenizer, [ids], self.layer)
        return nn.functional.normalize(vectors[0].cpu(), dim=0)


def parse_expression(text: str) -> list[tuple[float, str]]:
    """The words of "king - man + woman" or "man:king::woman:?" and the sign of each."""
    if match := ANALOGY.fullmatch(text):
        a, b, c = match.groups()
        terms = [(1.0, b), (-1.0, a), (1.0, c)]
    else:
        first, *rest = re.split(r"(?:^|\s+)([+-])(?:\s+|$)", text.strip())
        parts = ["+", first, *rest] if first or not rest else rest
        terms = [(1.0 if sign == "+" else -1.0, word) for sign, word in zip(parts[::2], parts[1::2], strict=True)]
    wrong = any(not word or word.startswith(("+ ", "- ")) for _, word in terms)
    if wrong or not any(sign > 0 for sign, _ in terms):
        raise ValueError(
            f"{text[:100]!r} is no word and no expression of words: write king, king - man + woman, or "
            "man:king::woman:?"
        )
    if len(terms) > MAX_TERMS:
        raise ValueError(f"an expression of {counted(len(terms), 'word')}: at most {MAX_TERMS} are added up")
    if any(len(word) > MAX_CHARACTERS for _, word in terms):
        raise ValueError(
            f"a word of more than {MAX_CHARACTERS} characters: give a word, not a text (`embed` reads texts)"
        )
    return terms


def word_vectors(model: Model, tokenizer: Tokenizer, layer: int | None = None) -> WordVectors:
    """The vectors of the vocabulary's words: of the input embedding, or the output of a layer."""
    *_, matrix = word_matrix_in_slices(model, tokenizer, layer)
    assert matrix is not None
    return WordVectors(model, tokenizer, layer, matrix)


def word_matrix_in_slices(model: Model, tokenizer: Tokenizer, layer: int | None) -> Iterator[Tensor | None]:
    """The matrix of `word_vectors`, after a None for each batch of words that the model has read."""
    known = _words(tokenizer, layer)
    if len(known) < 2:
        raise ValueError("this model's vocabulary has no words to be near to each other")
    parts: list[tuple[list[int], Tensor]] = []
    for part in _vectors(model, tokenizer, [[id] for id in known], layer):
        parts.append(part)
        yield None
    matrix = torch.empty(len(known), parts[0][1].shape[1], device=model.device)
    for rows, vectors in parts:
        matrix[rows] = vectors
    yield matrix


def _words(tokenizer: Tokenizer, layer: int | None) -> dict[int, str]:
    """The words that can be found, by id."""
    return dict(islice(whole_words(tokenizer).items(), None if layer is None else MAX_WORDS))


def _vectors(
    model: Model, tokenizer: Tokenizer, words: Sequence[Sequence[int]], layer: int | None
) -> Iterator[tuple[list[int], Tensor]]:
    """The vectors (B, E) of words given as token ids, a batch at a time with the indices of its words."""
    if layer is not None:
        yield from _layer_vectors(model, tokenizer, words, layer)
        return
    table = next((part for name in ("source_embed", "embed") if (part := getattr(model, name, None))), None)
    if table is None:
        raise ValueError(f"a {model.family} model embeds no words")
    with torch.no_grad():
        ids = torch.tensor([id for word in words for id in word], device=model.device)
        vectors = table(ids).float()
        if len(ids) > len(words):
            vectors = torch.stack([part.mean(dim=0) for part in vectors.split([len(word) for word in words])])
        yield list(range(len(words))), vectors


def _layer_vectors(
    model: Model, tokenizer: Tokenizer, words: Sequence[Sequence[int]], layer: int
) -> Iterator[tuple[list[int], Tensor]]:
    if "embed" not in model.abilities:
        raise ValueError(
            f"a {model.family} model has neighbours among its static embeddings alone: leave the layer out"
        )
    name = f"{stack_names(model)[0]}.{layer}.after"
    n_layers = int(getattr(model.config, "n_layers", 0))
    if name not in activation_names(model):
        raise ValueError(f"there is no layer {layer}: this {model.family} model has {n_layers}, counted from 0")
    before, after = special_affixes(tokenizer)
    if not before and isinstance(model, DecoderModel):
        # A decoder's first position attends to itself alone, and is much the same for all tokens (an attention sink).
        before = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    rows = [[*before, *word, *after] for word in words]
    for batch in batch_by_length([len(row) for row in rows], MAX_BATCH):
        chosen = [rows[i] for i in batch]
        lengths = lengths_if_padded(chosen)
        lengths = None if lengths is None else lengths.to(model.device)
        with torch.no_grad(), capture(model, name) as seen:
            last_hidden_states(model, pad_ids(chosen, 0).to(model.device), lengths)
        hidden = seen[name][:, len(before) :].float()  # (B, T, E)
        yield batch, torch.stack([x[: len(words[i])].mean(dim=0) for i, x in zip(batch, hidden, strict=True)])
