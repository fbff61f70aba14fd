"""Checks of the lesson "Tokens"."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from heedful.lessons.checking import require


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    place = 0
    while place < len(symbols):
        found = tuple(symbols[place : place + 2]) == pair
        merged.append("".join(pair) if found else symbols[place])
        place += 2 if found else 1
    return merged


def check_merge_pair(answer: Callable[[list[str], tuple[str, str]], Any]) -> None:
    """Every occurrence of a pair joined, from the left, without overlap, the input left as it was."""
    draw = random.Random(7)
    cases = [(list("aaabdaaabac"), ("a", "a")), (["ab", "a", "b"], ("a", "b")), (list("xyz"), ("a", "b"))]
    cases += [([draw.choice("abc") for _ in range(draw.randint(0, 12))], ("a", "a")) for _ in range(20)]
    cases += [([draw.choice(["a", "b", "ab"]) for _ in range(12)], ("a", "b")) for _ in range(20)]
    for symbols, pair in cases:
        given = list(symbols)
        found = answer(given, pair)
        what = f"{symbols} with the pair {pair}"
        require(given == symbols, f"it changed the list that it was given, {what}: build a new one")
        require(isinstance(found, list), f"of {what} it returned {found!r}, which is not a list")
        require(
            "".join(found) == "".join(symbols),
            f"{what} gives {found}: its letters are not those of the text any more (is the last symbol lost?)",
        )
        expected = _merged(symbols, pair)
        if found != expected:
            once = [*symbols]
            at = next((i for i in range(len(symbols) - 1) if tuple(symbols[i : i + 2]) == pair), None)
            if at is not None:
                once[at : at + 2] = ["".join(pair)]
            require(found != once, f"{what} gives {found}: only the first occurrence was replaced, not all of them")
            require(
                not set(found) - set(symbols) - {"".join(pair)},
                f"{what} gives {found}: occurrences that overlap share a symbol, and only the left one is replaced",
            )
            require(False, f"{what} gives {found}, should be {expected}")


def _split(word: str, vocabulary: set[str]) -> list[str]:
    pieces: list[str] = []
    start = 0
    while start < len(word):
        marks = "##" if start else ""
        ends = [end for end in range(len(word), start, -1) if marks + word[start:end] in vocabulary]
        if not ends:
            return ["[UNK]"]
        pieces.append(marks + word[start : ends[0]])
        start = ends[0]
    return pieces


def check_wordpiece_split(answer: Callable[[str, set[str]], Any]) -> None:
    """The longest match from the left, ## inside a word, [UNK] for a word that cannot be cut."""
    vocabulary = {"un", "una", "##aff", "##ff", "##able", "##a", "##b", "##le", "able", "a", "[UNK]"}
    cases = [("unaffable", vocabulary), ("able", vocabulary), ("a", vocabulary), ("unxable", vocabulary)]
    draw = random.Random(11)
    letters = {mark + letter for letter in "ab" for mark in ("", "##")}
    for _ in range(40):
        words = ["".join(draw.choice("ab") for _ in range(draw.randint(2, 4))) for _ in range(6)]
        some = {draw.choice(("", "##")) + word for word in words} | set(draw.sample(sorted(letters), 3))
        cases.append(("".join(draw.choice("ab") for _ in range(draw.randint(1, 8))), some))
    for word, known in cases:
        found, expected = answer(word, set(known)), _split(word, known)
        what = f"{word!r} with the vocabulary {sorted(known)}"
        require(isinstance(found, list), f"of {what} it returned {found!r}, which is not a list")
        if found == expected:
            continue
        require(
            expected != ["[UNK]"],
            f"{what} gives {found}: where no piece fits, the whole word is ['[UNK]']",
        )
        inside = [piece for piece in found[1:] if not str(piece).startswith("##")]
        require(not inside, f"{what} gives {found}: a piece inside a word is looked up and returned with ## before it")
        for piece in found:
            require(piece in known, f"{what} gives {found}: {piece!r} is not in the vocabulary")
        require(bool(found), f"{what} gives no pieces")
        require(
            len(found[0]) >= len(expected[0]),
            f"{what} gives {found}: {expected[0]!r} fits at the beginning and is longer than {found[0]!r}",
        )
        require(False, f"{what} gives {found}, should be {expected}: the longest piece that fits, each time")
