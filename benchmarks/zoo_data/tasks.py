"""Four tasks as text to text, for the recipe t5-tasks (Raffel et al. 2020, section 2.4): what a model shall do is said
by the begin of its source.

    python benchmarks/zoo_data/tasks.py --texts ../shared/data --reviews DATA/praise --out DATA   (HEEDFUL_DATA=DATA)

    translate German to English: Ein Hund rennt.           A dog is running.       the grammar of captions.py
    sentiment: a dull film                                 negative                reviews.py; SST-2 to test
    question: Who ran?  context: A dog ran home.           A dog                   the grammar, and the SQuAD sample
    correct: Teh king wass old.                            The king was old.       sentences of old books, with mistakes

Writes tasks/train.tsv.gz, validation.tsv.gz and test.tsv.gz. Each part of a task comes from the same part of its data;
passages are cut to the words around the answer. Small tasks are repeated in training, by REPEATED. The questions about
sentences of the grammar are in test-grammar.tsv.gz, those in test.tsv.gz are SQuAD's.

For the recipes spelling and byt5-spelling also tasks/spelling-train.tsv.gz and -validation.tsv.gz, with any share of
words misspelt up to 1/2, and for benchmarks/spelling.py spelling-test-0, -6 and -2.tsv.gz: the same sentences with no
mistake, with one word of six and with every second word misspelt.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from caption_phrases import Phrase
from captions import Grammar, sentences, tidy
from german import be

NOBODY = Phrase("wer", "who")
PARTS = ("test", "validation", "train")  # what is measured on is no part of the training data
REPEATED = {"question": 4}  # in training
N_SENTIMENTS = 60_000  # at most
N_SENTENCES = {"train": 90_000, "validation": 500, "test": 1000}  # to correct
N_GRAMMAR = {"train": 110_000, "validation": 1000, "test": 1000}  # to translate; half as many to ask about
SHARD = 1000
N_WORDS = 60  # of a passage around its answer
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Pair = tuple[str, str]


def translations(part: str) -> Iterator[Pair]:
    for i in range(N_GRAMMAR[part] // SHARD):
        for german, english in sentences((f"tasks {part}", i, SHARD)):
            yield f"translate German to English: {german}", english


def grammar_questions(part: str, rng: random.Random) -> Iterator[Pair]:
    """Who does what, or where, asked of two or three sentences of the grammar."""
    grammar = Grammar(rng)
    for _ in range(N_GRAMMAR[part] // 2):
        clauses = [
            grammar.clause("person", grammar.subject("person", 0.3, rich=False)) for _ in range(rng.choice((2, 2, 3)))
        ]
        if len({clause.who.english for clause in clauses}) < len(clauses):
            continue
        told = [f"{c.who.english} {grammar.progressive(c)} {c.tail}" for c in clauses]
        passage = " ".join(tidy(sentence) for sentence in told)
        asked = rng.choice(clauses)
        who, what = asked.who.english, " ".join(f"{asked.verb.english.ing} {asked.tail}".split())
        ways = [(f"Who {grammar.progressive(replace(asked, who=NOBODY))} {asked.tail}?", who)]
        if not asked.verb.english.stative:
            ways.append((f"What {be(asked.who.person)} {who} doing?", what))
            if asked.first[1] and what.endswith(asked.first[1]):
                rest = what.removesuffix(asked.first[1])
                ways += [(f"Where {be(asked.who.person)} {who} {rest}?", asked.first[1])] * 2
        question, answer = rng.choice(ways)
        yield f"question: {tidy(question)} context: {passage}", answer


def sentiments(texts: Path, reviews: Path, part: str) -> Iterator[Pair]:
    path = texts / "sst2/test.tsv" if part == "test" else reviews / f"{part}.tsv"
    for line in path.read_text(encoding="utf-8").splitlines()[:N_SENTIMENTS]:
        text, label = line.split("\t")
        yield f"sentiment: {text}", "positive" if label == "1" else "negative"


def questions(texts: Path, part: str, rng: random.Random) -> Iterator[Pair]:
    name = {"train": "train", "validation": "valid", "test": "test"}[part]
    for passage in json.loads((texts / f"squad/squad_ctx_{name}.json").read_text(encoding="utf-8")):
        words = passage["context"].split()
        for asked in passage["qas"]:
            answer = asked["answer"]
            answer = answer if isinstance(answer, str) else answer[0]
            begin = passage["context"].find(answer)
            if begin < 0 or not answer:
                continue
            at = len(passage["context"][:begin].split())
            low = max(0, at - rng.randrange(N_WORDS * 3 // 4))
            around = " ".join(words[low : low + N_WORDS])
            yield f"question: {asked['question']} context: {around}", answer


def book_sentences(texts: Path, part: str, rng: random.Random) -> list[str]:
    """Sentences of the held-out books for validation and test, of the others for training."""
    with lzma.open(texts / f"books/{'train' if part == 'train' else 'val'}.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read(60_000_000 if part == "train" else 4_000_000)
    if part != "train":  # the two halves of what is held out
        text = text[:2_000_000] if part == "validation" else text[2_000_000:]
    found = [" ".join(s.split()) for s in re.findall(r"(?<=[.!?]\s)[A-Z][^.!?\f\"_]{25,110}[.!?](?=\s)", text)]
    return rng.sample(sorted(set(found)), N_SENTENCES[part])


def misspelt(sentence: str, rng: random.Random, share: float = 1 / 6) -> str:
    """A sentence in which some words have a slip of the pen: a letter left out, doubled, swapped or another."""
    return " ".join(slip(word, rng) if len(word) > 2 and rng.random() < share else word for word in sentence.split())


def slip(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) - 1)
    if not word[at : at + 2].isalpha():
        return word
    kind = rng.randrange(5)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[: at + 1] + word[at:]
    if kind == 2:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    other = rng.choice(LETTERS)
    return word[: at + 1] + other + word[at + (2 if kind == 3 else 1) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="the folder with squad and books, and sst2's test")
    parser.add_argument("--reviews", type=Path, required=True, help="the folder that reviews.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Pair]] = {}
    for part in PARTS:
        rng = random.Random(part)
        book = book_sentences(options.texts, part, rng)
        tasks = {
            "translate": list(dict(translations(part)).items()),
            "sentiment": list(sentiments(options.texts, options.reviews, part)),
            "question": list(questions(options.texts, part, rng)),
            "grammar questions": list(grammar_questions(part, rng)),
            "correct": [(f"correct: {misspelt(s, rng)}", s) for s in book],
        }
        print(part, {name: len(pairs) for name, pairs in tasks.items()})
        known = {source for name in PARTS for source, _ in written.get(name, ())}
        rows = [pair for name, pairs in tasks.items() for pair in pairs for _ in range(_times(name, part))]
        written[part] = [pair for pair in rows if pair[0] not in known]
        write(folder / f"{part}.tsv.gz", written[part])
        if part == "test":
            write(folder / "test-grammar.tsv.gz", tasks["grammar questions"])
            write(folder / "test.tsv.gz", [p for name, ps in tasks.items() for p in ps if name != "grammar questions"])
            for share in (0, 6, 2):
                pairs = [(misspelt(s, rng, 1 / share if share else 0), s) for s in book]
                write(folder / f"spelling-test-{share}.tsv.gz", pairs)
        else:
            write(folder / f"spelling-{part}.tsv.gz", [(misspelt(s, rng, rng.random() / 2), s) for s in book])


def write(path: Path, pairs: list[Pair]) -> None:
    path.write_bytes(gzip.compress("".join(f"{s}\t{t}\n" for s, t in pairs).encode(), mtime=0))


def _times(name: str, part: str) -> int:
    return REPEATED.get(name, 1) if part == "train" else 1


if __name__ == "__main__":
    main()
