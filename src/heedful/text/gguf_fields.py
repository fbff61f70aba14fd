"""A tokenizer as GGUF metadata: the inverse of `tokenizer_from_gguf`.

llama.cpp has tokenizers by type and name, not by their parts:

    gpt2    byte-level BPE whose words are cut as one of PRE_TOKENIZERS does
    llama   SentencePiece's BPE, by the scores of pieces: ours has merges, from which scores are made
    t5      SentencePiece's Unigram, and single characters, which are pieces of one character

Any other is refused. What was made is read again and compared on some texts before it is written. llama.cpp composes no
accents (NFC), and tells a run of unknown characters by one <unk>.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from heedful.text.byte_level import pipeline_steps
from heedful.text.chat_answers import end_of_turn_id
from heedful.text.gguf import (
    NO_TOKENIZER,
    PADDING,
    PRE_TOKENIZERS,
    ROLE_KEYS,
    PreTokenizer,
    tokenizer_from_gguf,
    word_splitter,
)
from heedful.text.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    merges_by_score,
)
from heedful.text.tokenizer import Tokenizer

PROBES = (
    "Hello, world! It's 12345 o'clock; don't\n\nforget:\tthe  end.",
    "  two spaces, then\r\nthree   and trailing ",
    "The café's naïve Ångström: 日本語 한국어 👍🏽 ½ ² №7",
    "def f(x):\n    return x**2  # HTTPServer's URL_100",
)
UNWRITABLE = "llama.cpp does not have such a tokenizer, so this model cannot be written as GGUF: "


def gguf_fields(tokenizer: Tokenizer | None, special: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The keys "tokenizer.*" of a model with these special token ids (as in config.json) and so many rows of
    embeddings; ValueError for a tokenizer that llama.cpp does not have."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": NO_TOKENIZER, **_named(_special_ids(special))}
    if len(tokenizer) > vocab_size or tokenizer.target is not tokenizer:
        raise ValueError(f"{UNWRITABLE}it has {len(tokenizer)} tokens, and the model embeds {vocab_size}")
    spec: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    pieces = _pieces(tokenizer, spec, vocab_size)
    fields = _model(spec, pieces, tokenizer.byte_scheme)
    fields |= {"tokens": [p.text for p in pieces], "token_type": [p.kind for p in pieces]}
    if fields["model"] != "gpt2":
        fields["scores"] = [p.score for p in pieces]
    fields |= _ends(tokenizer) | _all_ids(tokenizer, special)
    named = _named(fields)
    if tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    _compare(tokenizer, named)
    return named


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def _pieces(tokenizer: Tokenizer, spec: Mapping[str, Any], vocab_size: int) -> list[Piece]:
    """Every id's text and type; ids without a token have names of their own, as in llama.cpp's files."""
    added = tokenizer.backend.get_added_tokens_decoder()
    unknown = None if tokenizer.byte_scheme == "level" else _unknown_id(tokenizer, spec)
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)} if spec["model"].get("byte_fallback") else set()
    pieces = []
    for index in range(vocab_size):
        text = tokenizer.backend.id_to_token(index)
        kind = BYTE if text in bytes_ else NORMAL
        if text is None:
            text, kind = PADDING.format(index), UNUSED
        elif index == unknown:
            kind = UNKNOWN
        elif index in added:
            kind = CONTROL if added[index].special else USER_DEFINED
        pieces.append(Piece(text, 0.0, kind))
    return pieces


def _unknown_id(tokenizer: Tokenizer, spec: Mapping[str, Any]) -> int | None:
    """The id of <unk>: by its role, or as the model has it."""
    if tokenizer.unk_id is not None:
        return tokenizer.unk_id
    model = spec["model"]
    found: int | None = model.get("unk_id")
    return tokenizer.id(model["unk_token"]) if model.get("unk_token") else found


def _model(spec: Mapping[str, Any], pieces: list[Piece], scheme: str | None) -> dict[str, Any]:
    """The type of the tokenizer and what belongs to it; sets the pieces' scores."""
    kind, steps = spec["model"]["type"], pipeline_steps(spec.get("pre_tokenizer"))
    if kind == "BPE" and scheme == "level":
        return _byte_level(spec, steps)
    if kind == "BPE" and not spec["model"]["merges"] and not steps and spec.get("normalizer") is None:
        return _characters(pieces)
    if kind in ("BPE", "Unigram"):
        return _sentencepiece(spec, steps, pieces)
    raise ValueError(f"{UNWRITABLE}a {kind}")


