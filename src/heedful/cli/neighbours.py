"""`heedful neighbours`: nearest words and analogies among a model's embeddings."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from heedful.cli.arguments import add_model
from heedful.cli.inputs import add_inputs, count_inputs, input_batches
from heedful.cli.results import add_json, progress_bar, write_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words, the model, the layer."""
    add_inputs(parser, "WORD", 'a word, "king - man + woman", or man:king::woman:?')
    add_model(parser, "bert-books")
    parser.add_argument(
        "-n",
        type=int,
        default=10,
        metavar="N",
        help="the nearest N words of the vocabulary (default 10); a small vocabulary has some beginnings of words too",
    )
    parser.add_argument(
        "--layer", type=int, metavar="L",
        help="of this layer's outputs for words read alone, counted from 0 (default: the input embedding)",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(wanted="a word")


def run(options: argparse.Namespace) -> int:
    """Print the nearest words and their cosines."""
    from heedful.cli.arguments import load_model
    from heedful.tasks.neighbours import Neighbour, word_vectors

    if len(options.inputs) > 1 and {"+", "-"} & set(options.inputs):
        options.inputs = [" ".join(options.inputs)]  # an expression without quotes
    batches, total = input_batches(options), count_inputs(options)
    loaded = load_model(options.model, "neighbours", options.device)
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, and reads no text")
    with progress_bar(None):
        vectors = word_vectors(loaded.model, loaded.tokenizer, options.layer)

    def text(given: str, found: list[Neighbour]) -> str:
        lines = [f"{x.similarity:6.3f}  {x.word}" for x in found]
        return "\n".join(lines if total == 1 else [given, *lines])

    return write_results(
        options, batches, lambda words: [vectors.nearest(word, options.n) for word in words], total=total,
        record=lambda found: {"neighbours": [asdict(x) for x in found]}, text=text,
    )  # fmt: skip
