"""The tokenizer inside a GGUF file (llama.cpp's format), from the file's metadata.

GGUF stores a vocabulary and only the *name* of its pre-tokenizer ("tokenizer.ggml.pre"): PRE_TOKENIZERS has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from heedful.text import backends, sentencepiece
from heedful.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreTokenizer:
    """What a name of a pre-tokenizer stands for: the pattern that cuts words, and what else llama.cpp does by it."""

    pattern: str  # of backends.PATTERNS
    ignore_merges: bool = False  # a word that is a token is not merged
    digits: bool = False  # every digit is a word
    composed: bool = False  # the model's own tokenizer composes accents (NFC)


# "tokenizer.ggml.pre"; of several names for one thing the first is written.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "default"), PreTokenizer("gpt2")),
    "smollm": PreTokenizer("gpt2", digits=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), PreTokenizer("llama3", ignore_merges=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer("llama3")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), PreTokenizer("qwen2", composed=True)),
    "stablelm2": PreTokenizer("qwen2"),
    "tekken": PreTokenizer("tekken", ignore_merges=True),
}
NO_TOKENIZER = "no_vocab"  # the type of a file without one
PADDING = "[PAD{}]"  # what llama.cpp's files call an id without a token
ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "cls": "cls_token_id",
    "sep": "seperator_token_id",  # the format's own spelling
}


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer from GGUF metadata: the keys "tokenizer.ggml.*" and "tokenizer.chat_template" as plain values."""
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}.get
    kind, tokens = get("model"), list(get("tokens") or [])
    if kind is None or not tokens:
        raise ValueError("this GGUF file has no tokenizer (no tokenizer.ggml.model or no tokens)")
    types = [int(value) for value in get("token_type") or [sentencepiece.NORMAL] * len(tokens)]
    scores = [float(value) for value in get("scores") or [0.0] * len(tokens)]
    if not len(types) == len(scores) == len(tokens):
        raise ValueError(f"GGUF: {len(tokens)} tokens but {len(scores)} scores and {len(types)} types")
    while len(tokens) > 1 and types[-1] == sentencepiece.UNUSED and tokens[-1] == PADDING.format(len(tokens) - 1):
        del tokens[-1], types[-1], scores[-1]  # rows of the embedding without a token
    roles = {
        role: tokens[int(index)]
        for role, key in ROLE_KEYS.items()
        if (index := get(key)) is not None and 0 <= int(index) < len(tokens)
    }
    pieces = [sentencepiece.Piece(*piece) for piece in zip(tokens, scores, types, strict=True)]
    if kind == "gpt2":
        backend = _byte_level(pieces, list(get("merges") or []), str(get("pre") or "gpt-2"))
    elif kind in ("llama", "t5"):
        backend = _sentencepiece(pieces, kind, get)
    elif kind == "bert":
        backend, roles = _bert(tokens, roles)
    else:
        raise ValueError(f"GGUF: a tokenizer of type {kind!r} is not supported (gpt2, llama, t5 and bert are)")
    if kind != "bert":
        before = roles.get("bos") if get("add_bos_token", kind == "llama") else None
        after = roles.get("eos") if get("add_eos_token", kind == "t5") else None
        backends.wrap_with_special_tokens(backend, before, after)
    template = fields.get("tokenizer.chat_template")
    return Tokenizer(backend, roles=roles, chat_template=template if isinstance(template, str) else None)


def word_splitter(how: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of byte-level BPE that a name stands for."""
    words = backends.byte_level_pre_tokenizer(backends.PATTERNS[how.pattern])
    if not how.digits:
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _byte_level(pieces: list[sentencepiece.Piece], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"GGUF: the pre-tokenizer {pre!r} is not known; known ones: {known}")
    how = PRE_TOKENIZERS[pre]
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    cuts = [merge.partition(" ") for merge in merges]
    pairs = [(left, right) for left, _, right in cuts]
    if not all(left and right for left, right in pairs):
        raise ValueError("GGUF: tokenizer.ggml.merges must be pairs of pieces with a space between")
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=how.ignore_merges)
    except Exception as error:
        raise ValueError(f"GGUF: tokens and merges do not fit together: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = word_splitter(how)
    if how.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    sentencepiece.add_pieces(backend, pieces)
    return backend


def _sentencepiece(pieces: list[sentencepiece.Piece], kind: str, get: Any) -> tokenizers.Tokenizer:
    model = sentencepiece.SentencePieceModel(
        pieces=pieces,
        kind=sentencepiece.BPE if kind == "llama" else sentencepiece.UNIGRAM,
        byte_fallback=any(piece.kind == sentencepiece.BYTE for piece in pieces),
        unk_id=int(get("unknown_token_id", 0 if kind == "llama" else 2)),
        charsmap=bytes(get("precompiled_charsmap") or b""),
        add_dummy_prefix=bool(get("add_space_prefix", True)),
        remove_extra_whitespaces=bool(get("remove_extra_whitespaces", kind == "t5")),
    )
    if not 0 <= model.unk_id < len(pieces):
        raise ValueError(f"GGUF: the unknown token {model.unk_id} is not one of the {len(pieces)} tokens")
    return sentencepiece.to_backend(model)


def _bert(tokens: list[str], roles: dict[str, str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """WordPiece: GGUF marks the first piece of a word by "▁" instead of the others by "##"."""
    vocab = {}
    for index, token in enumerate(tokens):
        named = token in roles.values() or (token.startswith("[") and token.endswith("]"))
        piece = token[1:] if token.startswith(sentencepiece.SPACE) else token if named else f"##{token}"
        vocab[piece] = index
    roles = {
        **backends.bert_special_tokens({}),
        **{role: name for role, name in roles.items() if role not in ("bos", "eos")},
    }
    if roles["unk"] not in vocab:
        raise ValueError(f"GGUF: the vocabulary lacks {roles['unk']}")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=roles["unk"]))
    backends.configure_bert(backend, roles, {})
    return backend, roles
