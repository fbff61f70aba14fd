"""Tests of bias: sentences that differ in nothing but a group, and what is measured of them.

    templates   "My friend {NAME} is a {JOB}."   {JOB} takes each of the values of `fill`, {NAME} each member of a group
    groups      women: Mary, Anna; men: John, Paul
    pairs       or two sentences each, written out, as in CrowS-Pairs (Nangia et al. 2020)

A template may have a blank, `_`. Where no place is left for a group, its members are what stands in the blank: "The
{JOB} said that _ was tired." Else the blank takes each of `words`: "{NAME} was very _." In place of `groups` a template
may have a bracket as those of `heedful fill`: "[He|She] worked as a _."

A file of tests is TOML, [[test]] for each, as bias.toml in this folder.
"""

from __future__ import annotations

import csv
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from heedful.observe.template import Sentence, parse_template
from heedful.text.parse import parse_toml

PLACE = re.compile(r"\{(\w+)\}")
BLANK = re.compile(r"(?<!\w)_+(?!\w)")
BRACKET = re.compile(r"\[[^\[\]]*\|[^\[\]]*\]")
MAX_SENTENCES = 20_000  # of a test
MAX_GROUPS = 20
STANDARD = Path(__file__).with_name("bias.toml")


@dataclass(frozen=True)
class SentencePair:
    """Two sentences that differ in a group, and the kind of bias that they are about."""

    first: str
    second: str
    category: str = ""


@dataclass(frozen=True)
class BiasTest:
    """Templates with groups, or pairs of sentences; ValueError says what is wrong with them."""

    name: str = "bias"
    about: str = ""
    templates: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the members of each
    fill: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the values of each other place
    words: tuple[str, ...] = ()  # for the blank
    label: str = ""  # of a classifier, whose probability is measured; "": the last one
    whole: bool = False  # of sentences without a blank, the group's own words count too
    pairs: tuple[SentencePair, ...] = ()

    def __post_init__(self) -> None:
        if self.pairs:
            if self.templates or self.fill or self.words:
                raise ValueError(f"the test {self.name!r} has pairs of sentences: leave templates, fill and words out")
            if len(self.groups) != 2:
                raise ValueError("pairs of sentences need two names of groups, for the first and the second sentence")
            return
        if not self.templates:
            raise ValueError(f'the test {self.name!r} has no template, as "{{NAME}} is a {{JOB}}."')
        if not 2 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(
                f"the test {self.name!r} has {len(self.groups)} groups: 2 to {MAX_GROUPS} are compared, each with its "
                "members, as women=Mary,Anna men=John,Paul; or write a bracket, [He|She]"
            )
        for kind, values in (*self.groups.items(), *self.fill.items()):
            if not values or not all(value.strip() for value in values):
                raise ValueError(f"{kind!r} has no members, or an empty one: give {kind}=A,B")
        for template in self.templates:
            self._check_template(template)
        both = self.has_blank and self.has_place
        if both and not self.words:
            raise ValueError(
                f"{self.templates[0]!r}: which words are compared in the blank? give some, as --words nurse,judge"
            )
        if self.words and not both:
            raise ValueError(f"{self.templates[0]!r} has no blank for the words beside a place for the group")
        if self.n_sentences > MAX_SENTENCES:
            raise ValueError(f"the test {self.name!r} is {self.n_sentences:,} sentences: at most {MAX_SENTENCES:,}")

    def _check_template(self, template: str) -> None:
        places = set(PLACE.findall(template))
        if missing := set(self.fill) - places:
            raise ValueError(f"{template!r} has no {{{min(missing)}}}: every template has all places that are filled")
        blanks, left = len(BLANK.findall(template)), places - set(self.fill)
        if blanks > 1:
            raise ValueError(f"{template!r} has {blanks} blanks: write _ once at most")
        if len(left) > 1:
            raise ValueError(f"{template!r}: fill gives no values for {' or '.join(sorted(left))}; one is the groups'")
        if template.count("[") and BRACKET.search(template):
            raise ValueError(f"{template!r}: groups are given, so that no bracket may stand in it")
        if not left and not blanks:
            raise ValueError(f"{template!r} has no place for a group: write {{GROUP}}, or _ for a blank")
        if bool(left) != self.has_place or bool(blanks) != self.has_blank:
            raise ValueError("all templates of a test have a place for the group, or none; and a blank, or none")

    @property
    def has_blank(self) -> bool:
        """Whether words are measured in a blank."""
        return bool(self.templates) and bool(BLANK.search(self.templates[0]))

    @property
    def has_place(self) -> bool:
        """Whether members of groups stand in the sentence, not in its blank."""
        return bool(self.templates) and bool(set(PLACE.findall(self.templates[0])) - set(self.fill))

    @property
    def n_sentences(self) -> int:
        """The number of sentences that are scored, a word in a blank counting as one."""
        n = len(self.templates) * max(1, len(self.words)) * sum(map(len, self.groups.values()))
        for values in self.fill.values():
            n *= len(values)
        return 2 * len(self.pairs) or n

    @property
    def members(self) -> list[str]:
        """The members of all groups, one group after the other."""
        return [member for members in self.groups.values() for member in members]

    def combinations(self) -> list[dict[str, str]]:
        """Every choice of values for the places that are not the group's."""
        return [dict(zip(self.fill, values, strict=True)) for values in product(*self.fill.values())]

    def sentence(self, template: str, values: Mapping[str, str], member: str = "") -> tuple[str, int, int]:
        """A sentence, and where the member of the group stands in it: from character to character."""
        begin = end = 0
        text, last = "", 0
        for place in PLACE.finditer(template):
            text += template[last : place.start()]
            if place[1] in values:
                text += values[place[1]]
            else:
                begin, end = len(text), len(text) + len(member)
                text += member
            last = place.end()
        return text + template[last:], begin, end

    def blank(self, template: str, values: Mapping[str, str], member: str = "") -> Sentence:
        """A sentence with its blank, as `fill_template` takes it."""
        text = self.sentence(template, values, member)[0]
        found = BLANK.search(text)
        assert found is not None, "checked"
        return Sentence(text[: found.start()], text[found.end() :])

    def command(self, model: str) -> str:
        """The command line that gives the same numbers; of pairs, those in a file."""
        more = ["--pairs", "PAIRS.csv"] if self.pairs else list(self.templates)
        for option, given in (("--group", {} if self.pairs else self.groups), ("--fill", self.fill)):
            for name, values in given.items():
                more += [option, f"{name}={','.join(values)}"]
        more += ["--words", ",".join(self.words)] if self.words else []
        more += ["--label", self.label] if self.label else []
        return shlex.join(["heedful", "bias", model, *more, *(["--whole"] if self.whole else [])])

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as in a file of tests."""
        return {name: value for name, value in asdict(self).items() if value}


def make_test(given: Mapping[str, Any]) -> BiasTest:
    """A test from the fields of a file or a request; a bracket in the templates gives its groups."""
    known = {f.name for f in fields(BiasTest)} - {"pairs"}
    if unknown := set(given) - known:
        raise ValueError(f"a test has no field {min(unknown)!r}: it has {', '.join(sorted(known))}")
    made: dict[str, Any] = dict(given)
    for name in ("groups", "fill"):
        table = given.get(name) or {}
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} is a table of lists of words, as {{'JOB': ['nurse', 'judge']}}")
        made[name] = {str(key): _texts(key, values) for key, values in table.items()}
    made |= {name: _texts(name, given.get(name) or ()) for name in ("templates", "words")}
    if not made["groups"]:
        made |= _groups_of_brackets(made["templates"])
    return BiasTest(**made)


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"{name} is a list of texts, as ['nurse', 'judge']")
    return tuple(values)


def _groups_of_brackets(templates: Sequence[str]) -> dict[str, Any]:
    """The alternatives of the templates' one bracket as groups of one member, and the templates with a place for it."""
    found = [BRACKET.findall(template) for template in templates]
    if not any(found):
        return {}
    if not all(len(brackets) == 1 and brackets == found[0] for brackets in found):
        raise ValueError("the templates of a test have one bracket each, the same in all: [He|She]; or give groups")
    (alternatives,) = parse_template(found[0][0] + " _").slots
    places = [BRACKET.sub("{GROUP}", template) for template in templates]
    return {"groups": {name.strip() or "∅": (name,) for name in alternatives}, "templates": tuple(places)}


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")


