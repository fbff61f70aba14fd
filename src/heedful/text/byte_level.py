"""The byte-level alphabet of GPT-2's tokenizer, and byte-fallback tokens of SentencePiece ("<0x0A>").

Byte-level BPE (Radford et al. 2019, section 2.2) works on bytes but is stored as text, so every byte needs a
printable character: the printable ones of Latin-1 stand for themselves, the other 68 are moved to U+0100 and up ("Ġ"
is the space).
"""

from __future__ import annotations

import re
from typing import Any

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_MOVED = [byte for byte in range(256) if byte not in set(_PRINTABLE)]

CHAR_OF_BYTE: list[str] = [""] * 256
for _byte in _PRINTABLE:
    CHAR_OF_BYTE[_byte] = chr(_byte)
for _index, _byte in enumerate(_MOVED):
    CHAR_OF_BYTE[_byte] = chr(0x100 + _index)

# The bytes that occur in UTF-8 at all: no C0, C1, F5 ... FF.
UTF8_BYTES: list[int] = [*range(0xC0), *range(0xC2, 0xF5)]

BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece; a piece outside the alphabet is its own UTF-8."""
    if all(char in BYTE_OF_CHAR for char in piece):
        return bytes(BYTE_OF_CHAR[char] for char in piece)
    return piece.encode()


def byte_fallback_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: "<0x0A>" is one byte, "▁" is a space."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


def pipeline_steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer or decoder, whether it is a sequence or a single one."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("pretokenizers") or part.get("decoders") or []
        return [step for entry in inner for step in pipeline_steps(entry)]
    return [part]


def keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer loses no character."""
    if step["type"] == "ByteLevel":
        return not step.get("add_prefix_space")
    if step["type"] in ("Split", "Punctuation"):
        return str(step.get("behavior")).lower() != "removed"
    return bool(step["type"] == "Digits")


def byte_scheme(spec: dict[str, Any]) -> str | None:
    """How single bytes are written: "level" (GPT-2's alphabet), "fallback" ("<0x0A>"), or not at all."""
    kinds = {step["type"] for step in pipeline_steps(spec.get("decoder"))}
    if "ByteLevel" in kinds:
        return "level"
    return "fallback" if "ByteFallback" in kinds else None
