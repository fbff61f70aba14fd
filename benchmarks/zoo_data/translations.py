"""German and English sentences in both directions: data for a translator that may ship.

    python benchmarks/zoo_data/translations.py --texts TEXTS --out DATA [--n 900000]      (then recipe translations)

Writes translations/train.tsv.gz, validation.tsv.gz and test.tsv.gz (source, target; the model sees which language it
reads). They are made from

- the sentences of our own grammar (captions.py), with the words of a German-English word list in their slots;
- everyday sentences from Tatoeba (TEXTS/tatoeba/eng-deu.tsv.gz, CC BY 2.0 FR), some with other names, two at a time,
  or without their full stops;
- the word list itself (TEXTS/wiktionary/deu-eng.txt.gz, from Wiktionary, CC BY-SA), alone and with articles.

Validation and test are Tatoeba's alone: no English sentence of theirs, nor its German, is in the other parts.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from dataclasses import replace
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import german as de
from caption_phrases import Clause, Phrase
from captions import Grammar

SHARD = 10_000  # sentences drawn at once
HELD_OUT = 1000  # of Tatoeba's English sentences, in each of validation and test
EPOCHS_OF_TATOEBA, EPOCHS_OF_WORDS = 6, 1
ADJECTIVE = re.compile(r".*(ig|lich|isch|bar|sam|los|haft|voll|ell|iv|ant|ent|reich|frei|förmig|gelb|rot|blau)$")
SEPARABLE = ("ab an auf aus bei ein fest fort heim her hin hoch los mit nach nieder vor weg weiter zu zurück zusammen "
             "herunter hinunter herauf hinauf heraus hinaus herein hinein vorbei").split()  # fmt: skip


class Words(NamedTuple):
    """What the word list has."""

    nouns: dict[str, list[de.Noun]]  # by kind
    adjectives: list[tuple[str, str, str]]
    verbs: list[de.Verb]
    entries: list[tuple[str, str, str]]  # German, English, gender or ""


def clean(english: str) -> list[str]:
    """The translations of an entry without their explanations, each once."""
    english = re.sub(r"<[^>]*>|\{[^}]*\}", " ", english)
    while (shorter := re.sub(r"\([^()]*\)", "", english)) != english:
        english = shorter
    parts = [re.sub(r"\s+", " ", part).strip() for part in english.split(",")]
    return list(dict.fromkeys(p for p in parts if re.fullmatch(r"[A-Za-z][A-Za-z' -]{0,28}", p) and p.count(" ") < 3))


def plural_of(word: str, gender: str) -> str:
    """A German noun's plural where a rule gives it, else nothing."""
    if gender == "f":
        if word.endswith("in"):
            return word + "nen"
        if word.endswith(("ung", "heit", "keit", "schaft", "ion", "tät", "ei", "ur", "enz", "anz")):
            return word + "en"
        return word + "n" if word.endswith(("e", "el", "er")) else ""
    if word.endswith(("er", "el", "en", "chen", "lein")):
        return word
    if word.endswith(("o", "a", "i", "y")):
        return word + "s"
    return word + "e" if word.endswith(("ling", "ment", "eur", "är", "ier", "at", "or")) else ""


@cache
def read_words(path: Path) -> Words:
    """Nouns, adjectives, verbs and all other entries that can be used without looking at them."""
    kinds: dict[str, str] = {}  # by the English noun
    for kind, nouns in de.NOUNS.items():
        for noun in nouns:
            kinds.setdefault(noun.english.split()[-1], kind)
    words = Words({}, [], [], [])
    known = {noun.singular for nouns in de.NOUNS.values() for noun in nouns}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            match = re.match(r":([^:\]}\[{]+)[\]}]*:(?:\(\{?([mfn])\}?[^)]*\) )?(.+)$", line.strip())
            if match is None:
                continue
            german, gender, english = match[1].strip(), match[2] or "", clean(match[3])
            if not english or len(german) > 30 or not re.fullmatch(r"[A-Za-zÄÖÜäöüß' -]+", german):
                continue
            words.entries.append((german, english[0], gender))
            one_word = re.fullmatch(r"[A-Za-zÄÖÜäöüß-]{3,}", german) is not None
            if gender and one_word and german[0].isupper() and german not in known and english[0][0].islower():
                kind = kinds.get(english[0].split()[-1], "thing")
                kind = kind if kind not in ("pairs", "plurals", "body", "game", "idea") else "thing"
                plural = plural_of(german, gender)
                noun = de.Noun(gender, german, plural, english[0], de.plural_of(english[0]))
                words.nouns.setdefault(kind if plural else "mass", []).append(noun)
            elif one_word and german.islower() and re.search(r"\(to |\(\(?transitive|\(intransitive", match[3], re.I):
                if verb := parse_verb(german, english[0]):
                    words.verbs.append(verb)
            elif one_word and german.islower() and not gender and ADJECTIVE.match(german):
                words.adjectives.append((german, german, english[0]))
    return words