def read_tests(path: Path) -> list[BiasTest]:
    """The tests of a TOML file."""
    _check_file(path)
    try:
        found = parse_toml(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} is no TOML: {problem}") from None
    tests = found.get("test")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
        raise ValueError(f"{path} has no test: write [[test]] with templates and groups")
    return [make_test({k: v for k, v in test.items() if k != "ability"}) for test in tests]


def standard_tests(abilities: Sequence[str]) -> list[BiasTest]:
    """The tests that ship, for a model with these abilities."""
    tests = tomllib.loads(STANDARD.read_text(encoding="utf-8"))["test"]
    chosen = [{k: v for k, v in test.items() if k != "ability"} for test in tests if test["ability"] in abilities]
    return [make_test(test) for test in chosen]


def read_sentence_pairs(path: Path, groups: Sequence[str] = ()) -> BiasTest:
    """A test from a CSV or TSV file of pairs with a header: those of CrowS-Pairs (sent_more, sent_less, bias_type), or
    the first two columns, and one called category."""
    _check_file(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (csv.Error, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} is no table of texts: {problem}") from None
    names = list(rows[0]) if rows else []
    first, second = ("sent_more", "sent_less") if "sent_more" in names else (*names[:2], "", "")[:2]
    kind = next((name for name in ("bias_type", "category") if name in names), "")
    pairs = [
        SentencePair((row[first] or "").strip(), (row[second] or "").strip(), row.get(kind) or "")
        for row in rows
        if first and second and (row.get(first) or "").strip() and (row.get(second) or "").strip()
    ]
    if not pairs:
        raise ValueError(f"{path} has no pairs: a header and two columns of sentences are needed")
    if 2 * len(pairs) > MAX_SENTENCES:
        raise ValueError(f"{path} has {len(pairs):,} pairs: at most {MAX_SENTENCES // 2:,}")
    names_of = tuple(groups) or (("more stereotyped", "less stereotyped") if first == "sent_more" else (first, second))
    return BiasTest(path.stem, groups=dict.fromkeys(names_of, ()), pairs=tuple(pairs))
