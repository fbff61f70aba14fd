"""German sentences and their English translations, made by a grammar: data for translators (and translations.py).

    python benchmarks/zoo_data/captions.py --out DATA [--n 600000]      (then HEEDFUL_DATA=DATA, recipe captions)

Writes captions/train.tsv.gz, validation.tsv.gz and test.tsv.gz (German, English), no sentence in two parts. The words
are in captions.toml, their forms in german.py. Captions of pictures and everyday sentences: present, preterite,
perfect, future, modals, passive; questions, requests, negation, relative, infinitive and other clauses; verbs second,
last or cut in two; names and invented words, which are copied.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path

from caption_phrases import Clause, Phrases
from german import (
    ADJECTIVES,
    HABEN,
    INTRANSITIVE,
    NOTHING,
    NOUNS,
    PAIRS,
    PHRASES,
    SEIN,
    VERBS_OF,
    WAR,
    WERDEN,
    Verb,
    be,
    verb,
    was,
)  # fmt: skip

MODALS = {
    "können": ("kann", "kannst", "können", "könnt", "can"), "müssen": ("muss", "musst", "müssen", "müsst", "must"),
    "wollen": ("will", "willst", "wollen", "wollt", "want to"),
    "sollen": ("soll", "sollst", "sollen", "sollt", "should"),
    "möchten": ("möchte", "möchtest", "möchten", "möchtet", "would like to"),
    "dürfen": ("darf", "darfst", "dürfen", "dürft", "may"),
}  # fmt: skip
ONLY_BEFORE_NOUNS = {"ander", "nächst", "letzt", "erst", "zweit", "besonder", "ganz", "halb", "älter", "jünger"}

BEFORE = [
    ("weil", "because"), ("während", "while"), ("wenn", "when"), ("obwohl", "although"), ("bevor", "before"),
    ("nachdem", "after"), ("damit", "so that"),
]  # fmt: skip
OPINIONS = [
    ("ich glaube", "I think"), ("ich weiß", "I know"), ("er sagt", "he says"), ("sie sagt", "she says"),
    ("wir hoffen", "we hope"), ("ich hoffe", "I hope"), ("sie denkt", "she thinks"), ("es ist gut", "it is good"),
    ("es scheint", "it seems"), ("ich sehe", "I see"),
]  # fmt: skip
TRIES = [
    ("versucht", "versuchen", "trying to"), ("beginnt", "beginnen", "beginning to"), ("plant", "planen", "planning to"),
    ("bereitet sich darauf vor", "bereiten sich darauf vor", "preparing to"), ("lernt", "lernen", "learning to"),
    ("hilft dabei", "helfen dabei", "helping to"),
]  # fmt: skip
MACHEN, KOMMEN = verb("machen", "do"), verb("kommen", "come")
SHARD = 10_000  # sentences that are drawn at once


class Grammar(Phrases):
    """Draws sentences."""

    def sentence(self) -> tuple[str, str]:
        """A sentence in German and English, with its first letter large and its full stop."""
        ways: dict[Callable[[], tuple[str, str]], float] = {
            self.main: 6, self.two: 1.3, self.caption: 1.5, self.preterite: 1.2, self.perfect: 1.3, self.modal: 0.9,
            self.future: 0.4, self.negated: 0.7, self.question: 1.2, self.copula: 0.9, self.there_is: 0.4,
            self.subordinate: 1.0, self.opinion: 0.4, self.habit: 0.5, self.infinitive: 0.7, self.passive: 0.4,
            self.request: 0.3, self.everyday: 0.05, self.personal: 0.4, self.seen: 0.3, self.nouns: 0.3,
        }  # fmt: skip
        german, english = self.rng.choices(list(ways), list(ways.values()))[0]()
        return tidy(german), tidy(english)

    def _clause(self, everyday: float = 0.2) -> Clause:
        kind = "animal" if self.chance(0.17) else "person"
        return self.clause(kind, self.subject(kind, everyday))

    def main(self) -> tuple[str, str]:
        clause = self._clause(0.12)
        when = self.when("time") if self.chance(0.1) else NOTHING
        german = self.ordered(clause, clause.verb.present(clause.who.person), clause.verb.prefix, when)
        return german, f"{clause.who.english} {self.progressive(clause)} {clause.tail} {when[1]}"

    def two(self) -> tuple[str, str]:
        """Two things that one does, or two clauses with und."""
        one = self._clause(0.12)
        if self.chance(0.35):
            other = self._clause(0.2)
            link, spoken = self.rng.choice((("und", "and"), ("und", "and"), (", aber", "but"), (", denn", "because")))
            finite = other.verb.present(other.who.person)
            german = f"{other.who.german} {finite} {other.reflexive}{other.middle} {other.verb.prefix}"
            german = f"{self.ordered(one, one.verb.present(one.who.person), one.verb.prefix)} {link} {german}"
            comma = "," if spoken != "because" else ""
            english = f"{one.who.english} {self.progressive(one)} {one.tail}{comma} {spoken} {other.who.english}"
            return german, f"{english} {self.progressive(other)} {other.tail}"
        other = self.clause("person", one.who, short=True)
        plain = one.verb.english.stative or other.verb.english.stative
        german = " und ".join(
            f"{c.verb.present(c.who.person)} {c.reflexive}{c.middle} {c.verb.prefix}" for c in (one, other)
        )
        second = self.progressive(other) if plain else other.verb.english.ing
        english = f"{one.who.english} {self.progressive(one)} {one.tail} and {second} {other.tail}"
        return f"{one.who.german} {german}", english

    def caption(self) -> tuple[str, str]:
        """No sentence: somebody who does something, or somebody somewhere."""
        kind = "animal" if self.chance(0.2) else "person"
        who = self.noun_phrase(kind, "nom", "ein") if self.chance(0.8) else self.group(kind)
        if self.chance(0.25):
            german, english = self.where()
            return f"{who.german} {german}", f"{who.english} {english}"
        if self.chance(0.12):
            verb = self.rng.choice([v for v in INTRANSITIVE["plain"] if not v.prefix and not v.reflexive])
            return f"{who.german} beim {verb.infinitive.capitalize()}", f"{who.english} {verb.english.ing}"
        found = self.relative(who, kind)
        return found.german, found.english

    def nouns(self) -> tuple[str, str]:
        """A noun phrase alone, which has each word alone for once."""
        phrase = self.noun_phrase(self.rng.choice(list(NOUNS)), "nom")
        return phrase.german, phrase.english

    def preterite(self) -> tuple[str, str]:
        clause = self._clause(0.3)
        if clause.who.person in ("2s", "2p"):
            return self.main()
        when = self.when("past") if self.chance(0.3) else NOTHING
        german = self.ordered(clause, clause.verb.preterite(clause.who.person), clause.verb.prefix, when)
        return german, f"{clause.who.english} {self._past(clause)} {clause.tail} {when[1]}"

    def _past(self, clause: Clause) -> str:
        verb = clause.verb.english
        return verb.past if verb.head != "be" else verb.base.replace("be", was(clause.who.person), 1)

    def perfect(self) -> tuple[str, str]:
        clause = self._clause(0.4)
        when = self.when("past") if self.chance(0.35) else NOTHING
        finite = (SEIN if clause.verb.with_sein else HABEN)[clause.who.person]
        german = self.ordered(clause, finite, clause.verb.participle, when)
        return german, f"{clause.who.english} {self._past(clause)} {clause.tail} {when[1]}"

    def future(self) -> tuple[str, str]:
        clause, when = self._clause(0.5), self.when("future")
        german = self.ordered(clause, WERDEN[clause.who.person], clause.verb.full, when)
        return german, f"{clause.who.english} will {clause.verb.english.base} {clause.tail} {when[1]}"

    def modal(self) -> tuple[str, str]:
        clause = self.clause("person", self.subject("person", 0.5))
        finite, spoken = self._modal(clause.who.person)
        no = self.chance(0.15) and clause.verb.infinitive != "mögen"
        german = f"{clause.who.german} {finite} {clause.reflexive}{'nicht' * no} {clause.middle} {clause.verb.full}"
        if no:
            do = "does not" if clause.who.person == "3s" else "do not"
            refused = {
                "can": "cannot",
                "wants to": f"{do} want to",
                "want to": f"{do} want to",
                "must": f"{do} have to",
            }
            spoken = refused.get(spoken, spoken.replace("would", "would not") if "would" in spoken else f"{spoken} not")
        return german, f"{clause.who.english} {spoken} {clause.verb.english.base} {clause.tail}"

    def _modal(self, person: str) -> tuple[str, str]:
        single, second, plural, second_plural, spoken = self.rng.choice(list(MODALS.values()))
        finite = {"1s": single, "3s": single, "2s": second, "2p": second_plural}.get(person, plural)
        return finite, "wants to" if spoken == "want to" and person == "3s" else spoken

    def negated(self) -> tuple[str, str]:
        who = self.subject("person", 0.4)
        person = who.person
        if self.chance(0.5):
            kind = self.rng.choice(
                ["thing", "food", "animal", "vehicle", "clothes", "reading", "drink", "stuff", "idea"]
            )
            verb = self.rng.choice([v for v in VERBS_OF[kind] if v.case == "acc" and not v.preposition])
            thing = self.noun_phrase(kind, "acc", "kein", adjectives=0.2)
            german = f"{who.german} {verb.present(person)} {thing.german} {verb.prefix}"
            return german, f"{who.english} {self._not(verb, person)} {self._any(thing.english, thing.person)}"
        clause = self.clause("person", who, short=True)
        verb = clause.verb
        german = f"{who.german} {verb.present(person)} {clause.reflexive}nicht {clause.middle} {verb.prefix}"
        return german, f"{who.english} {self._not(verb, person)} {clause.tail}"

    def _any(self, english: str, person: str) -> str:
        english = english.removeprefix("no ")
        many = person == "3p" or any(english.endswith(n.english) for k in ("drink", "stuff") for n in NOUNS[k])
        return f"any {english}" if many else f"a{'n' * (english[0] in 'aeiou')} {english}"

    def _not(self, verb: Verb, person: str) -> str:
        if verb.english.stative and verb.english.head != "be":
            return f"do{'es' * (person == '3s')} not {verb.english.base}"
        rest = verb.english.base[3:] if verb.english.head == "be" else verb.english.ing
        return f"{be(person)} not {rest}"

    def question(self) -> tuple[str, str]:
        kind = "animal" if self.chance(0.15) else "person"
        everyday = self.chance(0.6) and kind == "person"
        who = self.pronoun() if everyday else self.noun_phrase(kind, "nom", self.rng.choice(("der", "dein")))
        clause, way = self.clause(kind, who, short=True), self.rng.randrange(9)
        person, verb = who.person, clause.verb
        if way == 0:
            at, do = self.where(), MACHEN.present(person)
            return f"Was {do} {who.german} {at[0]}?", f"What {be(person)} {who.english} doing {at[1]}?"
        if way == 1:
            return f"Wo {SEIN[person]} {who.german}?", f"Where {be(person)} {who.english}?"
        if way == 2:
            kind = self.rng.choice(("thing", "clothes", "vehicle", "accessory"))
            thing = self.noun_phrase(kind, "nom", self.rng.choice(("der", "mein", "dein")))
            return f"Wo {SEIN[thing.person]} {thing.german}?", f"Where {be(thing.person)} {thing.english}?"
        if way == 3:
            finite = verb.present("3s")
            reflexive = "sich " * verb.reflexive
            spoken = verb.english.present("3s") if verb.english.stative else f"is {verb.english.ing}"
            return f"Wer {finite} {reflexive}{clause.middle} {verb.prefix}?", f"Who {spoken} {clause.tail}?"
        if way == 4:
            finite, spoken = self._modal(person)
            spoken = {"want to": "do", "wants to": "does", "would like to": "would"}.get(spoken, spoken)
            extra = {"do": "want to ", "does": "want to ", "would": "like to "}.get(spoken, "")
            german = f"{finite} {who.german} {clause.reflexive}{clause.middle} {verb.full}?"
            return german, f"{spoken} {who.english} {extra}{verb.english.base} {clause.tail}?"
        if way == 5:
            finite = (SEIN if verb.with_sein else HABEN)[person]
            german = f"{finite} {who.german} {clause.reflexive}{clause.middle} {verb.participle}?"
            if verb.english.head == "be":
                return german, f"{was(person)} {who.english} {verb.english.base[3:]} {clause.tail}?"
            return german, f"did {who.english} {verb.english.base} {clause.tail}?"
        asked, spoken = self.rng.choice(
            (("warum ", "why "), ("wann ", "when "), ("wie oft ", "how often "), NOTHING, NOTHING)
        )
        german = f"{asked}{verb.present(person)} {who.german} {clause.reflexive}{clause.middle} {verb.prefix}?"
        simple = verb.english.stative or asked in ("wann ", "wie oft ")
        if verb.english.head == "be":
            return german, f"{spoken}{be(person)} {who.english} {verb.english.base[3:]} {clause.tail}?"
        ask = f"do{'es' * (person == '3s')}" if simple else be(person)
        return german, f"{spoken}{ask} {who.english} {verb.english.base if simple else verb.english.ing} {clause.tail}?"

    def copula(self) -> tuple[str, str]:
        if self.chance(0.3):
            who, kind = self.subject("person", 0.9), "person"
        else:
            kind = self.rng.choice([k for k in NOUNS if k not in ("game", "pairs", "plurals")])
            who = self.noun_phrase(kind, "nom", self.rng.choice(("der", "der", "sein", "ihr", "mein", "dein", "unser")))
        if self.chance(0.2) and kind == "person":
            other = self.noun_phrase("person", "nom", "ein", plural=who.person[1] == "p")
            german, english = other.german, other.english
        else:
            known = ADJECTIVES.get("food" if kind in ("stuff", "drink") else kind) or ADJECTIVES["thing"]
            german, _, english = self.rng.choice([a for a in known if a[0] not in ONLY_BEFORE_NOUNS])
            more, spoken = self.rng.choice(
                (("sehr", "very"), ("zu", "too"), ("nicht", "not"), ("so", "so"), *[NOTHING] * 6)
            )
            german, english = f"{more} {german}", f"{spoken} {english}"
        finite, spoken = (WAR[who.person], was(who.person)) if self.chance(0.25) else (SEIN[who.person], be(who.person))
        return f"{who.german} {finite} {german}", f"{who.english} {spoken} {english}"

    def there_is(self) -> tuple[str, str]:
        thing, where = self.noun_phrase(self.rng.choice(list(NOUNS)), "acc", "ein"), self.where()
        return f"es gibt {thing.german} {where[0]}", f"there {be(thing.person)} {thing.english} {where[1]}"

    def seen(self) -> tuple[str, str]:
        """Somewhere something is, stands or lies: that it is there."""
        kind = self.rng.choice(("thing", "vehicle", "building", "animal", "seat"))
        thing, (german, english) = self.noun_phrase(kind, "nom", "ein"), self.where()
        finite, spoken = self.rng.choice((("steht", "standing"), ("liegt", "lying"), ("ist", "")))
        plural = {"steht": "stehen", "liegt": "liegen", "ist": "sind"}
        finite = plural[finite] if thing.person == "3p" else finite
        return f"{german} {finite} {thing.german}", f"there {be(thing.person)} {thing.english} {spoken} {english}"

    def subordinate(self) -> tuple[str, str]:
        """A clause with weil, während, wenn, first or last."""
        link, spoken = self.rng.choice(BEFORE) if self.chance(0.6) else BEFORE[1]
        one, other = self._clause(0.3), self._clause(0.25)
        finite = one.verb.present(one.who.person)
        last, second = f"{link} {other.who.german} {self.last(other)}", f"{self.progressive(other)} {other.tail}"
        told = f"{one.who.english} {self.progressive(one)} {one.tail}"
        if self.chance(0.35):
            german = f"{last}, {finite} {one.who.german} {one.reflexive}{one.middle} {one.verb.prefix}"
            return german, f"{spoken} {other.who.english} {second}, {told}"
        german = f"{one.who.german} {finite} {one.reflexive}{one.middle} {one.verb.prefix}, {last}"
        return german, f"{told} {spoken} {other.who.english} {second}"

    def opinion(self) -> tuple[str, str]:
        german, english = self.rng.choice(OPINIONS)
        clause = self._clause(0.4)
        told = f"{clause.who.english} {self.progressive(clause)} {clause.tail}"
        return f"{german}, dass {clause.who.german} {self.last(clause)}", f"{english} that {told}"

    def habit(self) -> tuple[str, str]:
        clause = self._clause(0.6)
        finite, spoken = clause.verb.present(clause.who.person), clause.verb.english.present(clause.who.person)
        if self.chance(0.5):
            german, english = self.rng.choice(PHRASES["often"])
            told = f"{clause.who.english} {english} {spoken} {clause.tail}"
            return f"{clause.who.german} {finite} {clause.reflexive}{german} {clause.middle} {clause.verb.prefix}", told
        when = self.rng.choice(PHRASES["habit"])
        german = self.ordered(clause, finite, clause.verb.prefix, when)
        return german, f"{clause.who.english} {spoken} {clause.tail} {when[1]}"

    def infinitive(self) -> tuple[str, str]:
        """versucht, ... zu lesen; um ... zu lesen."""
        who = self.subject("person", 0.15)
        if who.person not in ("3s", "3p"):
            return self.main()
        goal = self.clause("person", who, short=True)
        reflexive = "sich " * goal.verb.reflexive
        end, told = f"{reflexive}{goal.middle} {goal.verb.with_zu}", f"{goal.verb.english.base} {goal.tail}"
        if self.chance(0.4):
            one = self.clause("person", who)
            german = (
                f"{who.german} {one.verb.present(who.person)} {one.reflexive}{one.middle} {one.verb.prefix}, um {end}"
            )
            return german, f"{who.english} {self.progressive(one)} {one.tail} to {told}"
        single, plural, spoken = self.rng.choice(TRIES)
        return (f"{who.german} {plural if who.person == '3p' else single}, {end}",
                f"{who.english} {be(who.person)} {spoken} {told}")  # fmt: skip

    def passive(self) -> tuple[str, str]:
        kind = self.rng.choice(("thing", "vehicle", "food", "animal", "building", "clothes", "person"))
        verbs = [v for v in VERBS_OF[kind] if not v.preposition and v.case == "acc" and not v.english.stative]
        verb, what = self.rng.choice(verbs), self.noun_phrase(kind, "nom")
        by, where = self.noun_phrase("person", "dat"), self.where() if self.chance(0.3) else NOTHING
        german = f"{what.german} {WERDEN[what.person]} von {by.german} {where[0]} {verb.participle}"
        return german, f"{what.english} {be(what.person)} being {verb.english.participle} by {by.english} {where[1]}"

    def request(self) -> tuple[str, str]:
        """Bitte öffnen Sie die Tür."""
        clause = self.clause("person", self.pronoun(), short=True)
        sich = "sich " * clause.verb.reflexive
        please, spoken = ("bitte ", "please ") if self.chance(0.6) else NOTHING
        german = f"{please}{clause.verb.infinitive} Sie {sich}{clause.middle} {clause.verb.prefix}"
        return german + ("" if please else "!"), f"{spoken}{clause.verb.english.base} {clause.tail}" + (
            "" if please else "!"
        )

    def everyday(self) -> tuple[str, str]:
        return self.rng.choice(PHRASES["everyday"])

    def personal(self) -> tuple[str, str]:
        """Names, ages, homes."""
        (name, same), (town, spoken), (n, years) = self.name(), self.town(), self.rng.choice(PAIRS["numbers"][:13])
        who = self.subject("person", 0.9)
        be_, is_ = SEIN[who.person], be(who.person)
        mine = {"I": "my", "you": "your", "he": "his", "she": "her", "we": "our", "they": "their"}.get(who.english)
        heißen = {"1s": "heiße", "2s": "heißt", "3s": "heißt", "2p": "heißt"}.get(who.person, "heißen")
        like = KOMMEN.english.present(who.person)
        ways = [
            (f"{who.german} {heißen} {name}", f"{mine} name is {same}" if mine else f"{who.english} is called {same}"),
            (f"{who.german} {be_} {n} Jahre alt", f"{who.english} {is_} {years} years old"),
            (f"{who.german} {KOMMEN.present(who.person)} aus {town}", f"{who.english} {like} from {spoken}"),
            (f"das ist {name}", f"this is {same}"),
            (f"das Kind heißt {name}", f"the child is called {same}"),
            (f"es ist {n} Uhr", f"it is {years} o'clock"),
            (f"{name} und {town}", f"{same} and {spoken}"),
        ]
        return self.rng.choice(ways)


def tidy(text: str) -> str:
    """With single spaces, its first letter large and a full stop unless it has another end."""
    text = text.strip() if text.strip()[-1] in "?!." and not text.endswith(" .") else text + "."
    text = re.sub(r"\s+([.,?!])", r"\1", re.sub(r"\s+", " ", text))
    text = re.sub(r",([.?!,])", r"\1", re.sub(r",+", ",", text)).strip()
    return text[0].upper() + text[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=600_000, help="sentences to train on")
    options = parser.parse_args()
    folder = options.out / "captions"
    folder.mkdir(parents=True, exist_ok=True)
    seen = set[str]()
    with Pool() as pool:
        for part, n in ("test", 1000), ("validation", 1000), ("train", options.n):
            drawn = pool.imap(sentences, ((part, i, min(SHARD, n)) for i in range(2 * n // SHARD + 2)))
            rows: list[str] = []
            while len(rows) < n:
                new = [pair for pair in next(drawn) if pair[0] not in seen]
                seen.update(german for german, _ in new)
                rows += [f"{german}\t{english}\n" for german, english in new][: n - len(rows)]
            (folder / f"{part}.tsv.gz").write_bytes(gzip.compress("".join(rows).encode(), mtime=0))
            print(f"{part}: {n} sentences")


def sentences(part: tuple[str, int, int]) -> list[tuple[str, str]]:
    """The sentences of one shard, each once: its part, its number, how many are drawn."""
    grammar = Grammar(random.Random(f"{part[0]} {part[1]}"))
    return list(dict(grammar.sentence() for _ in range(part[2])).items())


if __name__ == "__main__":
    main()