def parse_verb(german: str, english: str) -> de.Verb | None:
    """A verb by the rules for regular ones, or by a strong one that it ends with."""
    if not german.endswith(("en", "eln", "ern")) or english.startswith(("be ", "to ")) or english == "be":
        return None
    prefix = max((p for p in SEPARABLE if german.startswith(p) and len(german) > len(p) + 4), key=len, default="")
    if german.startswith(de.INSEPARABLE) and not prefix:
        return de.verb(german, english.replace(" ", "_"))
    return de.verb(f"{prefix}|{german[len(prefix) :]}" if prefix else german, english.replace(" ", "_"))


class WideGrammar(Grammar):
    """The grammar with the word list's words in a part of its slots."""

    def __init__(self, rng: random.Random, words: Words) -> None:
        super().__init__(rng)
        self.words = words

    def noun(self, kind: str) -> de.Noun:
        if self.chance(0.25):
            if nouns := self.words.nouns.get(kind):
                return self.rng.choice(nouns)
        return super().noun(kind)

    def noun_phrase(
        self, kind: str, case: str, det: str = "", plural: bool | None = None, adjectives: float = 0.45
    ) -> Phrase:
        if self.chance(0.12) and kind in ("thing", "food", "accessory", "place", "building"):
            noun = replace(self.rng.choice(self.words.nouns["mass"]), plural="?")  # whose plural is not known
            return self.declined(noun, kind, case, det, False, adjectives)
        return super().noun_phrase(kind, case, det, plural, adjectives)

    def adjectives(self, known: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        if self.chance(0.15):
            return [self.rng.choice(self.words.adjectives)]
        return super().adjectives(known)

    def clause(self, kind: str, who: Phrase | None = None, short: bool = False) -> Clause:
        clause = super().clause(kind, who, short)
        verb = clause.verb
        if self.chance(0.15) and not verb.reflexive and not verb.preposition and verb.case == "acc":
            return replace(clause, verb=self.rng.choice(self.words.verbs))
        return clause


def grammar_sentences(job: tuple[int, int, Path]) -> list[tuple[str, str]]:
    """Sentences of one shard: its number, how many are drawn, the word list."""
    shard, n, path = job
    grammar = WideGrammar(random.Random(f"translations {shard}"), read_words(path))
    return [grammar.sentence() for _ in range(n)]


class Everyday:
    """Tatoeba's sentences, each draw a little different."""

    def __init__(self, pairs: list[tuple[str, str]], rng: random.Random) -> None:
        self.pairs, self.rng = pairs, rng
        self.names = Grammar(rng)

    def draw(self, german: str, english: str) -> tuple[str, str]:
        if self.rng.random() < 0.6:
            german, english = self.renamed(german, english)
        if self.rng.random() < 0.12:
            other = self.renamed(*self.rng.choice(self.pairs))
            german, english = f"{german} {other[0]}", f"{english} {other[1]}"
        return german, english

    def renamed(self, german: str, english: str) -> tuple[str, str]:
        """With other names in place of Tom and Mary, so that names are copied."""
        for ours, theirs in ("Tom", "Tom"), ("Maria", "Mary"), ("Johannes", "John"):
            if re.search(rf"\b{ours}\b", german) and re.search(rf"\b{theirs}\b", english):
                name, same = self.names.name()
                if not name.startswith(("Herr ", "Frau ")):
                    german = re.sub(rf"\b{ours}(s?)\b", rf"{name}\1", german)
                    english = re.sub(rf"\b{theirs}\b", same, english)
        return german, english


def worn(german: str, english: str, rng: random.Random) -> tuple[str, str]:
    """As people type: now and then without the full stop, or in small letters."""
    way = rng.random()
    if way < 0.15 and german[-1] in ".!" and english[-1] in ".!":
        german, english = german[:-1], english[:-1]
    elif way < 0.2:
        german, english = german.rstrip(".!"), english.rstrip(".!")
        german = german[0].lower() + german[1:]
        if not english.startswith(("I ", "I'")):
            english = english[0].lower() + english[1:]
    return german, english


def word_pairs(words: Words, rng: random.Random) -> list[tuple[str, str]]:
    rows = []
    for german, english, gender in words.entries:
        way = rng.random()
        if gender and german[0].isupper() and english[0].islower() and " " not in german and way < 0.5:
            at = {"m": "der", "f": "die", "n": "das"}[gender]
            some = {"m": "ein", "f": "eine", "n": "ein"}[gender]
            if way < 0.3:
                german, english = f"{at} {german}", f"the {english}"
            else:
                german, english = f"{some} {german}", de.article(english)
        rows.append((german, english))
    return rows


def directed(rows: list[tuple[str, str]], rng: random.Random, both: float) -> list[str]:
    """Lines of source and target: German to English, and so large a share the other way."""
    lines = []
    for german, english in rows:
        german, english = worn(german, english, rng)
        lines.append(f"{german}\t{english}\n")
        if rng.random() < both:
            lines.append(f"{english}\t{german}\n")
    return lines


def split_tatoeba(path: Path, rng: random.Random) -> dict[str, list[tuple[str, str]]]:
    """Pairs (German, English) for training, validation and test; a held-out sentence is in no other part."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        pairs = [(g, e) for e, g in (line.rstrip("\n").split("\t")[:2] for line in file)]
    english = sorted({e for _, e in pairs})
    rng.shuffle(english)
    parts = {"test": set(english[:HELD_OUT]), "validation": set(english[HELD_OUT : 2 * HELD_OUT])}
    held = {name: [pair for pair in pairs if pair[1] in chosen] for name, chosen in parts.items()}
    german = {g for rows in held.values() for g, _ in rows}
    english_held = parts["test"] | parts["validation"]
    held["train"] = [pair for pair in pairs if pair[1] not in english_held and pair[0] not in german]
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=900_000, help="sentences of the grammar")
    options = parser.parse_args()
    folder, rng = options.out / "translations", random.Random("translations")
    folder.mkdir(parents=True, exist_ok=True)
    path = options.texts / "wiktionary" / "deu-eng.txt.gz"
    words = read_words(path)
    tatoeba = split_tatoeba(options.texts / "tatoeba" / "eng-deu.tsv.gz", rng)

    def write(name: str, rows: list[str]) -> None:
        (folder / f"{name}.tsv.gz").write_bytes(gzip.compress("".join(rows).encode(), 6, mtime=0))

    for part in ("validation", "test"):
        unique = {e: g for g, e in tatoeba[part]}  # an English sentence once
        write(part, [f"{g}\t{e}\n" for e, g in unique.items()])
    jobs = [(i, SHARD, path) for i in range(options.n // SHARD)]
    with Pool() as pool:
        lines = [line for shard in pool.imap(grammar_sentences, jobs) for line in directed(shard, rng, 0.6)]
    everyday = Everyday(tatoeba["train"], rng)
    for _ in range(EPOCHS_OF_TATOEBA):
        lines += directed([everyday.draw(*pair) for pair in tatoeba["train"]], rng, 1.0)
    for _ in range(EPOCHS_OF_WORDS):
        lines += directed(word_pairs(words, rng), rng, 1.0)
    rng.shuffle(lines)
    write("train", lines)
    nouns = sum(map(len, words.nouns.values()))
    print(f"{nouns} nouns, {len(words.adjectives)} adjectives, {len(words.verbs)} verbs, {len(words.entries)} entries")
    print(", ".join(f"{name}: {len(rows)} pairs of Tatoeba" for name, rows in tatoeba.items()))
    print(f"train: {len(lines)} rows")


if __name__ == "__main__":
    main()
