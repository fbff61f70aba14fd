"""Templates of sentences with a blank and alternatives: "In [Texas|New York], they like to buy _."

One `_` (or several together) with no letter beside it is the blank, and so are [MASK] and <mask>, as the mask tokens of
BERT and RoBERTa are called; a model has its own token there. [a|b] is a or b; an alternative may be empty. Every
combination is a sentence. A backslash escapes the character after it: \\_ \\[ \\| \\] \\\\.
A bracket at the very beginning may name models instead of words, "[bert-books|shakespeare]: My lord, _": each of them
fills all sentences.
After "What Have Language Models Learned?" (Pearce 2021).
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

MAX_CHARACTERS = 5_000  # characters
MAX_ALTERNATIVES = 20  # of one bracket
MAX_SENTENCES = 64  # of one template
MARKS = "_[]|\\"
MASK = re.compile(r"\[mask\]|<mask>", re.IGNORECASE)  # a blank by another name


@dataclass(frozen=True)
class Sentence:
    """One combination: the text before and after the blank, the alternative chosen for each bracket, and the model, if
    the template names models."""

    before: str
    after: str
    choices: tuple[str, ...] = ()
    model: str = ""

    def __str__(self) -> str:
        return f"{self.before}_{self.after}"

    @property
    def name(self) -> str:
        """The chosen alternatives, which tell it from the other sentences."""
        return " / ".join(choice or "∅" for choice in self.choices) or str(self)

    @property
    def label(self) -> str:
        """The sentence, with the name of its model in front."""
        return f"{self.model}: {self}" if self.model else str(self)

    def with_word(self, word: str) -> str:
        """The sentence with a word in its blank."""
        return f"{self.before}{word}{self.after}"


@dataclass(frozen=True)
class Template:
    """A parsed template: all its sentences."""

    text: str
    slots: tuple[tuple[str, ...], ...]  # the alternatives of each bracket
    sentences: tuple[Sentence, ...]
    models: tuple[str, ...] = ()  # those it names, which are the alternatives of the first bracket then

    @property
    def has_text_after_blank(self) -> bool:
        """Whether letters or digits follow the blank of any sentence."""
        return any(c.isalnum() for sentence in self.sentences for c in sentence.after)

    def for_model(self, model: str) -> Template:
        """The sentences of one of its models."""
        return Template(self.text, self.slots, tuple(s for s in self.sentences if s.model == model), (model,))


BLANK = object()  # in the list of a template's parts


def parse_template(text: str, is_model: Callable[[str], bool] | None = None, models: Collection[str] = ()) -> Template:
    """Parse a template; ValueError says what is wrong with it, and where. `is_model` tells which names in a first
    bracket are models; `models` are the known ones, for a hint."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the template has {len(text):,} characters: at most {MAX_CHARACTERS:,} are read")
    if not text.strip():
        raise ValueError("the template is empty: write a sentence with _ or [MASK] where a word is missing")
    named, begin = ((), 0) if is_model is None else _models(text, is_model, models)
    parts = _parts(text, begin)
    slots = [part for part in (named, *parts) if isinstance(part, tuple) and part]
    count = 1
    for slot in slots:
        count *= len(slot)
    if count > MAX_SENTENCES:
        sizes = " x ".join(str(len(slot)) for slot in slots)
        raise ValueError(f"{sizes} = {count} sentences: a template may mean {MAX_SENTENCES} at most")
    sentences = tuple(_sentence(parts, choices, bool(named)) for choices in itertools.product(*slots))
    return Template(text, tuple(slots), sentences, named)


def _models(text: str, is_model: Callable[[str], bool], models: Collection[str]) -> tuple[tuple[str, ...], int]:
    """The models named by a bracket at the beginning, () where it has words, and the index of the sentence."""
    if not text.startswith("[") or MASK.match(text):
        return (), 0
    found, end = _bracket(text, 0)
    names = tuple(name.strip() for name in found)
    known = [name for name in names if is_model(name)]
    if not known:
        return (), 0
    if len(set(names)) < len(names):
        raise ValueError("the bracket at the beginning names a model twice")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, models, n=2)
            raise ValueError(
                f"the bracket at the beginning names the model {known[0]}, and {name!r} is none"
                f"{' (near it: ' + ', '.join(near) + ')' if near else ''}: name models alone, or write a space before "
                "the bracket if these are words"
            )
    while end < len(text) and text[end].isspace():
        end += 1
    end += text[end : end + 1] == ":"
    while end < len(text) and text[end].isspace():
        end += 1
    return names, end


def _parts(text: str, place: int = 0) -> list[object]:
    """Text (str), alternatives of brackets (tuple), and BLANK, in order."""
    parts: list[object] = []
    piece = ""
    while place < len(text):
        mark = text[place]
        if mark == "\\" and text[place + 1 : place + 2] in (*MARKS,):
            piece, place = piece + text[place + 1], place + 2
        elif mask := MASK.match(text, place):
            parts += [piece, BLANK]
            piece, place = "", mask.end()
        elif mark == "[":
            alternatives, end = _bracket(text, place)
            parts += [piece, alternatives]
            piece, place = "", end
        elif mark == "]":
            raise ValueError(f"character {place + 1}: this ] closes nothing; write \\] for a plain one")
        elif mark == "_":
            end = place
            while text[end : end + 1] == "_":
                end += 1
            around = text[place - 1 : place] + text[end : end + 1]
            if any(c.isalnum() for c in around):
                piece += text[place:end]  # snake_case
            else:
                parts += [piece, BLANK]
                piece = ""
            place = end
        else:
            piece, place = piece + mark, place + 1
    return [*parts, piece]


def _bracket(text: str, begin: int) -> tuple[tuple[str, ...], int]:
    """The alternatives of the bracket that opens at `begin`, and the index after it."""
    found, piece, place = [], "", begin + 1
    while place < len(text):
        mark = text[place]
        if mark == "\\" and text[place + 1 : place + 2] in (*MARKS,):
            piece, place = piece + text[place + 1], place + 2
            continue
        if mark == "[":
            raise ValueError(f"character {place + 1}: a bracket inside a bracket; write \\[ for a plain one")
        if mark in "|]":
            found.append(piece)
            piece = ""
            if len(found) > MAX_ALTERNATIVES:
                raise ValueError(f"the bracket at character {begin + 1} has more than {MAX_ALTERNATIVES} alternatives")
            if mark == "]":
                return _checked(found, begin), place + 1
        else:
            piece += mark
        place += 1
    raise ValueError(f"the bracket that opens at character {begin + 1} is not closed: [a|b]")


def _checked(found: list[str], begin: int) -> tuple[str, ...]:
    if len(found) < 2:
        raise ValueError(
            f"the bracket at character {begin + 1} has one alternative: write [a|b], or \\[ for a plain bracket"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"the bracket at character {begin + 1} has an alternative twice")
    return tuple(found)


def _sentence(parts: list[object], choices: tuple[str, ...], by_model: bool) -> Sentence:
    left = iter(choices[by_model:])
    text, blanks = "", []
    for part in parts:
        if part is BLANK:
            blanks.append(len(text))
        else:
            text += next(left) if isinstance(part, tuple) else str(part)
    if len(blanks) != 1:
        raise ValueError(
            f"a template has one blank, not {len(blanks)}: write _ or [MASK] where the word is missing, "
            "\\_ for a plain one"
        )
    return Sentence(text[: blanks[0]], text[blanks[0] :], choices, choices[0] if by_model else "")
