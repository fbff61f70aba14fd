"""How good the models `languages` and `entities` are on texts unlike those they learned from; `bert-books` on held-out
texts like them.

    python benchmarks/zoo_data/measure.py languages --texts ../shared/data [--validation FILE.tsv]
    python benchmarks/zoo_data/measure.py entities --texts ../shared/data
    python benchmarks/zoo_data/measure.py bert-books --texts ../shared/data [--validation wiki/val.txt.xz]

languages  Multi30k's captions, English and German; everyday sentences (languages.tsv beside this file)
entities   CoNLL-2003's testb (people, places and organisations alone, as the model has no fourth kind); everyday
           sentences (entities.txt). An entity is right if its words and its kind are. None of these was trained on.
bert-books nats per hidden token of books that were held out, a fifth of the tokens hidden, whole words together; with
           --validation of the articles that wikipedia.py held out, too

--model takes another model of the kind, such as a run that is still going.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections import Counter
from pathlib import Path

import torch

import heedful
from heedful.data.corruption import MaskedWindows
from heedful.data.dataset import IGNORED, Draw
from heedful.data.prepare import prepare_corpus
from heedful.data.sources import TextSource
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.data.tagging import read_tagged, to_iob2, tokenize_tagged_words
from heedful.evaluate.entities import EntityScore, entities
from heedful.loaded import Loaded
from heedful.models.base import Batch
from heedful.train.objectives import masked

HERE = Path(__file__).parent
KINDS = ("PER", "LOC", "ORG")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("languages", "entities", "bert-books"))
    parser.add_argument("--model", help="the one that ships unless told")
    parser.add_argument("--texts", type=Path, required=True, help="the folder with multi30k and conll2003")
    parser.add_argument("--validation", type=Path)
    parser.add_argument("--part", default="testb", choices=("testa", "testb"), help="of CoNLL-2003; testa to look at")
    parser.add_argument("--all", action="store_true", help="every mistake")
    options = parser.parse_args()
    model = heedful.load(options.model or options.what)
    torch.set_grad_enabled(False)
    measures = {"languages": measure_languages, "entities": measure_entities, "bert-books": measure_blanks}
    measures[options.what](model, options)


# --- bert-books -------------------------------------------------------------------------------------------------------


def measure_blanks(model: Loaded, options: argparse.Namespace) -> None:
    assert model.tokenizer is not None
    for path in filter(None, [options.texts / "books/val.txt.xz", options.validation]):
        corpus, _ = prepare_corpus(TextSource(path), model.tokenizer)
        how = {"pairs": False, "share": 0.2, "documents": False, "whole_words": True}
        windows = MaskedWindows(corpus, model.tokenizer, 128, shifted=False, **how)
        chosen = range(0, len(windows), max(1, len(windows) // 600))
        total = n = 0.0
        for begin in range(0, len(chosen), 50):
            loss = masked(model.model, windows.batch([Draw(0, i) for i in chosen[begin : begin + 50]], seed=0))
            total, n = total + float(loss.sum), n + float(loss.n_targets)
        print(f"{path.parent.name}/{path.name}: {total / n:.3f} nats per hidden token, {n:.0f} of them")


# --- languages --------------------------------------------------------------------------------------------------------


def measure_languages(model: Loaded, options: argparse.Namespace) -> None:
    sets = {"everyday": [tuple(line.split("\t")) for line in (HERE / "languages.tsv").read_text("utf-8").splitlines()]}
    if options.validation:
        lines = options.validation.read_text("utf-8").splitlines()[1:]
        sets["held-out articles"] = [(label, text) for text, label in (line.split("\t") for line in lines)]
    for code, name in ("de", "German"), ("en", "English"):
        with gzip.open(options.texts / f"multi30k/test_2016_flickr.{code}.gz", "rt", encoding="utf-8") as file:
            texts = file.read().splitlines()
        sets[f"Multi30k, {name}"] = [(name, text) for text in texts]
        sets[f"Multi30k, {name}, first 3 words in lower case"] = [
            (name, " ".join(t.lower().split()[:3])) for t in texts
        ]
    for which, rows in sets.items():
        said = [(label, model.classify(text)[0].name, text) for label, text in rows]
        wrong = [row for row in said if row[0] != row[1]]
        print(f"{which}: {1 - len(wrong) / len(said):.2%} of {len(said)} right")
        confused = Counter((label, name) for label, name, _ in wrong).most_common(6)
        print("   ", ", ".join(f"{n} {label} called {name}" for (label, name), n in confused))
        for label, name, text in wrong if options.all or which == "everyday" else []:
            print(f"    {label} called {name}: {text}")


# --- entities ---------------------------------------------------------------------------------------------------------


def measure_entities(model: Loaded, options: argparse.Namespace) -> None:
    marked = [read_marked(line) for line in (HERE / "entities.txt").read_text("utf-8").splitlines()]
    conll = read_tagged(options.texts / f"conll2003/eng.{options.part}.gz")
    report("everyday", [(words, tags) for words, tags in marked], model, True)
    report(f"CoNLL-2003, {options.part}", conll, model, options.all)


def read_marked(line: str) -> tuple[list[str], list[str]]:
    """`[PER Marie Curie] left [LOC Warsaw].` as words and tags."""
    words: list[str] = []
    tags: list[str] = []
    for kind, name, other in re.findall(r"\[([A-Z]+) ([^\]]+)\]|([^\[]+)", line):
        found = re.findall(r"\w+|[^\w\s]", name or other)
        words += found
        tags += [f"I-{kind}" if kind else "O"] * len(found)
    return words, to_iob2(tags)


def report(which: str, sentences: list[tuple[list[str], list[str]]], model: Loaded, show: bool) -> None:
    right, said, true = Counter[str](), Counter[str](), Counter[str]()
    for words, tags in sentences:
        found, wanted = entities(predicted(model, words)), entities(tags)
        for counter, which_ones in (right, found & wanted), (said, found), (true, wanted):
            counter.update(kind for kind, _, _ in which_ones if kind in KINDS)
        if show and found != {entity for entity in wanted if entity[0] in KINDS}:
            order = sorted(found, key=lambda entity: entity[1])
            names = ", ".join(f"{' '.join(words[a:b])} {kind}" for kind, a, b in order)
            print(f"    {' '.join(words)}  ->  {names}")
    for kind in KINDS:
        print(f"{which}, {kind}: {told(EntityScore(true[kind], said[kind], right[kind]))}")
    print(f"{which}: {told(EntityScore(true.total(), said.total(), right.total()))}, {len(sentences)} sentences")


def told(score: EntityScore) -> str:
    shares = f"precision {score.precision:.1%}, recall {score.recall:.1%}; {score.n_true} entities"
    return f"F1 {score.f1:.1%} ({shares})"


def predicted(model: Loaded, words: list[str]) -> list[str]:
    """A tag for each word; words past the model's length have none."""
    assert model.tokenizer is not None
    frame = SpecialTokenTemplate(model.tokenizer)
    ids, places = tokenize_tagged_words(model.tokenizer, words, list(range(len(words))))
    logits = model.model(Batch(torch.tensor(frame.wrap(ids, model.model.context_length)[None]))).logits
    names, best = model.model.config.labels, logits[0].argmax(dim=-1).tolist()
    tags = ["O"] * len(words)
    for at, word in enumerate(places, start=len(frame.before)):
        if word != IGNORED and at < len(best) - len(frame.after):
            tags[word] = names[best[at]]
    return to_iob2(tags)


if __name__ == "__main__":
    main()
