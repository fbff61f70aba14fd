"""German words with their English ones, and their forms: nouns and adjectives declined, verbs conjugated.

The words are in captions.toml. Regular forms follow from rules; strong verbs and irregular English words are listed.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

WORDS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "captions.toml").read_text(encoding="utf-8"))
CASES = ("nom", "acc", "dat", "gen")
DEFINITE = {
    "m": ("der", "den", "dem", "des"),
    "f": ("die", "die", "der", "der"),
    "n": ("das", "das", "dem", "des"),
    "p": ("die", "die", "den", "der"),
}
INDEFINITE = {
    "m": ("", "en", "em", "es"),
    "f": ("e", "e", "er", "er"),
    "n": ("", "", "em", "es"),
    "p": ("e", "e", "en", "er"),
}  # of ein, kein, sein
MIXED = {"m": ("er", "en", "en", "en"), "f": ("e", "e", "en", "en"), "n": ("es", "es", "en", "en"), "p": ("en",) * 4}
WEAK = {"m": ("e", "en", "en", "en"), "f": ("e", "e", "en", "en"), "n": ("e", "e", "en", "en"), "p": ("en",) * 4}
STRONG = {
    "m": ("er", "en", "em", "en"),
    "f": ("e", "e", "er", "er"),
    "n": ("es", "es", "em", "en"),
    "p": ("e", "e", "en", "er"),
}
RELATIVE = {k: v if k != "p" else ("die", "die", "denen", "deren") for k, v in DEFINITE.items()}
SEIN = {"1s": "bin", "2s": "bist", "3s": "ist", "1p": "sind", "2p": "seid", "3p": "sind"}
WAR = {"1s": "war", "2s": "warst", "3s": "war", "1p": "waren", "2p": "wart", "3p": "waren"}
HABEN = {"1s": "habe", "2s": "hast", "3s": "hat", "1p": "haben", "2p": "habt", "3p": "haben"}
WERDEN = {"1s": "werde", "2s": "wirst", "3s": "wird", "1p": "werden", "2p": "werdet", "3p": "werden"}
REFLEXIVE = {"1s": "mich", "2s": "dich", "3s": "sich", "1p": "uns", "2p": "euch", "3p": "sich"}
IRREGULAR = {
    "haben": HABEN,
    "wissen": {"1s": "weiß", "2s": "weißt"},
    "mögen": {"1s": "mag", "2s": "magst"},
    "knien": {"2p": "kniet"},
}

OWNERS = {"mein": "my", "dein": "your", "sein": "his", "ihr": "her", "unser": "our", "Ihr": "your", "ihr ": "their"}
PRONOUNS = {
    "1s": ("ich", "I", "mich", "mir", "me"), "2s": ("du", "you", "dich", "dir", "you"),
    "3m": ("er", "he", "ihn", "ihm", "him"), "3f": ("sie", "she", "sie", "ihr", "her"),
    "1p": ("wir", "we", "uns", "uns", "us"), "2p": ("ihr", "you", "euch", "euch", "you"),
    "3p": ("sie", "they", "sie", "ihnen", "them"), "Sie": ("Sie", "you", "Sie", "Ihnen", "you"),
}  # fmt: skip
CONTRACTED = {"in dem": "im", "an dem": "am", "in das": "ins", "von dem": "vom", "zu dem": "zum", "zu der": "zur",
              "bei dem": "beim", "an das": "ans"}  # fmt: skip
RELATIONS = [
    ("vor", "in front of"), ("neben", "next to"), ("hinter", "behind"), ("unter", "under"), ("an", "by"),
    ("bei", "near"), ("gegenüber von", "across from"), ("über", "above"), ("in der Nähe von", "near"),
]  # fmt: skip
DIRECTIONS = [
    ("durch", "acc", "through"), ("über", "acc", "across"), ("um", "acc", "around"), ("zu", "dat", "to"),
    ("auf", "acc", "onto"), ("in", "acc", "into"), ("gegen", "acc", "against"), ("vor", "dat", "in front of"),
]  # fmt: skip


def entries(text: str) -> list[list[str]]:
    return [entry.split() for entry in text.split(";") if entry.strip()]


PLURALS = {a.replace("_", " "): b.replace("_", " ") for a, b in entries(WORDS["english"]["plurals"])}
PASTS = {base: (past, participle) for base, past, participle in entries(WORDS["english"]["verbs"])}
DOUBLED = set(WORDS["english"]["double"].split())
STATIVE = set(WORDS["english"]["stative"].split())
FORMS = {base: forms for base, *forms in entries(WORDS["strong"]["forms"])}
INSEPARABLE = tuple(WORDS["strong"]["inseparable"].split())
PAIRED = ("pants", "jeans", "shorts", "trunks", "glasses", "goggles", "overalls")  # one of them is many in English
SEPARABLE = set(WORDS["strong"]["insep_not"].split())


# --- English ---------------------------------------------------------------------------------------------------------


def with_s(word: str) -> str:
    """walks, watches, cries; also of nouns."""
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", word) and word not in ("piano", "photo") else "s")


def plural_of(english: str) -> str:
    *rest, last = english.split()
    return PLURALS.get(english) or " ".join([*rest, PLURALS.get(last) or with_s(last)])


def article(english: str) -> str:
    vowel = english[0] in "aeiouAEIO" and not re.match(r"(uni|use|one|euro|Euro)", english)
    an = vowel or english.startswith("hour")
    return f"{'an' if an else 'a'} {english}"


@dataclass(frozen=True)
class EnglishVerb:
    """An English verb, which may have more words: look at."""

    base: str

    @property
    def head(self) -> str:
        return self.base.split()[0]

    def _of(self, form: str) -> str:
        return " ".join([form, *self.base.split()[1:]])

    @property
    def stative(self) -> bool:
        return self.head in STATIVE

    @property
    def ing(self) -> str:
        head = self.head
        if head in DOUBLED:
            return self._of(head + head[-1] + "ing")
        if head.endswith("ie"):
            return self._of(head[:-2] + "ying")
        drop = head.endswith("e") and not head.endswith(("ee", "oe", "ye")) and head != "be"
        return self._of((head[:-1] if drop else head) + "ing")

    @property
    def past(self) -> str:
        return self._of(PASTS[self.head][0] if self.head in PASTS else self._regular())

    @property
    def participle(self) -> str:
        return self._of(PASTS[self.head][1] if self.head in PASTS else self._regular())

    def _regular(self) -> str:
        head = self.head
        if head in DOUBLED:
            return head + head[-1] + "ed"
        if re.search(r"[^aeiou]y$", head):
            return head[:-1] + "ied"
        return head + ("d" if head.endswith("e") else "ed")

    def present(self, person: str) -> str:
        if self.head == "be":
            return self._of(be(person))
        third = {"have": "has", "do": "does", "go": "goes"}.get(self.head) or with_s(self.head)
        return self._of(third) if person == "3s" else self.base


def be(person: str) -> str:
    return {"1s": "am", "3s": "is"}.get(person, "are")


def was(person: str) -> str:
    return "was" if person in ("1s", "3s") else "were"


# --- German ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    gender: str
    singular: str
    plural: str  # empty where there is none
    english: str
    english_plural: str
    weak: bool = False
    preposition: tuple[str, str] = ("", "")  # of a place: where one is

    def form(self, case: str, plural: bool) -> str:
        if plural:
            word = self.plural
            return word + "n" if case == "dat" and word[-1] not in "ns" else word
        if self.weak and case != "nom" and not (self.singular == "Herz" and case == "acc"):
            return "Herrn" if self.singular == "Herr" else self.plural
        if case == "gen" and self.gender in "mn":
            if self.singular[-1] in "sßxz":
                return self.singular + ("ses" if self.singular.endswith("nis") else "es")
            short = len(re.findall(r"[aeiouäöüy]+", self.singular.lower())) == 1 and self.singular[-1] not in "aeiou"
            return self.singular + ("es" if short else "s")
        return self.singular


def noun(entry: list[str]) -> Noun:
    gender, singular, plural, english, *where = entry
    weak, plural = plural.endswith("!"), plural.rstrip("!")
    full = {"=": singular, "-": ""}.get(plural, singular + plural[1:] if plural[0] == "+" else plural)
    english = english.replace("_", " ")
    german, _, spoken = where[0].partition("=") if where else ("", "", "")
    many = english if gender == "p" or english.endswith(PAIRED) else plural_of(english)
    return Noun(gender, singular, full, english, many, weak, (german, spoken))


@dataclass(frozen=True)
class Verb:
    infinitive: str  # without the prefix
    prefix: str  # of a verb that is cut: an(ziehen), Fahrrad (fahren)
    third: str
    past: str
    participle: str  # with the prefix
    with_sein: bool
    reflexive: bool
    english: EnglishVerb
    preposition: str = ""
    case: str = "acc"

    @property
    def stem(self) -> str:
        return self.infinitive[:-2] if self.infinitive.endswith("en") else self.infinitive[:-1]

    def present(self, person: str) -> str:
        known = IRREGULAR.get(self.infinitive, {}).get(person)
        if known:
            return known
        if person in ("1p", "3p"):
            return self.infinitive
        if person == "3s":
            return self.third
        if person == "1s":
            return self.stem[:-2] + "le" if self.stem.endswith("el") else self.stem + "e"
        if person == "2p":
            return self.stem + ending(self.stem)
        if self.stem[-1] == "t" and not self.third.endswith("tet"):
            return self.third + "st"
        base = self.third[:-1]
        return base + ("t" if base[-1] in "sßzx" else "st")

    def preterite(self, person: str) -> str:
        return self.past + ("n" if self.past[-1] == "e" else "en") if person in ("1p", "3p") else self.past

    @property
    def full(self) -> str:
        return self.prefix + self.infinitive

    @property
    def with_zu(self) -> str:
        if not self.prefix or self.prefix.endswith(" "):
            return f"{self.prefix}zu {self.infinitive}"
        return f"{self.prefix}zu{self.infinitive}"


def ending(stem: str) -> str:
    return "et" if re.search(r"[td]$|(ch|[^aeiouäöülrhmn])[nm]$", stem) else "t"


def verb(german: str, english: str) -> Verb:
    """A verb of the lists: *an|ziehen, sich_freuen, warten:auf+a."""
    german, _, government = german.partition(":")
    preposition, _, case = government.partition("+")
    with_sein, german = german.startswith("*"), german.strip("*@>")
    reflexive = "sich" in german.split("_")
    german = "_".join(part for part in german.split("_") if part != "sich")
    prefix, _, base = german.replace("_", " |").rpartition("|")
    prefix = prefix.replace("|", "")
    if base in FORMS:
        third, past, participle = FORMS[base]
    else:
        third, past, participle = _forms(base)
    parsed = EnglishVerb(english.replace("_", " "))
    return Verb(
        base, prefix, third, past, prefix + participle, with_sein, reflexive, parsed, preposition,
        {"d": "dat"}.get(case, "acc"),
    )  # fmt: skip


def _forms(base: str) -> tuple[str, str, str]:
    stem = base[:-2] if base.endswith("en") else base[:-1]
    before = next((p for p in INSEPARABLE if base.startswith(p) and base not in SEPARABLE), "")
    if before and base[len(before) :] in FORMS:
        third, past, participle = FORMS[base[len(before) :]]
        return before + third, before + past, before + participle.removeprefix("ge")
    t = ending(stem)
    bare = before or base.endswith("ieren")
    return stem + t, f"{stem}{t}e", f"{'' if bare else 'ge'}{stem}{t}"


NOUNS = {kind: [noun(entry) for entry in entries(text)] for kind, text in WORDS["nouns"].items()}
ADJECTIVES = {
    kind: [(g.split("|")[0], g.split("|")[-1], e.replace("_", " ")) for g, e in entries(text)]
    for kind, text in WORDS["adjectives"].items()
}
COMPOUNDS = {kind: [(g, e) for g, e in entries(text)] for kind, text in WORDS["compounds"].items()}
INTRANSITIVE = {
    kind: [verb(entry[0], entry[1]) for entry in entries(WORDS["verbs"][kind])]
    for kind in ("plain", "beast", "rest", "move", "give")
}
TRANSITIVE = [
    (verb(entry[0], entry[1]), kind)
    for name in ("object", "prepositional")
    for entry in entries(WORDS["verbs"][name])
    for kind in entry[2:]
]
VERBS_OF = {kind: [v for v, k in TRANSITIVE if k == kind] for _, kind in TRANSITIVE}
PHRASES = {
    kind: [(g.strip(), e.strip()) for g, _, e in (pair.partition("=") for pair in text.split(";")) if e]
    for kind, text in WORDS["phrases"].items()
}
PAIRS = {kind: [(g, e.replace("_", " ")) for g, e in entries(WORDS["phrases"][kind])]
         for kind in ("days", "months", "numbers", "measures")}  # fmt: skip
KIND_OF = {"stuff": "food", "drink": "food", "seat": "thing", "building": "place", "vehicle": "thing"}  # of adjectives
COMPOUNDED = {
    "Spieler",
    "Spielerin",
    "Fahrer",
    "Lehrer",
    "Trainer",
    "Team",
    "Mannschaft",
    "Fan",
    "Tänzer",
    "Band",
    "Verein",
}
SYLLABLES = (
    "ba be bi bo bra da de dor el en fa fer fin ga gel gor ha hel hin ja jo ka kel kin kra la len lo lu ma mer mi mon "
    "na nel no nu or pa per pi ra rel ri ro sa sel shi si sko sta ta ter ti tor tra u va vel vin wa wen xi ya zan zer "
    "zo chi quo thy"
).split()
RIDDEN = ("cycle", "cycles", "bike", "bikes", "scooter", "scooters", "sled", "sleds", "moped", "mopeds")
MADE_OF = [
    ("aus Holz", "made of wood"), ("aus Metall", "made of metal"), ("aus Glas", "made of glass"),
    ("aus Stein", "made of stone"), ("aus Papier", "made of paper"), ("aus Plastik", "made of plastic"),
]  # fmt: skip
HAIR = [
    ("lang", "long"), ("kurz", "short"), ("blond", "blond"), ("braun", "brown"), ("grau", "gray"),
    ("schwarz", "black"), ("rot", "red"), ("lockig", "curly"),
]  # fmt: skip
COLOURS = [(g, e) for g, _, e in ADJECTIVES["thing"][:11]]
VERB_KINDS = [kind for kind, verbs in VERBS_OF.items() for _ in range(len(verbs) // 8 + 1)]
NOTHING = ("", "")


def contracted(text: str) -> str:
    for long, short in CONTRACTED.items():
        if text.startswith(long + " "):
            return short + text[len(long) :]
    return text
