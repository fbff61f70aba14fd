"""The tokenizer of a recipe: that of a model, or one trained on its text, which is cached."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import tokenizers

from heedful.data.corpus import json_digest
from heedful.data.sources import TextSource
from heedful.loaded import Loaded
from heedful.paths import data_cache_folder
from heedful.recipes.data_paths import source_paths
from heedful.recipes.inputs import is_one_document, tokenizer_texts
from heedful.text import Tokenizer, byte_tokens, characters, symbols, train_bpe, train_unigram, train_wordpiece, words
from heedful.train.recipe import Recipe
from heedful.weights.describe import load_tokenizer

SMALL_TEXT = 4 * 10**6  # characters up to which a text gets a character tokenizer,
FEW_CHARACTERS = 512  # if it has at most so many different ones
# (characters of text, subword vocabulary size): rarer tokens would be seen too seldom to be learned.
VOCABULARIES = ((10**6, 1024), (10**7, 4096), (10**8, 8192), (10**12, 16384))


def choose_tokenizer(recipe: Recipe, begin: Loaded | None, notes: list[str]) -> Tokenizer | None:
    """The tokenizer of a recipe: that of a model, or trained on its text. None for data that is no text."""
    settings, data = recipe.tokenizer, recipe.data
    if data.kind in ("images", "pixels") or settings.kind == "none":
        return None
    if data.kind == "reversal":
        return symbols(data.n_symbols)
    if settings.path:
        return load_tokenizer(settings.path)
    if begin is not None and begin.tokenizer is not None:
        return begin.tokenizer
    if settings.kind == "bytes":
        return byte_tokens()
    kind, n = choose_vocabulary(recipe)
    tokenizer = cached_tokenizer(kind, n, recipe) if kind in SUBWORD_KINDS else make_tokenizer(kind, n, recipe)
    notes.append(f"{kind} tokenizer of {len(tokenizer):,} tokens")
    return tokenizer


def choose_vocabulary(recipe: Recipe, size_of_text: int | None = None) -> tuple[str, int | None]:
    """The kind of tokenizer and its vocabulary size; None: one token per character of the text.

    The text is read to decide, unless its size in characters is given: enough for a large text."""
    kind, n = recipe.tokenizer.kind, recipe.tokenizer.vocab_size
    n_different = FEW_CHARACTERS + 1
    if size_of_text is None:
        size_of_text, n_different = (0, 0) if kind != "auto" and n else measure_text(tokenizer_texts(recipe))
    if kind == "auto":
        few = size_of_text <= SMALL_TEXT and n_different <= FEW_CHARACTERS
        name = recipe.objective.name
        kind = "characters" if few and name == "causal" else DEFAULT_KINDS.get(name, "bpe")
    if not n and kind != "characters":
        n = next(n for limit, n in VOCABULARIES if size_of_text <= limit)
    return kind, n or None


SUBWORD_KINDS = ("bpe", "wordpiece", "unigram")
DEFAULT_KINDS = {
    "masked": "wordpiece",
    "spans": "unigram",
    "cbow": "words",
    **dict.fromkeys(("classify", "regress", "multi_label", "tag", "answer"), "wordpiece"),
}


def cached_tokenizer(kind: str, n: int | None, recipe: Recipe) -> Tokenizer:
    """A subword tokenizer, trained once per text and cached: training one is not deterministic, and another tokenizer
    would be another run."""
    with_padding, spans = recipe.data.kind != "text", recipe.objective.name == "spans"
    made_of = [
        tokenizers.__version__,
        kind,
        n,
        recipe.tokenizer.lower_case,
        with_padding,
        spans,
        text_fingerprints(recipe),
    ]
    place = data_cache_folder() / "tokenizers" / json_digest(made_of)
    with suppress(OSError, ValueError):  # not cached, or damaged
        return Tokenizer.from_folder(place)
    tokenizer = make_tokenizer(kind, n, recipe)
    with suppress(OSError):  # no writable cache
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=place.parent) as aside:
            tokenizer.save(Path(aside) / "whole")
            shutil.rmtree(place, ignore_errors=True)
            (Path(aside) / "whole").rename(place)
    return tokenizer


def text_fingerprints(recipe: Recipe) -> list[str]:
    """Fingerprints of the text that a tokenizer is trained on."""
    if recipe.data.kind == "text":
        return [TextSource(path, field=recipe.data.text).fingerprint() for path, _ in source_paths(recipe.data)]
    content = hashlib.blake2b(digest_size=16)
    for text in tokenizer_texts(recipe):
        content.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return [content.hexdigest()]


def make_tokenizer(kind: str, n: int | None, recipe: Recipe) -> Tokenizer:
    """Train a tokenizer of this kind, with at most n tokens, on the recipe's data."""
    lower = recipe.tokenizer.lower_case
    with_padding = recipe.data.kind != "text"  # examples of different lengths need a padding token
    texts = tokenizer_texts(recipe)
    if kind == "characters":
        alone = not with_padding and is_one_document(recipe)
        return characters(texts, n, special=("<unk>",) if alone else ("<pad>", "<s>", "</s>", "<unk>"))
    assert n is not None
    if kind == "words":
        return words(texts, n, lower_case=lower)
    if kind == "bpe":
        return train_bpe(texts, n, special=("<|endoftext|>", "<pad>") if with_padding else ("<|endoftext|>",))
    if kind == "wordpiece":
        return train_wordpiece(texts, n, lower_case=lower)
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(100))] if recipe.objective.name == "spans" else []
    return train_unigram(texts, n, special=sentinels)


def measure_text(texts: Iterator[str]) -> tuple[int, int]:
    """The number of characters, and of different characters (counted up to FEW_CHARACTERS)."""
    n, different = 0, set[str]()
    for text in texts:
        n += len(text)
        if len(different) <= FEW_CHARACTERS:
            different.update(text)
    return n, len(different)
