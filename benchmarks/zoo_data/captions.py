"""German sentences and their English translations, made by a grammar: data for a translator that may ship.

    python benchmarks/zoo_data/captions.py --out DATA [--n 200000]      (then HEEDFUL_DATA=DATA, recipe captions)

Writes captions/train.tsv.gz, validation.tsv.gz and test.tsv.gz (German, English), no sentence in two parts. The words
are in captions.toml. Articles, adjectives and nouns are declined (nominative, accusative, dative; mixed, weak and
strong endings; weak nouns), verbs stand second, last or at both ends; present, perfect, modals, questions, negation,
relative clauses, two clauses with "und" or "während".
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "captions.toml").read_text(encoding="utf-8"))
CASES = ("nom", "acc", "dat")
DEFINITE = {
    "m": ("der", "den", "dem"),
    "f": ("die", "die", "der"),
    "n": ("das", "das", "dem"),
    "p": ("die", "die", "den"),
}
INDEFINITE = {
    "m": ("", "en", "em"),
    "f": ("e", "e", "er"),
    "n": ("", "", "em"),
    "p": ("e", "e", "en"),
}  # of ein, kein, sein
MIXED = {"m": ("er", "en", "en"), "f": ("e", "e", "en"), "n": ("es", "es", "en"), "p": ("en", "en", "en")}
WEAK = {"m": ("e", "en", "en"), "f": ("e", "e", "en"), "n": ("e", "e", "en"), "p": ("en", "en", "en")}
STRONG = ("e", "e", "en")  # of a plural
NUMBERS = {
    "zwei": "two",
    "drei": "three",
    "vier": "four",
    "einige": "some",
    "mehrere": "several",
    "viele": "many",
    "": "",
}
MODALS = {
    "kann": ("können", "can", "can"), "will": ("wollen", "wants to", "want to"), "muss": ("müssen", "must", "must"),
    "möchte": ("möchten", "would like to", "would like to"), "soll": ("sollen", "should", "should"),
}  # fmt: skip
PRONOUNS = {"er": ("he", "s"), "sie": ("she", "s"), "wir": ("we", "p"), "ich": ("I", "i"), "Sie": ("they", "p")}
STATIVE = {"see", "hear", "love", "find", "lose", "show"}
ADJECTIVES_OF = {"person": "person", "animal": "animal", "food": "food"}  # the others are things


@dataclass(frozen=True)
class Noun:
    gender: str
    singular: str
    plural: str
    english: str
    english_plural: str
    weak: str


@dataclass(frozen=True)
class Verb:
    third: str  # spielt
    infinitive: str  # spielen
    prefix: str  # of a verb that is cut: an(ziehen)
    perfect: str
    auxiliary: str  # hat or ist
    english: str
    ing: str
    past: str


@dataclass(frozen=True)
class Phrase:
    """A part of a sentence in both languages; number s, p or i (ich)."""

    german: str
    english: str
    number: str = "s"
    gender: str = "m"


def nouns(kind: str) -> list[Noun]:
    found = []
    for line in WORDS["nouns"][kind].split(";"):
        gender, singular, plural, english, plurals, *weak = line.split()
        names = english.replace("ice-cream", "ice cream"), plurals.replace("ice-cream", "ice cream")
        found.append(Noun(gender, singular, plural, *names, weak[0][1:] if weak else singular))
    return found


def verbs(kind: str) -> list[Verb]:
    found = []
    for line in WORDS["verbs"][kind].split(";"):
        third, infinitive, perfect, *english = line.split()
        prefix, _, stem = infinitive.rpartition("|")
        auxiliary, _, participle = perfect.rpartition(":")
        spoken = (word.replace("_", " ") for word in english)
        found.append(Verb(third.split("_")[0], stem, prefix, participle, auxiliary or "hat", *spoken))
    return found


def phrases(kind: str) -> list[Phrase]:
    return [Phrase(*pair.strip().split("=")) for pair in WORDS["phrases"][kind].split(";")]


NOUNS = {kind: nouns(kind) for kind in WORDS["nouns"]}
VERBS = {kind: verbs(kind) for kind in WORDS["verbs"]}
PHRASES = {kind: phrases(kind) for kind in WORDS["phrases"]}
ADJECTIVES = {
    kind: [(g.split("|")[0], g.split("|")[-1], e) for g, e in (pair.split() for pair in text.split(";"))]
    for kind, text in WORDS["adjectives"].items()
}
OBJECTS = [kind for kind in VERBS if kind in NOUNS]


def article(english: str) -> str:
    return f"{'an' if english[0] in 'aeiou' and not english.startswith('uniform') else 'a'} {english}"


class Grammar:
    """Draws sentences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # --- noun phrases ----------------------------------------------------------------------------------------------

    def noun_phrase(self, kind: str, case: str, det: str = "", plural: bool | None = None) -> Phrase:
        """A noun with article or number, perhaps with an adjective. `det`: der, ein, kein, sein; at random if empty."""
        noun, at = self.rng.choice(NOUNS[kind]), CASES.index(case)
        plural = self.chance(0.25) if plural is None else plural
        det = det or self.rng.choice(("ein", "ein", "der"))
        gender = "p" if plural else noun.gender
        word = noun.plural if plural else noun.singular if case == "nom" else noun.weak
        if plural and case == "dat" and word[-1] not in "ns":
            word += "n"
        english = noun.english_plural if plural else noun.english
        stem, spoken = "", ""
        if self.chance(0.4):
            _, stem, spoken = self.rng.choice(ADJECTIVES[ADJECTIVES_OF.get(kind, "thing")])
        described = f"{spoken} {english}".strip()
        if det == "der":
            first, ending, told = DEFINITE[gender][at], WEAK[gender][at], f"the {described}"
        elif det == "ein" and plural:
            first = self.rng.choice(list(NUMBERS))
            ending, told = STRONG[at], f"{NUMBERS[first]} {described}".strip()
            if first[-1:] == "e" and case == "dat":
                first += "n"
        else:
            first, ending = det + INDEFINITE[gender][at], MIXED[gender][at]
            owner = {"sein": "his", "ihr": "her", "mein": "my", "unser": "our"}.get(det)
            told = f"{owner} {described}" if owner else article(described)
            if det == "kein":
                told = f"any {described}" if plural else article(described)
            if det == "unser" and first != "unser":
                first = "unser" + INDEFINITE[gender][at]
        word = f"{stem + ending} {word}" if stem else word
        return Phrase(f"{first} {word}".strip(), told, "p" if plural else "s", noun.gender)

    def subject(self, kind: str) -> Phrase:
        """A subject: a pronoun, or a noun phrase with what is worn or a companion."""
        if kind == "person" and self.chance(0.12):
            german, (english, number) = self.rng.choice(list(PRONOUNS.items()))
            return Phrase("sie" if german == "Sie" else german, english, number, "f" if german == "sie" else "m")
        found = self.noun_phrase(kind, "nom")
        german, english = found.german, found.english
        if kind == "person" and self.chance(0.25):
            if self.chance(0.6):
                worn = self.noun_phrase("clothes", "dat", "ein", plural=False)
                if worn.english.split()[-1] not in ("hat", "cap", "scarf", "helmet", "glove", "shoe", "apron"):
                    german, english = f"{german} in {worn.german}", f"{english} in {worn.english}"
                elif worn.english.split()[-1] not in ("glove", "shoe"):
                    german, english = f"{german} mit {worn.german}", f"{english} with {worn.english}"
            else:
                other = self.noun_phrase(self.rng.choice(("animal", "thing", "person")), "dat", "ein")
                german, english = f"{german} mit {other.german}", f"{english} with {other.english}"
        elif kind == "person" and self.chance(0.15):
            worn, verb = self.noun_phrase("clothes", "acc", "ein", plural=False), VERBS["clothes"][0]
            which = DEFINITE["p" if found.number == "p" else found.gender][0]
            last = verb.infinitive if found.number == "p" else verb.third
            german, english = f"{german}, {which} {worn.german} {last},", f"{english} wearing {worn.english}"
        return Phrase(german, english, found.number, found.gender)

    def somewhere(self, move: bool = False) -> Phrase:
        if move and self.chance(0.6):
            return self.rng.choice(PHRASES["way"])
        if self.chance(0.6):
            return self.rng.choice(PHRASES["place"])
        preposition, english, kind = self.rng.choice(
            [("auf", "on", "seat"), ("vor", "in front of", "building"), ("neben", "next to", "building"),
             ("hinter", "behind", "building"), ("neben", "next to", "person"), ("neben", "next to", "vehicle"),
             ("unter", "under", "seat"), ("vor", "in front of", "vehicle"), ("zwischen", "between", "building")]
        )  # fmt: skip
        where = self.noun_phrase(kind, "dat", plural=True if preposition == "zwischen" else False)
        return Phrase(f"{preposition} {where.german}", f"{english} {where.english}")

    # --- clauses -----------------------------------------------------------------------------------------------------

    def predicate(self, kind: str) -> tuple[Verb, Phrase, Phrase]:
        """A verb, its object and a place; the last two may be empty."""
        nothing = Phrase("", "")
        choice = self.rng.random()
        if choice < (0.5 if kind == "person" else 0.15):
            what = self.rng.choice(OBJECTS) if kind == "person" else "animal"
            verb = (
                self.rng.choice(VERBS[what]) if kind == "person" else next(v for v in VERBS[what] if v.third == "jagt")
            )
            thing = self.noun_phrase(what, "acc")
            if what == "instrument" and verb.third == "spielt" and self.chance(0.5):
                played = self.rng.choice(NOUNS[what])
                thing = Phrase(played.singular, f"the {played.english}")
            return verb, thing, self.somewhere() if self.chance(0.4) else nothing
        if choice < 0.7:
            return self.rng.choice(VERBS["rest"]), nothing, self.somewhere()
        if choice < 0.85:
            return self.rng.choice(VERBS["move"]), nothing, self.somewhere(move=True)
        verb = self.rng.choice(VERBS["alone" if kind == "person" else "beast"])
        return verb, nothing, self.somewhere() if self.chance(0.6) else nothing

    def finite(self, verb: Verb, number: str) -> str:
        if number == "s":
            return verb.third
        if number == "p":
            return verb.infinitive
        stem = verb.infinitive[:-2] if verb.infinitive.endswith("en") else verb.infinitive[:-1]
        return stem[:-2] + "le" if stem.endswith("el") else stem + "e"

    def be(self, number: str) -> str:
        return {"s": "is", "p": "are", "i": "am"}[number]

    def present(self, verb: Verb, number: str) -> str:
        if verb.english.split()[0] in STATIVE:
            return verb.english + "s" if number == "s" else verb.english
        return f"{self.be(number)} {verb.ing}"

    def sentence(self) -> tuple[str, str]:
        """A sentence in German and English, with its first letter large and its full stop."""
        ways: dict[Any, float] = {
            self.main: 5, self.two: 1.2, self.perfect: 2, self.modal: 1.2, self.negated: 0.8, self.question: 1,
            self.copula: 0.6, self.there_is: 0.5, self.while_clause: 0.8,
        }  # fmt: skip
        german, english = self.rng.choices(list(ways), list(ways.values()))[0]()
        end = "" if german[-1] == "?" else "."
        return tuple(_tidy(text + end) for text in (german, english))  # type: ignore[return-value]

    def _kind(self) -> str:
        return "animal" if self.chance(0.2) else "person"

    def main(self) -> tuple[str, str]:
        kind = self._kind()
        who, (verb, thing, where) = self.subject(kind), self.predicate(kind)
        finite = self.finite(verb, who.number)
        english = f"{who.english} {self.present(verb, who.number)} {thing.english} {where.english}"
        if where.german and self.chance(0.2):  # what stands first is followed by the verb
            return f"{where.german} {finite} {who.german} {thing.german} {verb.prefix}", english
        when = self.rng.choice(PHRASES["time"]) if self.chance(0.08) else Phrase("", "")
        german = f"{who.german} {finite} {when.german} {thing.german} {where.german} {verb.prefix}"
        return german, f"{english} {when.english}"

    def two(self) -> tuple[str, str]:
        who = self.subject("person")
        parts = [self.predicate("person") for _ in range(2)]
        german = [f"{self.finite(v, who.number)} {t.german} {w.german} {v.prefix}" for v, t, w in parts]
        (v, t, w), (v2, t2, w2) = parts
        second = v2.ing
        if {v.english.split()[0], v2.english.split()[0]} & STATIVE:
            second = self.present(v2, who.number)
        english = f"{who.english} {self.present(v, who.number)} {t.english} {w.english} and {second}"
        return f"{who.german} {german[0]} und {german[1]}", f"{english} {t2.english} {w2.english}"

    def while_clause(self) -> tuple[str, str]:
        kind = self._kind()
        one, other = self.subject("person"), self.subject(kind)
        (v, t, w), (v2, t2, w2) = self.predicate("person"), self.predicate(kind)
        last = f"{v.prefix}{self.finite(v, one.number)}"
        german = f"während {one.german} {t.german} {w.german} {last}, {self.finite(v2, other.number)} {other.german}"
        english = f"while {one.english} {self.present(v, one.number)} {t.english} {w.english}, {other.english}"
        return (
            f"{german} {t2.german} {w2.german} {v2.prefix}",
            f"{english} {self.present(v2, other.number)} {t2.english} {w2.english}",
        )

    def perfect(self) -> tuple[str, str]:
        kind = self._kind()
        who, (verb, thing, where) = self.subject(kind), self.predicate(kind)
        forms = {"hat": ("hat", "haben", "habe"), "ist": ("ist", "sind", "bin")}
        auxiliary = forms[verb.auxiliary]["spi".index(who.number)]
        when = self.rng.choice(PHRASES["past_time"]) if self.chance(0.4) else Phrase("", "")
        rest = f"{thing.german} {where.german} {verb.perfect}"
        english = f"{who.english} {verb.past} {thing.english} {where.english} {when.english}"
        if when.german and self.chance(0.4):
            return f"{when.german} {auxiliary} {who.german} {rest}", english
        return f"{who.german} {auxiliary} {when.german} {rest}", english

    def modal(self) -> tuple[str, str]:
        who, (verb, thing, where) = self.subject("person"), self.predicate("person")
        german, (plural, english, english_plural) = self.rng.choice(list(MODALS.items()))
        finite = plural if who.number == "p" else german
        spoken = english if who.number == "s" else english_plural
        return (
            f"{who.german} {finite} {thing.german} {where.german} {verb.prefix}{verb.infinitive}",
            f"{who.english} {spoken} {verb.english} {thing.english} {where.english}",
        )

    def negated(self) -> tuple[str, str]:
        who, (verb, thing, where) = self.subject("person"), self.predicate("person")
        finite = self.finite(verb, who.number)
        stative = verb.english.split()[0] in STATIVE
        no = (
            f"do{'es' * (who.number == 's')} not {verb.english}" if stative else f"{self.be(who.number)} not {verb.ing}"
        )
        if not thing.german:
            return f"{who.german} {finite} nicht {where.german} {verb.prefix}", f"{who.english} {no} {where.english}"
        kind = next(k for k in OBJECTS if verb in VERBS[k])
        thing = self.noun_phrase(kind, "acc", "kein")
        return f"{who.german} {finite} {thing.german} {verb.prefix}", f"{who.english} {no} {thing.english}"

    def question(self) -> tuple[str, str]:
        kind = self._kind()
        who, (verb, thing, where) = self.noun_phrase(kind, "nom", "der"), self.predicate(kind)
        do = "macht" if who.number == "s" else "machen"
        way = self.rng.randrange(4)
        if way == 0:
            at = self.rng.choice(PHRASES["place"]) if self.chance(0.5) else Phrase("", "")
            return (
                f"Was {do} {who.german} {at.german}?",
                f"What {self.be(who.number)} {who.english} doing {at.english}?",
            )
        if way == 1:
            is_ = "ist" if who.number == "s" else "sind"
            return f"Wo {is_} {who.german}?", f"Where {self.be(who.number)} {who.english}?"
        stative = verb.english.split()[0] in STATIVE
        ask = f"do{'es' * (who.number == 's')}" if stative else self.be(who.number)
        return (
            f"{self.finite(verb, who.number)} {who.german} {thing.german} {where.german} {verb.prefix}?",
            f"{ask} {who.english} {verb.english if stative else verb.ing} {thing.english} {where.english}?",
        )

    def copula(self) -> tuple[str, str]:
        kind = self.rng.choice(list(NOUNS))
        det = self.rng.choice(("der", "der", "sein", "ihr", "mein"))
        who = self.noun_phrase(kind, "nom", det)
        german, _, english = self.rng.choice(ADJECTIVES[ADJECTIVES_OF.get(kind, "thing")])
        very = self.chance(0.3)
        be = "ist" if who.number == "s" else "sind"
        told = (
            f"{who.german} {be} {'sehr ' * very}{german}",
            f"{who.english} {self.be(who.number)} {'very ' * very}{english}",
        )
        return told

    def there_is(self) -> tuple[str, str]:
        thing, where = self.noun_phrase(self.rng.choice(list(NOUNS)), "acc", "ein"), self.somewhere()
        return (
            f"es gibt {thing.german} {where.german}",
            f"there {self.be(thing.number)} {thing.english} {where.english}",
        )


def _tidy(text: str) -> str:
    text = re.sub(r",+", ",", re.sub(r"\s+", " ", text)).strip()
    text = re.sub(r" ([.,?])", r"\1", text).replace(",.", ".").replace(",?", "?")
    return text[0].upper() + text[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200_000, help="sentences to train on")
    options = parser.parse_args()
    folder = options.out / "captions"
    folder.mkdir(parents=True, exist_ok=True)
    grammar, seen = Grammar(random.Random(0)), set[str]()
    for part, n in ("test", 1000), ("validation", 1000), ("train", options.n):
        rows: list[str] = []
        while len(rows) < n:
            german, english = grammar.sentence()
            if german not in seen:
                seen.add(german)
                rows.append(f"{german}\t{english}\n")
        (folder / f"{part}.tsv.gz").write_bytes(gzip.compress("".join(rows).encode(), mtime=0))
        print(f"{part}: {n} sentences")


if __name__ == "__main__":
    main()