def _byte_level(spec: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    model, normalizer = spec["model"], spec.get("normalizer")
    composed = normalizer is not None and normalizer["type"] == "NFC"
    if not model["merges"] or (normalizer is not None and not composed):
        raise ValueError(f"{UNWRITABLE}byte-level BPE without merges, or with the normalizer {normalizer}")
    name = _pre_tokenizer(steps, bool(model.get("ignore_merges")), composed)
    return {"model": "gpt2", "pre": name, "merges": [f"{left} {right}" for left, right in model["merges"]]}


def _pre_tokenizer(steps: list[dict[str, Any]], ignore_merges: bool, composed: bool) -> str:
    """The name of the pre-tokenizer that has these steps."""
    candidates = [
        name
        for name, how in PRE_TOKENIZERS.items()
        if how.ignore_merges == ignore_merges and _essence(_steps(how)) == _essence(steps)
    ]
    exact = [name for name in candidates if PRE_TOKENIZERS[name].composed == composed]
    if not candidates:
        raise ValueError(f"{UNWRITABLE}its pre-tokenizer {json.dumps(steps)[:300]} has no name there")
    return (exact or candidates)[0]


def _steps(how: PreTokenizer) -> list[dict[str, Any]]:
    return pipeline_steps(json.loads(word_splitter(how).__getstate__()))


def _essence(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of the steps decides where words are cut."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _characters(pieces: list[Piece]) -> dict[str, Any]:
    """Single characters as a Unigram model of pieces that are all as likely."""
    for piece in pieces:
        if piece.kind == NORMAL:
            piece.text, piece.score = piece.text.replace(" ", SPACE), -1.0
    if not any(piece.kind == UNKNOWN for piece in pieces) or len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError(f"{UNWRITABLE}characters without <unk>, or with {SPACE} beside the space")
    return {"model": "t5", "pre": "default", "add_space_prefix": False, "remove_extra_whitespaces": False}


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def _sentencepiece(spec: Mapping[str, Any], steps: list[dict[str, Any]], pieces: list[Piece]) -> dict[str, Any]:
    fields: dict[str, Any] = {"pre": "default", **_spaces(spec, steps)}
    if not any(piece.kind == UNKNOWN for piece in pieces):
        raise ValueError(f"{UNWRITABLE}SentencePiece without <unk>")
    if spec["model"]["type"] == "Unigram":
        for piece, (_, score) in zip(pieces, spec["model"]["vocab"], strict=False):
            piece.score = score
        return {"model": "t5", **fields}
    if len([piece for piece in pieces if piece.kind == BYTE]) < 256:
        raise ValueError(f"{UNWRITABLE}SentencePiece's BPE without a token for every byte")
    _set_scores([(left, right) for left, right in spec["model"]["merges"]], pieces)
    for piece in pieces:
        if piece.kind == USER_DEFINED:
            piece.text = piece.text.replace(SPACE, " ")  # they are found in the text as it was written
    return {"model": "llama", **fields}


def _spaces(spec: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """How spaces are treated, from the normalizer and pre-tokenizer; ValueError if SentencePiece has no such steps."""
    prefix = trimmed = False
    found: dict[str, Any] = {}
    normalizer = spec.get("normalizer") or {"type": "Sequence", "normalizers": []}
    for step in normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]:
        kind, pattern = step["type"], step.get("pattern", {})
        if kind == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif kind == "Precompiled":
            found["precompiled_charsmap"] = list(base64.b64decode(step["precompiled_charsmap"]))
        elif kind == "Replace" and pattern.get("Regex") in (r"\A +| +\z", " {2,}"):
            trimmed = True
        elif not (kind == "Replace" and pattern == {"String": " "} and step["content"] == SPACE):
            raise ValueError(f"{UNWRITABLE}its normalizer has {json.dumps(step)[:200]}")
    for step in steps:
        if step["type"] == "Metaspace" and step["replacement"] == SPACE and not step.get("split"):
            prefix = step["prepend_scheme"] != "never"
        elif not (step["type"] == "Split" and step["pattern"] == {"String": " "}):  # of which none are left
            raise ValueError(f"{UNWRITABLE}its pre-tokenizer has {json.dumps(step)[:200]}")
    return {"add_space_prefix": prefix, "remove_extra_whitespaces": trimmed, **found}


def _set_scores(merges: list[tuple[str, str]], pieces: list[Piece]) -> None:
    """Scores by which pieces are merged in the order of `merges`; pieces whose merges overlap have the same."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        first.setdefault(left + right, rank)
        last[left + right] = rank
    score: dict[str, float] = {}
    reached = group = -1
    for text, rank in first.items():  # in the order of their first merge
        group += rank > reached
        reached = max(reached, last[text])
        score[text] = -float(group)
    for piece in pieces:
        piece.score = score.get(piece.text, -float(group + 1)) if piece.kind == NORMAL else 0.0
    if set(merges_by_score(pieces)) != set(merges):
        raise ValueError(f"{UNWRITABLE}BPE with merges that SentencePiece would not make of its pieces")


# --- special tokens --------------------------------------------------------------------------------------------------


def _ends(tokenizer: Tokenizer) -> dict[str, bool]:
    """Which tokens are put around a text."""
    plain, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special=True)
    for before, after in ((0, 0), (1, 0), (0, 1), (1, 1)):
        around = ([tokenizer.bos_id] if before else []), ([tokenizer.eos_id] if after else [])
        if whole == [*around[0], *plain, *around[1]]:
            return {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    raise ValueError(f"{UNWRITABLE}it puts {whole} around a text of {plain}")


def _special_ids(special: Mapping[str, Any]) -> dict[str, int]:
    """The ids of config.json by GGUF's keys; of several tokens that end a text the second ends a turn, the third a
    message."""
    found: dict[str, int] = {}
    for role, key in ROLE_KEYS.items():
        value = special.get(f"{role}_token_id")
        ids = [index for index in (value if isinstance(value, list) else [value]) if index is not None and index >= 0]
        found |= {key: ids[0]} if ids else {}
        if role == "eos":
            found |= dict(zip(("eot_token_id", "eom_token_id"), ids[1:3], strict=False))
    return found


def _all_ids(tokenizer: Tokenizer, special: Mapping[str, Any]) -> dict[str, int]:
    """The special ids of the model and of its tokenizer. llama.cpp takes some id for one that is missing: where a model
    has none that ends a text, a special token stands for it which no text has."""
    roles = {key: index for role, key in ROLE_KEYS.items() if (index := getattr(tokenizer, f"{role}_id")) is not None}
    found = roles | _special_ids(special)
    turn = end_of_turn_id(tokenizer)
    if turn is not None and turn != found.get("eos_token_id"):
        found.setdefault("eot_token_id", turn)
    if not tokenizer.special_tokens and "eos_token_id" not in found:
        raise ValueError(f"{UNWRITABLE}it has no special token, and llama.cpp needs one that ends a text")
    found.setdefault("eos_token_id", next(iter(tokenizer.special_tokens.values()), 0))
    found.setdefault("bos_token_id", found["eos_token_id"])
    return found


def _compare(tokenizer: Tokenizer, named: Mapping[str, Any]) -> None:
    """ValueError unless what was made gives the same ids; texts with unknown characters are left out."""
    again = tokenizer_from_gguf(named)
    for text in PROBES:
        ids = tokenizer.encode(text, add_special=True)
        if tokenizer.unk_id not in ids and again.encode(text, add_special=True) != ids:
            raise ValueError(f"{UNWRITABLE}it would encode {text!r} in another way")
