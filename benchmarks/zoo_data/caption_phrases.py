"""The parts of the sentences that captions.py makes: noun phrases, places, directions, clauses, in both languages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import german as de


@dataclass(frozen=True)
class Phrase:
    """A part of a sentence in both languages, its person (3s) and gender."""

    german: str
    english: str
    person: str = "3s"
    gender: str = "m"
    pronoun: bool = False


@dataclass(frozen=True)
class Clause:
    """What is said of a subject: a verb and what stands between it and the end, in both languages."""

    who: Phrase
    verb: de.Verb
    middle: str
    tail: str
    first: tuple[str, str] = de.NOTHING  # time or place that may stand first

    @property
    def reflexive(self) -> str:
        return de.REFLEXIVE[self.who.person] + " " if self.verb.reflexive else ""


class Phrases:
    """Draws parts of sentences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def often(self, words: list[Any]) -> Any:
        """One of some words; the first of them, which are those of every day, more often."""
        return words[int(len(words) * self.rng.random() ** 1.8)]

    # --- noun phrases ------------------------------------------------------------------------------------------------

    def noun_phrase(
        self, kind: str, case: str, det: str = "", plural: bool | None = None, adjectives: float = 0.45
    ) -> Phrase:
        """A noun with article or number, perhaps with adjectives. `det`: der, ein, kein, mein; at random if empty."""
        return self.declined(self.noun(kind), kind, case, det, plural, adjectives)

    def noun(self, kind: str) -> de.Noun:
        """A noun of a kind, now and then a compound or an invented word."""
        drawn = self.often(de.NOUNS[kind])
        if self.chance(0.012) and kind not in ("game", "plurals"):
            word = self.invented()
            return de.Noun(self.rng.choice("mfn"), word, word + "s", word, word + "s")
        if (
            kind in de.COMPOUNDS
            and self.chance(0.1)
            and drawn.plural
            and (kind != "person" or drawn.singular in de.COMPOUNDED)
        ):
            german, english = self.rng.choice(de.COMPOUNDS[kind])
            if not drawn.singular.startswith(german) and "-" not in drawn.singular:
                return replace(
                    drawn, singular=german + drawn.singular[0].lower() + drawn.singular[1:],
                    plural=german + drawn.plural[0].lower() + drawn.plural[1:],
                    english=f"{english} {drawn.english}", english_plural=f"{english} {drawn.english_plural}",
                )  # fmt: skip
        return drawn

    def declined(self, noun: de.Noun, kind: str, case: str, det: str, plural: bool | None, adjectives: float) -> Phrase:
        at = de.CASES.index(case)
        mass = not noun.plural
        plural = not mass and (kind == "pairs" or (self.chance(0.25) if plural is None else plural))
        plural = noun.gender == "p" or (plural and kind != "plurals")
        det = det or self.rng.choice(("ein", "ein", "ein", "der"))
        gender = "p" if plural else noun.gender
        word, english = noun.form(case, plural), noun.english_plural if plural else noun.english
        stems: list[tuple[str, str, str]] = []
        if self.chance(adjectives):
            known = de.ADJECTIVES.get(de.KIND_OF.get(kind, kind)) or de.ADJECTIVES["thing"]
            stems = self.adjectives(known)
        described = " ".join([*(spoken for _, _, spoken in stems), english])
        if det == "der":
            first, ending, told = de.DEFINITE[gender][at], de.WEAK[gender][at], f"the {described}"
        elif det == "ein" and (plural or mass):
            first, told = de.NOTHING
            if plural and kind != "plurals" and self.chance(0.6):
                first, told = self.number()
            ending, told = de.STRONG[gender][at], f"{told} {described}".strip()
            if first[-1:] == "e":
                first += {"dat": "n", "gen": "r"}.get(case, "")
        else:
            first, ending = det.strip() + de.INDEFINITE[gender][at], de.MIXED[gender][at]
            told = described if kind == "plurals" else de.article(described).replace("an other", "another")
            if det == "kein":
                told = f"no {described}"
            elif det in de.OWNERS:
                told = f"{de.OWNERS[det]} {described}"
        word = " ".join([*(stem + ending for _, stem, _ in stems), word])
        return Phrase(f"{first} {word}".strip(), told, "3p" if plural else "3s", noun.gender)

    def adjectives(self, known: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        one = self.often(known)
        other = self.often(known) if self.chance(0.12) else one
        return [one] if other[2] == one[2] else [one, other]

    def number(self) -> tuple[str, str]:
        kind = self.rng.random()
        if kind < 0.75:
            german, english = self.rng.choice(de.PAIRS["numbers"][:5] if kind < 0.6 else de.PAIRS["numbers"])
            return german, english
        if kind < 0.8:
            digits = str(self.rng.randrange(2, 100))
            return digits, digits
        return self.rng.choice(
            (("einige", "some"), ("mehrere", "several"), ("viele", "many"), ("ein paar", "a few"), ("wenige", "few"))
        )

    def invented(self) -> str:
        return "".join(self.rng.choice(de.SYLLABLES) for _ in range(self.rng.choice((2, 2, 3)))).capitalize()

    def name(self) -> tuple[str, str]:
        """A person's name; half of them are invented."""
        way = self.rng.random()
        if way < 0.3:
            last = self.rng.choice(de.WORDS["phrases"]["last"].split()) if self.chance(0.5) else self.invented()
            return self.rng.choice(((f"Herr {last}", f"Mr. {last}"), (f"Frau {last}", f"Mrs. {last}")))
        first = self.rng.choice(de.WORDS["phrases"]["first"].split()) if way < 0.65 else self.invented()
        if self.chance(0.25):
            first += " " + self.invented()
        return first, first

    def town(self) -> tuple[str, str]:
        word = self.invented()
        return self.rng.choice(de.PHRASES["cities"]) if self.chance(0.6) else (word, word)

    def pronoun(self) -> Phrase:
        key = self.rng.choice(list(de.PRONOUNS))
        german, english, *_ = de.PRONOUNS[key]
        person = {"3m": "3s", "3f": "3s", "Sie": "3p"}.get(key, key)
        return Phrase(german, english, person, "f" if key == "3f" else "m", pronoun=True)

    def subject(self, kind: str, everyday: float = 0.2, rich: bool = True) -> Phrase:
        """A subject: a pronoun, a name, or a noun phrase with what belongs to it."""
        if kind == "person" and self.chance(everyday):
            if self.chance(0.65):
                return self.pronoun()
            if self.chance(0.08):
                return Phrase(*self.rng.choice((("jemand", "someone"), ("niemand", "no one"))))
            german, english = self.name()
            return Phrase(german, english, "3s", "f" if german.startswith("Frau") else "m")
        det = self.rng.choice(list(de.OWNERS)) if self.chance(0.07) else ""
        found = self.noun_phrase(kind, "nom", det)
        if rich and self.chance(0.07):
            return self.group(kind)
        if rich and self.chance(0.06):
            other = self.noun_phrase(kind, "nom", "ein")
            return Phrase(f"{found.german} und {other.german}", f"{found.english} and {other.english}", "3p")
        return self.described(found, kind) if rich else found

    def group(self, kind: str) -> Phrase:
        many = self.noun_phrase(kind, "dat", "ein", plural=True)
        adjective, spoken = self.rng.choice([("", ""), ("große ", "large "), ("kleine ", "small ")])
        return Phrase(f"eine {adjective}Gruppe von {many.german}", f"a {spoken}group of {many.english}", "3s", "f")

    def worn(self) -> tuple[str, str]:
        """in einem roten Hemd, mit einem Hut."""
        kind = self.rng.choice(("clothes", "clothes", "accessory", "plurals", "pairs", "hair"))
        if kind == "hair":
            stem, spoken = self.rng.choice(de.HAIR)
            return f"mit {stem}en Haaren", f"with {spoken} hair"
        if self.chance(0.05):
            stem, spoken = self.rng.choice(de.COLOURS)
            return f"in {stem.capitalize()}", f"in {spoken}"
        one = self.noun_phrase(kind, "dat", "ein", plural=kind == "pairs", adjectives=0.7)
        german, english = one.german, one.english
        if kind == "clothes" and self.chance(0.2):
            other = self.noun_phrase(self.rng.choice(("plurals", "clothes", "accessory")), "dat", "ein", False, 0.7)
            german, english = f"{german} und {other.german}", f"{english} and {other.english}"
        with_ = kind == "accessory" or "rille" in german
        return f"{'mit' if with_ else 'in'} {german}", f"{'with' if with_ else 'in'} {english}"

    def described(self, found: Phrase, kind: str) -> Phrase:
        """A noun phrase with what is worn, a companion, a place, a genitive or a relative clause."""
        way, german, english = self.rng.random(), found.german, found.english
        if kind == "person" and way < 0.22:
            added = self.worn()
        elif way < 0.28:
            other = self.noun_phrase(self.rng.choice(("animal", "thing", "person", "accessory")), "dat", "ein")
            added = f"mit {other.german}", f"with {other.english}"
            if kind == "animal":
                carried = self.noun_phrase("thing", "dat", "ein", plural=False)
                added = f"mit {carried.german} im Maul", f"with {carried.english} in its mouth"
        elif way < 0.33:
            added = self.where()
        elif way < 0.36:
            owner = self.noun_phrase("person", "gen")
            added = owner.german, f"of {owner.english}"
            if owner.german.split()[0] in {n for n, _ in de.PAIRS["numbers"]} or owner.german[0].isupper():
                return found
        elif way < 0.47 and kind == "person":
            return self.relative(found, kind, worn=True)
        elif way < 0.58:
            return self.relative(found, kind)
        elif way < 0.6 and kind == "person":
            german_name, name = self.name()
            added = f"namens {german_name}", f"named {name}"
        elif way < 0.63 and kind == "person":
            missing = self.often([n for k in ("clothes", "accessory") for n in de.NOUNS[k] if n.plural])
            added = f"ohne {missing.singular}", f"without {de.article(missing.english)}"
        elif way < 0.65 and kind == "person":
            role = self.noun("person")
            added = f"als {role.singular} verkleidet", f"dressed as {de.article(role.english)}"
        elif way < 0.8 and kind == "thing":
            added = self.rng.choice(de.MADE_OF)
        else:
            return found
        return replace(found, german=f"{german} {added[0]}", english=f"{english} {added[1]}")

    def relative(self, found: Phrase, kind: str, worn: bool = False) -> Phrase:
        """A man wearing a hat; the man who is reading: ein Mann, der einen Hut trägt,"""
        clause = self.clause(kind, found, short=True)
        if worn:
            what = self.rng.choice(("clothes", "accessory", "plurals", "pairs"))
            verb = next(v for v in de.VERBS_OF[what] if v.english.base == "wear")
            thing = self.noun_phrase(what, "acc", "ein", adjectives=0.7, plural=what == "pairs")
            clause = Clause(found, verb, thing.german, thing.english)
        which = de.RELATIVE["p" if found.person == "3p" else found.gender][0]
        if found.english.startswith("the ") and not worn:
            told = f"who {self.progressive(clause)}" if kind == "person" else f"that {self.progressive(clause)}"
        elif clause.verb.english.stative:
            told = f"{'who' if kind == 'person' else 'that'} {self.progressive(clause)}"
        else:
            told = clause.verb.english.ing
        return replace(
            found,
            german=f"{found.german}, {which} {self.last(clause)},",
            english=f"{found.english} {told} {clause.tail}",
        )

    def where(self) -> tuple[str, str]:
        """Where something is."""
        way = self.rng.random()
        if way < 0.2:
            return self.rng.choice(de.PHRASES["place"])
        if way < 0.7:
            noun = self.noun("place")
            preposition, spoken = noun.preposition if noun.preposition[0] else ("in", "in")
            place = self.declined(
                noun, "place", "dat", "der" if not noun.plural else self.rng.choice(("ein", "der")), False, 0.25
            )
            return de.contracted(f"{preposition} {place.german}"), f"{spoken} {place.english}"
        if way < 0.76:
            german, english = self.town()
            return f"in {german}", f"in {english}"
        if way < 0.86:
            seat = self.noun_phrase("seat", "dat", plural=False, adjectives=0.3)
            return f"auf {seat.german}", f"on {seat.english}"
        if way < 0.88:
            many = self.noun_phrase(self.rng.choice(("building", "person")), "dat", "ein", plural=True, adjectives=0.3)
            return f"zwischen {many.german}", f"between {many.english}"
        preposition, spoken = self.rng.choice(de.RELATIONS)
        near = self.noun_phrase(
            self.rng.choice(("building", "building", "vehicle", "person", "seat", "animal")), "dat", plural=False
        )
        return de.contracted(f"{preposition} {near.german}"), f"{spoken} {near.english}"

    def direction(self) -> tuple[str, str]:
        way = self.rng.random()
        if way < 0.3:
            return self.rng.choice(de.PHRASES["way"])
        if way < 0.36:
            german, english = self.town()
            return f"nach {german}", f"to {english}"
        preposition, case, spoken = self.rng.choice(de.DIRECTIONS)
        kind = self.rng.choice(("place", "place", "building"))
        noun = self.noun(kind)
        if preposition in ("in", "auf") and kind == "place":
            preposition = noun.preposition[0] if noun.preposition[0] in ("in", "auf") else "zu"
            case, spoken = ("dat", "to") if preposition == "zu" else ("acc", "into" if preposition == "in" else "onto")
        elif preposition in ("in", "auf"):
            preposition, case, spoken = "zu", "dat", "to"
        det = "der" if not noun.plural else self.rng.choice(("ein", "der"))
        place = self.declined(noun, kind, case, det, False, 0.25)
        return de.contracted(f"{preposition} {place.german}"), f"{spoken} {place.english}"

    def when(self, kind: str) -> tuple[str, str]:
        if kind != "past" and kind != "future" and self.chance(0.2):
            hour, spoken = self.rng.choice(de.PAIRS["numbers"][:11])
            return f"um {hour} Uhr", f"at {spoken} o'clock"
        if self.chance(0.15):
            day, spoken = self.rng.choice(de.PAIRS["days"] + de.PAIRS["months"])
            month = day in dict(de.PAIRS["months"])
            return f"{'im' if month else 'am'} {day}", f"{'in' if month else 'on'} {spoken}"
        return self.rng.choice(de.PHRASES[kind])

    # --- clauses -----------------------------------------------------------------------------------------------------

    def clause(self, kind: str, who: Phrase | None = None, short: bool = False) -> Clause:
        """Somebody who does something."""
        who = who or self.subject(kind)
        way = self.rng.random()
        manner = self.rng.choice(de.PHRASES["manner"]) if self.chance(0.06) else de.NOTHING
        where = self.where() if self.chance(0.25 if short else 0.45) else de.NOTHING
        if way < (0.55 if kind == "person" else 0.12):
            return self.transitive(kind, who, manner, where)
        if way < 0.58 and kind == "person":
            verb = self.rng.choice(de.INTRANSITIVE["give"])
            to, what = self.noun_phrase("person", "dat", plural=False), self.noun_phrase("thing", "acc")
            spoken = (
                f"{what.english} to {to.english}"
                if verb.english.base not in ("buy",)
                else f"{what.english} for {to.english}"
            )
            return Clause(who, verb, f"{to.german} {what.german}", spoken)
        if way < 0.74:
            where = self.where()
            verb = self.rng.choice(de.INTRANSITIVE["rest"][:5] if self.chance(0.7) else de.INTRANSITIVE["rest"])
        elif way < 0.87:
            where = self.direction() if self.chance(0.7) else self.where()
            verb = self.rng.choice(de.INTRANSITIVE["move"][:8] if self.chance(0.5) else de.INTRANSITIVE["move"])
        else:
            verb = self.rng.choice(de.INTRANSITIVE["plain" if kind == "person" else "beast"])
        middle = f"{manner[0]} {where[0]}"
        return Clause(who, verb, middle, f"{manner[1]} {where[1]}", where)

    def transitive(self, kind: str, who: Phrase, manner: tuple[str, str], where: tuple[str, str]) -> Clause:
        what = self.rng.choice(de.VERB_KINDS) if kind == "person" else "animal"
        verbs = de.VERBS_OF[what]
        if kind != "person":
            verbs = [
                v for v in verbs if v.infinitive in ("jagen", "beobachten", "sehen", "spielen", "folgen", "fangen")
            ]
        verb = self.rng.choice(verbs)
        if what in ("person", "animal") and self.chance(0.12):
            key = self.rng.choice(list(de.PRONOUNS))
            _, _, acc, dat, spoken = de.PRONOUNS[key]
            thing = Phrase(acc if verb.case == "acc" else dat, spoken if spoken != who.english else "him")
            if thing.english == "him":
                thing = Phrase("ihn" if verb.case == "acc" else "ihm", "him")
        elif what in ("thing", "food", "reading") and self.chance(0.03) and verb.case == "acc":
            thing = Phrase("etwas", "something")
        elif what == "person" and self.chance(0.1):
            german, english = self.name()
            thing = Phrase(german.replace("Herr ", "Herrn "), english)
        elif what == "drink" and self.chance(0.5) and verb.case == "acc":
            (measure, cup), drink = self.rng.choice(de.PAIRS["measures"]), self.rng.choice(de.NOUNS["drink"])
            one = "einen" if measure == "Becher" else "ein" if measure == "Glas" else "eine"
            thing = Phrase(f"{one} {measure} {drink.singular}", f"a {cup} of {drink.english}")
        elif what in ("game", "instrument") and verb.english.base in ("play", "learn") and verb.case == "acc":
            played = self.rng.choice(de.NOUNS[what])
            thing = Phrase(played.singular, played.english if what == "game" else f"the {played.english}")
        else:
            det = self.rng.choice(list(de.OWNERS)) if self.chance(0.5 if what == "body" else 0.08) else ""
            det = "der" if what in ("body", "place") and not det else det
            thing = self.noun_phrase(what, verb.case, det)
            if self.chance(0.1) and what in ("person", "animal", "thing"):
                thing = self.described(thing, what) if "," not in thing.german else thing
        if verb.english.base == "drive" and thing.english.endswith(de.RIDDEN):
            verb = replace(verb, english=de.EnglishVerb("ride"))
        german = de.contracted(f"{verb.preposition} {thing.german}") if verb.preposition else thing.german
        if self.chance(0.03) and "," not in german:
            other = self.noun_phrase("person", "acc")
            thing = replace(thing, english=f"{thing.english} for {other.english}")
            german = f"{german} für {other.german}"
        middle = f"{manner[0]} {german} {where[0]}"
        if where[0] and self.chance(0.4):
            middle = f"{where[0]} {manner[0]} {german}"
        return Clause(who, verb, middle, f"{thing.english} {manner[1]} {where[1]}", where)

    def last(self, clause: Clause) -> str:
        """What follows the subject where the verb stands last."""
        verb = clause.verb
        return f"{clause.reflexive}{clause.middle} {verb.prefix}{verb.present(clause.who.person)}"

    def progressive(self, clause: Clause) -> str:
        person, verb = clause.who.person, clause.verb.english
        return verb.present(person) if verb.stative else f"{de.be(person)} {verb.ing}"

    def ordered(self, clause: Clause, finite: str, end: str, when: tuple[str, str] = de.NOTHING) -> str:
        """A main clause: subject, time or place, then the finite verb, at its end what belongs to the verb."""
        middle = f"{when[0]} {clause.middle}"
        if when[0] and self.chance(0.4):
            return f"{when[0]} {finite} {clause.who.german} {clause.reflexive}{clause.middle} {end}"
        if clause.first[0] and not when[0] and self.chance(0.15):
            middle = clause.middle.replace(clause.first[0], "", 1)
            return f"{clause.first[0]} {finite} {clause.who.german} {clause.reflexive}{middle} {end}"
        return f"{clause.who.german} {finite} {clause.reflexive}{middle} {end}"
