"""SentencePiece model files (spiece.model, tokenizer.model, source.spm) as `tokenizers` objects.

A model file is one protocol buffer (sentencepiece_model.proto): pieces with a score and a type, a trainer spec, a
normalizer spec. Forty lines read what is needed, so that neither protobuf nor the C++ library becomes a dependency. The
algorithms themselves (Unigram: Kudo 2018; BPE: Sennrich et al. 2016) are those of the `tokenizers` library:

- Unigram keeps its scores, and the precompiled character map becomes the `Precompiled` normalizer;
- BPE is stored in SentencePiece as scored pieces; the equivalent merges are every split of a piece into two pieces, by
  falling score. Among equal scores (the runs of spaces of LLaMA) the longer left part comes first: SentencePiece takes
  the leftmost pair, which grows one piece to the right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"  # "▁", how SentencePiece writes a space

# Marian: marks pieces of a shared vocabulary that this language's own model does not have
FOREIGN = "\U0010fffd"

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Pieces that are typed user-defined in their file but steer a conversation: never matched in plain text.
CHAT_PIECES = frozenset({"<start_of_turn>", "<end_of_turn>"})


@dataclass
class Piece:
    """An entry of the vocabulary: its text, score and type."""

    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass
class SentencePieceModel:
    """The fields of a model file, with the defaults of sentencepiece_model.proto."""

    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    def piece(self, index: int) -> str | None:
        """The text of an id, None if there is no such id."""
        return self.pieces[index].text if 0 <= index < len(self.pieces) else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one message; lengths are checked against what is there."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field type {wire}")
        if size > len(data) - at:
            raise ValueError("a field longer than the file")
        yield key >> 3, data[at : at + size]
        at += size


def _int32(value: int | bytes) -> int:
    assert isinstance(value, int)
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _read_piece(data: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece.text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            piece.score = struct.unpack("<f", value)[0]
        elif number == 3:
            piece.kind = _int32(value)
    return piece


def parse_model(data: bytes) -> SentencePieceModel:
    """Parse a SentencePiece model file."""
    model = SentencePieceModel()
    trainer = {3: "kind", 40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
    try:
        for number, value in _fields(data):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                model.pieces.append(_read_piece(value))
            elif number == 2:
                for key, entry in _fields(value):
                    if key in trainer:
                        setattr(model, trainer[key], _int32(entry))
                    elif key == 35:
                        model.byte_fallback = bool(entry)
            elif number == 3:
                for key, entry in _fields(value):
                    if key == 2 and isinstance(entry, bytes):
                        model.charsmap = entry
                    elif key == 3:
                        model.add_dummy_prefix = bool(entry)
                    elif key == 4:
                        model.remove_extra_whitespaces = bool(entry)
    except (ValueError, IndexError, AssertionError, struct.error) as error:
        raise ValueError(f"not a SentencePiece model file, or a damaged one ({error})") from None
    if not model.pieces:
        raise ValueError("not a SentencePiece model file: it has no pieces")
    if model.kind not in (UNIGRAM, BPE):
        raise ValueError("SentencePiece word and char models are not supported, only unigram and bpe")
    return model


def merges_by_score(pieces: list[Piece]) -> list[tuple[str, str]]:
    """The merges that make BPE by rank do what BPE by piece score does."""
    scores = {p.text: p.score for p in pieces if p.kind in (NORMAL, USER_DEFINED, UNUSED)}
    found = []
    for text, score in scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]


def _space_normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    """The character map, then the whitespace rules of the normalizer spec (on U+0020 only)."""
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def to_backend(model: SentencePieceModel, *, prefix_first_only: bool = False) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` that gives the ids SentencePiece gives.

    `prefix_first_only`: put the dummy prefix only at the start of the text, not after a special token as well
    ("legacy": false in LLaMA's tokenizer_config.json); one leading space is then taken for the prefix.
    """
    unk = model.piece(model.unk_id)
    if model.kind == BPE:
        vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=merges_by_score(model.pieces),
                unk_token=unk,
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        unigram = models.Unigram(scored, model.unk_id, model.byte_fallback)
        backend = tokenizers.Tokenizer(unigram)
    steps = _space_normalizers(model)
    if prefix_first_only and model.add_dummy_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    else:
        if model.add_dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = _decoder(model)
    add_pieces(backend, model.pieces)
    return backend


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def add_pieces(backend: tokenizers.Tokenizer, pieces: list[Piece]) -> None:
    """Control pieces become special tokens, user-defined pieces indivisible ones."""
    special, indivisible = [], []
    for piece in pieces:
        if piece.kind in (CONTROL, UNKNOWN) or piece.text in CHAT_PIECES:
            special.append(AddedToken(piece.text, normalized=False, special=True))
        elif piece.kind == USER_DEFINED:
            indivisible.append(AddedToken(piece.text, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(indivisible)
