"""`heedful probe`: which layers of a model know best, by a linear classifier of words, or of images, on each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.cli.arguments import MODEL, add_device
from heedful.cli.results import ProgressLines
from heedful.text.plural import counted

if TYPE_CHECKING:
    from heedful.loaded import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, tagged sentences or images to fit and to measure, which layers."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument(
        "train", type=Path, help="tagged sentences, CoNLL's columns: a word and last its tag in each line; for a model "
        "of images a folder with a subfolder for each class, an idx or an .npz file, or `digits`",
    )  # fmt: skip
    parser.add_argument("dev", type=Path, nargs="?", help="others, on which is measured (images: or a fifth of TRAIN)")
    parser.add_argument(
        "--layers", nargs="+", metavar="WHICH",
        help="first, last, second_to_last, sum_all, sum_last_four, concat_last_four, or numbers of layers from 0; "
        "`each`: every layer alone (default: the table of BERT's paper)",
    )  # fmt: skip
    parser.add_argument(
        "--train-sentences", "--train-images", type=int, metavar="N",
        help="at most so many, evenly spread (default: all; of images 5,000)",
    )  # fmt: skip
    parser.add_argument(
        "--dev-sentences", "--dev-images", type=int, metavar="N", help="likewise (default: all; of images 2,000)"
    )
    parser.add_argument("--column", type=int, default=-1, metavar="N", help="the tag's column, from 0 (default: last)")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Print a table with a row for each choice of layers."""
    import torch
    from rich.console import Console

    import heedful
    from heedful.data.tagging import TaggedSentences, read_tagged
    from heedful.evaluate import probe as probing

    loaded = heedful.load(options.model, device=options.device, dtype=torch.float32)
    loaded.require("capture")
    if loaded.tokenizer is None and loaded.model.family in ("vit", "image_gpt"):
        return _run_images(options, loaded)
    if options.dev is None:
        raise ValueError("a probe of words is measured on other sentences: heedful probe MODEL TRAIN DEV")

    def few(path: Path, most: int | None) -> list[tuple[list[str], list[str]]]:
        found = read_tagged(path, options.column)
        return [found[i] for i in probing.evenly_spaced(len(found), most)]

    train, dev = few(options.train, options.train_sentences), few(options.dev, options.dev_sentences)
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
    with _progress_bar() as progress:
        rows = probing.probe(loaded.model, known, tested, options.layers, progress=progress)
    counts = f"{counted(len(known), 'sentence')} to fit, {len(tested):,} to measure, {counted(len(known.names), 'tag')}"
    print(f"{counts}\n\n{probing.format_results(rows, loaded.name)}")
    return 0


def _run_images(options: argparse.Namespace, loaded: Loaded) -> int:
    """Print a table with a row for each layer of a model of images."""
    import numpy as np

    from heedful.data import images
    from heedful.evaluate.probe import evenly_spaced, format_results
    from heedful.evaluate.probe_images import probe_images

    def read(path: Path) -> images.ImageSet:
        if str(path) == "digits":
            return images.load_digits()
        return images.read_images(path, size=getattr(loaded.model.config, "image_size", None))

    def few(found: images.ImageSet, most: int | None, usual: int) -> images.ImageSet:
        return found.subset(np.array(evenly_spaced(len(found), usual if most is None else most)))

    train = read(options.train)
    if options.dev is not None:
        dev = read(options.dev)
    else:
        order = np.random.default_rng(0).permutation(len(train))
        train, dev = train.subset(order[len(train) // 5 :]), train.subset(order[: len(train) // 5])
    train, dev = few(train, options.train_sentences, 5000), few(dev, options.dev_sentences, 2000)
    with _progress_bar() as progress:
        rows = probe_images(loaded.model, train, dev, options.layers, progress=progress)
    classes = counted(len(train.names), "class", "classes")
    counts = f"{counted(len(train), 'image')} to fit, {len(dev):,} to measure, {classes}"
    print(f"{counts}\n\n{format_results(rows, loaded.name)}")
    return 0


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal, and what to call with a description, how much is done, and of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        if console.is_terminal:
            yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
        else:
            lines = ProgressLines(None)
            yield lambda what, done, of: lines.update(done, of, f"  {what}")
