"""Four tasks as text to text, for the recipe t5-tasks (Raffel et al. 2020, section 2.4): what a model shall do is said
by the begin of its source.

    python benchmarks/zoo_data/tasks.py --texts ../shared/data --out DATA        (then HEEDFUL_DATA=DATA)

    translate German to English: Ein Hund rennt.           A dog is running.       Multi30k
    sentiment: a dull film                                 negative                SST-2
    question: Who ran?  context: A dog ran home.           a dog                   the SQuAD sample
    correct: Teh king wass old.                            The king was old.       sentences of old books, with mistakes

Writes tasks/train.tsv, validation.tsv and test.tsv. Each part of a task comes from the same part of its data; passages
are cut to the sentences around the answer. Small tasks are repeated in training, by REPEATED.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

PARTS = ("train", "validation", "test")
REPEATED = {"translate": 2, "sentiment": 4, "question": 6, "correct": 1}  # in training
N_SENTENCES = {"train": 90_000, "validation": 500, "test": 1000}  # to correct
N_WORDS = 60  # of a passage around its answer
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Pair = tuple[str, str]


def translations(texts: Path, part: str) -> Iterator[Pair]:
    name = {"train": "train", "validation": "val", "test": "test_2016_flickr"}[part]
    both = [gzip.open(texts / f"multi30k/{name}.{code}.gz", "rt", encoding="utf-8") for code in ("de", "en")]
    with both[0] as german, both[1] as english:
        for source, target in zip(german, english, strict=True):
            yield f"translate German to English: {source.strip()}", target.strip()


def sentiments(texts: Path, part: str) -> Iterator[Pair]:
    name = {"train": "train", "validation": "dev", "test": "test"}[part]
    for line in (texts / f"sst2/{name}.tsv").read_text(encoding="utf-8").splitlines():
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


def corrections(texts: Path, part: str, rng: random.Random) -> Iterator[Pair]:
    """Sentences of the held-out books for validation and test, of the others for training."""
    with lzma.open(texts / f"books/{'train' if part == 'train' else 'val'}.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read(60_000_000 if part == "train" else 4_000_000)
    if part != "train":  # the two halves of what is held out
        text = text[:2_000_000] if part == "validation" else text[2_000_000:]
    found = [" ".join(s.split()) for s in re.findall(r"(?<=[.!?]\s)[A-Z][^.!?\f\"_]{25,140}[.!?](?=\s)", text)]
    for sentence in rng.sample(sorted(set(found)), N_SENTENCES[part]):
        yield f"correct: {misspelt(sentence, rng)}", sentence


def misspelt(sentence: str, rng: random.Random) -> str:
    """A sentence in which one word of six has a slip of the pen: a letter left out, doubled, swapped or another."""
    return " ".join(slip(word, rng) if len(word) > 2 and rng.random() < 1 / 6 else word for word in sentence.split())


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
    parser.add_argument("--texts", type=Path, required=True, help="the folder with multi30k, sst2, squad and books")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        rng = random.Random(part)
        tasks = {
            "translate": list(translations(options.texts, part)),
            "sentiment": list(sentiments(options.texts, part)),
            "question": list(questions(options.texts, part, rng)),
            "correct": list(corrections(options.texts, part, rng)),
        }
        print(part, {name: len(pairs) for name, pairs in tasks.items()})
        rows = [f"{s}\t{t}\n" for name, ps in tasks.items() for s, t in ps for _ in range(_times(name, part))]
        (folder / f"{part}.tsv.gz").write_bytes(gzip.compress("".join(rows).encode(), mtime=0))


def _times(name: str, part: str) -> int:
    return REPEATED[name] if part == "train" else 1


if __name__ == "__main__":
    main()
