"""`heedful probe`: which layers of a model know best, by a linear classifier of words on each."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, two files of tagged sentences, which layers."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument(
        "train", type=Path, help="tagged sentences, CoNLL's columns: a word and last its tag in each line"
    )
    parser.add_argument("dev", type=Path, help="others, on which is measured")
    parser.add_argument(
        "--layers", nargs="+", metavar="WHICH",
        help="first, last, second_to_last, sum_all, sum_last_four, concat_last_four, or numbers of layers from 0; "
        "`each`: every layer alone (default: the table of BERT's paper)",
    )  # fmt: skip
    parser.add_argument(
        "--train-sentences", type=int, metavar="N", help="at most so many, evenly spread (default: all)"
    )
    parser.add_argument("--dev-sentences", type=int, metavar="N", help="likewise")
    parser.add_argument("--column", type=int, default=-1, metavar="N", help="the tag's column, from 0 (default: last)")


def run(options: argparse.Namespace) -> int:
    """Print a table with a row for each choice of layers."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import heedful
    from heedful.data.tagging import TaggedSentences, read_tagged
    from heedful.evaluate import probe as probing

    def few(path: Path, most: int | None) -> list[tuple[list[str], list[str]]]:
        found = read_tagged(path, options.column)
        return [found[i] for i in probing.evenly_spaced(len(found), most)]

    train, dev = few(options.train, options.train_sentences), few(options.dev, options.dev_sentences)
    loaded = heedful.load(options.model, dtype=torch.float32)
    loaded.require("capture")
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, and reads no text")
    longest = loaded.model.context_length
    tags = {tag for _, found in (*train, *dev) for tag in found}
    names = sorted(tags, key=lambda tag: (tag != "O", tag))
    known, tested = (TaggedSentences(part, loaded.tokenizer, names=names, max_length=longest) for part in (train, dev))
    console = Console(stderr=True)
    for path, data in ((options.train, known), (options.dev, tested)):
        for note in data.notes:
            console.print(f"{path}: {note}", markup=False, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        rows = probing.probe(
            loaded.model, known, tested, options.layers,
            progress=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
        )  # fmt: skip
    counts = f"{len(known):,} sentences to fit, {len(tested):,} to measure, {len(known.names)} tags"
    print(f"{counts}\n\n{probing.format_results(rows, loaded.name)}")
    return 0
