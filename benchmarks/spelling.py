"""How well models correct spelling, on clean text and on text with more and more mistakes.

    python benchmarks/spelling.py MODEL... --data DATA/tasks [--device cuda] [--first N]

The sentences are those of held-out books (spelling-test-*.tsv.gz of benchmarks/zoo_data/tasks.py) with no mistake, with
a slip in one word of six, and in every second word. Printed for each model: how many sentences come out exactly right,
and the character error rate: edits to the right sentence, per character of it. The first row is the text as it stands.
--prefix "correct: " asks a model of several tasks.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch

import heedful

LEVELS = {"0": "no mistake", "6": "one word of six", "2": "every second word"}


def edits(a: str, b: str) -> int:
    """Levenshtein's distance between two texts."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def scores(said: list[str], wanted: list[str]) -> dict[str, float]:
    """The share that is exactly right and the character error rate."""
    pairs = list(zip(said, wanted, strict=True))
    return {
        "exact": sum(a == b for a, b in pairs) / len(pairs),
        "cer": sum(edits(a, b) for a, b in pairs) / sum(map(len, wanted)),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="models or runs")
    parser.add_argument("--data", type=Path, required=True, help="the folder with spelling-test-*.tsv.gz")
    parser.add_argument("--prefix", default="", help="before each sentence")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, help="so many sentences only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    tables: dict[str, list[list[str]]] = {}
    for level in LEVELS:
        with gzip.open(options.data / f"spelling-test-{level}.tsv.gz", "rt", encoding="utf-8") as file:
            tables[level] = [line.rstrip("\n").split("\t") for line in file][: options.first]
    for name in ["", *options.models]:
        model = heedful.load(name, device=options.device, dtype=torch.float32) if name else None
        for level, pairs in tables.items():
            given, wanted = [source for source, _ in pairs], [target for _, target in pairs]
            said = model.translate([options.prefix + text for text in given], beams=1) if model else given
            one = found.setdefault(name or "as it stands", {})[LEVELS[level]] = scores(said, wanted)
            shown = f"{one['exact']:6.1%} exactly right, character error rate {one['cer']:.2%}"
            print(f"{name or 'as it stands':30} {LEVELS[level]:18} {shown}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
