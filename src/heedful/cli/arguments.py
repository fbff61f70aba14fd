"""Arguments that several commands have."""

from __future__ import annotations

import argparse

MODEL = "a model that ships with heedful or was pulled, a folder, a .gguf file or a hub id (org/name)"
RECIPE = "a text file, a folder of text, a recipe that ships (--list) or a recipe's .toml file"


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize, the type of the weights in memory."""
    kinds = ["float32", "bfloat16", "float16", "int8", "int4"]
    parser.add_argument("--quantize", choices=kinds, help="the weights in this type (default: as they are stored)")


def add_context_length(parser: argparse.ArgumentParser) -> None:
    """--context-length, the most tokens that a model reads."""
    parser.add_argument(
        "--context-length", type=int, metavar="N",
        help="the most tokens of a prompt and its answer, also beyond what the model was trained for "
        "(rotary positions only; default: what its files say)",
    )  # fmt: skip


def add_set(parser: argparse.ArgumentParser, about: str) -> None:
    """--set KEY=VALUE, a change of a recipe."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
