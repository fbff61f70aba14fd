"""`heedful classify`: the labels of texts, of pairs of texts, or of images."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.arguments import add_model
from heedful.cli.images import IMAGES
from heedful.cli.inputs import add_inputs, batched, count_inputs, input_batches
from heedful.cli.results import add_json, shorten, write_results
from heedful.text.plural import counted

if TYPE_CHECKING:
    from heedful.loaded import Loaded

TEXT_MODEL, IMAGE_MODEL = "sentiment", "digits-vit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The texts or images, the model, how many labels."""
    add_inputs(parser, "TEXT", "a text to classify")
    add_model(parser, None, f"{TEXT_MODEL}; of images {IMAGE_MODEL}")
    parser.add_argument(
        "--second", action="append", metavar="TEXT",
        help="the second text of a pair: once for all texts, or once for each of them",
    )  # fmt: skip
    parser.add_argument("--image", nargs="+", type=Path, metavar="FILE", help="images to classify instead of texts")
    parser.add_argument(
        "--top", type=int, metavar="N", help="the likeliest N labels of each (default: all of one input, 1 of several)"
    )
    add_json(parser)
    parser.set_defaults(wanted="a text to classify")


def run(options: argparse.Namespace) -> int:
    """Print the labels and their probabilities, likeliest first."""
    from heedful.cli.arguments import load_model

    if options.top is not None and options.top < 1:
        raise ValueError(f"--top is {options.top}: it must be 1 or more")
    if options.image and (options.inputs or options.file or options.second):
        raise ValueError("classify texts or images: leave one of them out")
    if not options.image and options.inputs and all(is_image_file(name) for name in options.inputs):
        options.image, options.inputs = [Path(name) for name in options.inputs], []
    if options.image:
        total: int | None = len(options.image)
        batches = batched(map(str, options.image))
    else:
        total, batches = count_inputs(options), input_batches(options)
    seconds = options.second or []
    if len(seconds) > 1 and len(seconds) != total:
        raise ValueError(
            f"{counted(len(seconds), 'second text')} for {total or 'piped'} texts: give one for all, or one for each"
        )
    loaded = load_model(options.model or (IMAGE_MODEL if options.image else TEXT_MODEL), "classify", options.device)
    names = loaded.model.config.labels or ("0",)
    width, top = max(map(len, names)), options.top or (len(names) if total == 1 else 1)
    done = 0

    def compute(given: list[str]) -> list[list[Any]]:
        nonlocal done
        if options.image:
            return [classify_image(loaded, Path(path)) for path in given]
        pairs = seconds * len(given) if len(seconds) == 1 else seconds[done : done + len(given)]
        if len(given) == 1:  # done, whatever comes of it; a batch that fails is tried again one by one
            done += 1
        found = loaded.classify(given, pairs or None)
        done += len(given) if len(given) > 1 else 0
        return found

    def text(given: str, labels: list[Any]) -> str:
        lines = [f"{label.name:<{width}}  {label.score:6.4f}" for label in labels[:top]]
        return "\n".join(lines) if total == 1 else f"{'  '.join(lines)}  {shorten(given, width + 10)}"

    return write_results(
        options, batches, compute, total=total,
        record=lambda labels: {"labels": [asdict(label) for label in labels[: options.top]]}, text=text,
    )  # fmt: skip


def is_image_file(name: str) -> bool:
    """Whether an input is the path of an image, and not a text."""
    return name.lower().endswith(IMAGES) and Path(name).is_file()


def classify_image(loaded: Loaded, path: Path) -> list[Any]:
    """The labels of an image file."""
    from heedful.cli.images import load_image

    return loaded.classify(load_image(loaded.model, path))
