"""A tokenizer that was exported with its model, in transformers: ids, token types, attention, pairs, truncation."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.models.base import Model
from heedful.models.encoder import has_segments
from heedful.text import Tokenizer, backends, train_bpe, train_unigram, train_wordpiece

CORPUS = ["the quick brown fox jumps over the lazy dog", "It was the best of times, it was the worst of times."] * 3
TEXTS = [
    "The lazy dog.",
    "  It was,  CAFÉ naïve!\n",
    "日本語 zoo 42",
    "",
    "a [MASK] and a <mask>, <extra_id_0> [SEP] <|endoftext|></s>",
]
PAIRS = [("Who was it?", "The quick brown fox, it was."), (TEXTS[1], "dog"), ("the " * 9, "a b c d e f g h i j")]


@cache
def tokenizer_of(family: str) -> Tokenizer | None:
    """A small tokenizer of the kind that a family has; None for images."""
    if family in ("vit", "image_gpt"):
        return None
    if family in ("bert", "distilbert"):
        return train_wordpiece(CORPUS, 90)
    if family == "t5":
        return train_unigram(CORPUS, 70, special=["<extra_id_0>"])
    if family == "roberta":
        spec = json.loads(train_bpe(CORPUS, 280, special=()).backend.to_str())["model"]
        merges = "\n".join(" ".join(pair) for pair in spec["merges"])
        backend, roles = backends.bpe(spec["vocab"], merges, {}, "roberta")
        return Tokenizer(backend, roles=roles)
    return train_bpe(CORPUS, 280)


def check_tokenizer(ours: Tokenizer, theirs: Any, model: Model) -> None:
    """AssertionError unless transformers' tokenizer `theirs` gives what ours does, for this model."""
    for text in TEXTS:
        got = theirs(text)
        ids = ours.encode(text, add_special=True, allow_special=True)
        assert got["input_ids"] == ids and got["attention_mask"] == [1] * len(ids), text
        assert got.get("token_type_ids", [0] * len(ids)) == [0] * len(ids), text
    _check_pairs(ours, theirs, has_segments(model))
    n = model.context_length
    if n is not None:
        assert theirs.model_max_length == n
        got = theirs("the dog " * n, truncation=True)["input_ids"]
        assert got == SpecialTokenTemplate(ours).wrap(ours.encode("the dog " * n), n).tolist()
    if ours.pad_id is not None:
        rows = theirs(["the dog", "it was the best of times"], padding=True)
        n_short = len(ours.encode("the dog", add_special=True))
        n_pads = len(rows["input_ids"][0]) - n_short
        assert rows["input_ids"][0][n_short:] == [ours.pad_id] * n_pads and n_pads > 0
        assert rows["attention_mask"][0] == [1] * n_short + [0] * n_pads


def _check_pairs(ours: Tokenizer, theirs: Any, segments: bool) -> None:
    template = SpecialTokenTemplate(ours)
    for first, second in PAIRS:
        got = theirs(first, second)
        ids, types = ours.encode_pair(first, second)
        assert got["input_ids"] == ids and got["attention_mask"] == [1] * len(ids), (first, second)
        assert ("token_type_ids" in got) == segments and got.get("token_type_ids", types) == types
        for most in range(template.n_pair, len(ids) + 1):
            got = theirs(first, second, truncation=True, max_length=most)
            ids, types = template.wrap_pair(ours.encode(first), ours.encode(second), most)
            assert got["input_ids"] == ids.tolist(), (first, second, most)
            assert got.get("token_type_ids", types.tolist()) == types.tolist()


def check_exported_tokenizer(folder: Path, ours: Tokenizer, model: Model, reference: Any) -> None:
    """`check_tokenizer` of what AutoTokenizer reads; its outputs are inputs that the reference model takes."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert set(theirs.model_input_names) <= set(inspect.signature(reference.forward).parameters)
    check_tokenizer(ours, theirs, model)
