"""How good the shipped models `translator` and `reader` are on test data: BLEU, and SQuAD's exact match and F1.

    python benchmarks/quality.py translator --texts ../shared/data
    python benchmarks/quality.py reader --texts ../shared/data

translator  Multi30k's test 2016, German to English, as `heedful.load("translator").translate` gives it; BLEU is
            sacrebleu's with its own defaults (13a, case counts), and its signature is printed.
reader      the questions of squad/squad_ctx_test.json; exact match and F1 over words as SQuAD's evaluation script
            normalizes and averages them (Rajpurkar et al. 2016, section 6.1).

--model takes another model of the kind, such as a run; --first N measures on the first N items only.
"""

from __future__ import annotations

import argparse
import gzip
import re
import string
from collections import Counter
from pathlib import Path

import torch

import heedful
from heedful.data.squad import read_squad
from heedful.loaded import Loaded


def measure_translator(model: Loaded, texts: Path, first: int | None) -> None:
    """Print BLEU on Multi30k's test 2016."""
    import sacrebleu

    def lines(code: str) -> list[str]:
        with gzip.open(texts / f"multi30k/test_2016_flickr.{code}.gz", "rt", encoding="utf-8") as file:
            return file.read().splitlines()[:first]

    bleu = sacrebleu.BLEU()
    score = bleu.corpus_score(model.translate(lines("de")), [lines("en")])
    print(f"{model.name}: BLEU {score.score:.1f} on {len(lines('en'))} sentences ({bleu.get_signature()})")


def normalized(answer: str) -> list[str]:
    """The words of an answer as SQuAD's script compares them: lower case, no punctuation, no articles."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1(given: list[str], reference: list[str]) -> float:
    """The harmonic mean of precision and recall over words."""
    common = sum((Counter(given) & Counter(reference)).values())
    return 2 * common / (len(given) + len(reference)) if common else float(given == reference)


def measure_reader(model: Loaded, texts: Path, first: int | None) -> None:
    """Print exact match and F1 on the test questions, the best over the reference answers of each."""
    passages, questions, _ = read_squad(texts / "squad/squad_ctx_test.json")
    questions, exact, overlap = questions[:first], 0.0, 0.0
    for question in questions:
        given = normalized(model.answer(question.text, passages[question.passage]).text)
        references = [normalized(text) for text in question.answers]
        exact += max(given == reference for reference in references)
        overlap += max(f1(given, reference) for reference in references)
    n = len(questions)
    print(f"{model.name}: exact match {exact / n:.1%}, F1 {overlap / n:.1%} on {n} questions")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("translator", "reader"))
    parser.add_argument("--model", help="the one that ships unless told")
    parser.add_argument("--texts", type=Path, required=True, help="the folder with multi30k and squad")
    parser.add_argument("--first", type=int, help="measure on this many items only")
    options = parser.parse_args()
    model = heedful.load(options.model or options.what)
    (measure_translator if options.what == "translator" else measure_reader)(model, options.texts, options.first)


if __name__ == "__main__":
    main()
