"""Tokenizer backends in which user text cannot produce special tokens.

Text from a user that happens to read "</s>" is text. The `tokenizers` library can be told not to *split* text at
special tokens (`encode_special_tokens`), but that alone is not enough: where a special token is also an entry of the
model's own vocabulary, the model may still assemble it from ordinary characters (a Unigram model does so always: its
lattice contains "</s>" like any other piece; a BPE model does when some merge produces it). So
`without_special_tokens` returns a tokenizer whose model has those entries under an unguessable name: every id stays
where it was, and no text reaches them. SentencePiece behaves the same way: control pieces are never matched in text.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import tokenizers


class library_errors:
    """Convert what the library raises to a ValueError: an Exception, or a panic of its Rust code (a BaseException).

    A class, which costs less than a generator: every generated token is decoded inside it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) or (kind is not None and kind.__name__ == "PanicException"):
            raise ValueError(f"{self.problem}: {error}") from None


def parse_backend(text: str) -> tokenizers.Tokenizer:
    """`tokenizers.Tokenizer.from_str`, with a ValueError for what it cannot read."""
    with library_errors("not a tokenizer.json that can be read"):
        return tokenizers.Tokenizer.from_str(text)


def special_names(spec: dict[str, Any]) -> set[str]:
    """The special tokens of a parsed tokenizer.json."""
    return {token["content"] for token in spec.get("added_tokens") or [] if token.get("special")}


def _vocabulary(model: dict[str, Any]) -> set[str]:
    vocab = model["vocab"]
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}


def reachable_from_text(spec: dict[str, Any]) -> set[str]:
    """The special tokens that the model itself could produce from ordinary text."""
    model = spec["model"]
    reserved = special_names(spec) & _vocabulary(model)
    if "merges" not in model or model.get("ignore_merges"):
        return reserved  # Unigram, WordPiece, WordLevel: a vocabulary entry is matched as it stands
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    made = {"".join(pair) for pair in pairs}
    return {name for name in reserved if name in made or len(name) == 1}


def without_special_tokens(backend: tokenizers.Tokenizer, spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """`backend` itself where it is safe, or an equivalent whose special tokens no text can reach.

    `spec` is the backend's tokenizer.json, parsed.
    """
    hidden = reachable_from_text(spec)
    if not hidden:
        return backend
    secret = secrets.token_hex(16)
    rename = {name: f"{secret}{name}" for name in hidden}
    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {rename.get(piece, piece): index for piece, index in vocab.items()}
    else:
        model["vocab"] = [(rename.get(piece, piece), score) for piece, score in vocab]
    if "merges" in model:
        pairs = [p.split(" ") if isinstance(p, str) else p for p in model["merges"]]
        model["merges"] = [p for p in pairs if not hidden & {p[0], p[1], p[0] + p[1]}]
    if model.get("unk_token") in rename:
        model["unk_token"] = rename[model["unk_token"]]
    added = [token for token in spec["added_tokens"] if token["content"] not in hidden]
    plain = parse_backend(json.dumps({**spec, "model": model, "added_tokens": added}))
    plain.encode_special_tokens = True
    return plain
