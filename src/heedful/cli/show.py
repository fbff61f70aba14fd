"""`heedful show`: what a model does with a text, as a page or a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.cli.arguments import MODEL
from heedful.cli.images import IMAGES, load_image

if TYPE_CHECKING:
    from heedful.loaded import Loaded
    from heedful.models.base import Model
    from heedful.observe.inputs import ModelInput

# The views, and the options that each of them understands.
WHAT: dict[str, tuple[str, ...]] = {
    "attention": ("layer", "head", "kind"),
    "heads": ("layer", "kind"),
    "rollout": ("layer", "kind"),
    "alignment": ("layer", "head"),
    "ablation": ("kind", "ablate"),
    "lens": (),
    "embeddings": ("layer", "kind"),
    "projection": ("layer", "head"),
    "tokens": (),
    "positions": ("length",),
    "names": (),
}
WITHOUT_TEXT = ("positions", "names")  # they need none; the positions of a text are its tokens'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the text, what to show of it, the file."""
    parser.add_argument("model", help=f"{MODEL}; for positions also a published size, or the folder of a config.json")
    parser.add_argument("text", nargs="?", help="a text; numbers without a tokenizer; an image file for a ViT")
    parser.add_argument(
        "--what", choices=[*WHAT], default="attention", metavar="WHAT",
        help="attention (default): the heads of a layer; heads: every head, small; rollout: what has come from where; "
        "alignment: target to source; ablation: how far the output moves without each head; lens: what each layer "
        "would say; embeddings: how alike the tokens are, by layer; projection: the same before and after a head's "
        "projections; tokens: with the surprise at each; positions, of a text's tokens if "
        "one is given; names: all that can be captured",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help=".html, .png, .svg or .pdf (default: MODEL-WHAT.html)")
    parser.add_argument("--layer", type=int, help="of this layer alone (counted from 0)")
    parser.add_argument("--head", type=int, help="of this head alone")
    parser.add_argument("--kind", choices=["encoder", "decoder", "cross"], help="which attention of an encoder-decoder")
    parser.add_argument("--second", metavar="TEXT", help="sentence B, for BERT and its kin")
    parser.add_argument(
        "--target", metavar="TEXT", help="what an encoder-decoder is to write (default: its own answer)"
    )
    parser.add_argument("--ablate", choices=["zero", "mean"], help="what stands in for a head's output (default: zero)")
    parser.add_argument("--length", type=int, metavar="N", help="how many positions (default 50)")


def run(options: argparse.Namespace) -> int:
    """Write the page or the picture; print its name."""
    import torch

    import heedful
    from heedful.observe.views import ENDINGS, VIEWS, ViewOptions, format_names

    if options.out is not None and options.out.suffix.lower() not in ENDINGS:
        raise ValueError(f"{options.out}: what is shown is written as {', '.join(ENDINGS)}")
    _check(options)
    shapes = without_weights(options.model) if options.what == "positions" else None
    if shapes is not None:
        loaded = heedful.Loaded(shapes, None, Path(options.model).name)
    else:
        loaded = heedful.load(options.model, dtype=torch.float32)  # so that weights add up to 1 in what is shown
    loaded.require("capture")
    if options.what == "names":
        print(format_names(loaded.model))
        return 0
    inputs, text = None, options.text or ""
    if options.what not in WITHOUT_TEXT:
        if options.text is None:
            raise ValueError(f"give a text to look at: heedful show {options.model} TEXT --what {options.what}")
        inputs = _model_input(loaded, options)
    view_options = ViewOptions(
        loaded.model, loaded.tokenizer, loaded.name, inputs, text, options.kind, options.layer, options.head,
        options.ablate, options.length,
    )  # fmt: skip
    view = VIEWS[options.what](view_options)
    out = options.out or Path(f"{loaded.name.replace('/', '-')}-{options.what}.html")
    view.save(out)
    print(out)
    return 0


def without_weights(name: str) -> Model | None:
    """The model of a published size, or of a folder that has a config.json and no weights; None for others."""
    from heedful.models.registry import create, sizes
    from heedful.weights.meta import load_meta
    from heedful.weights.resolve import is_local

    folder = Path(name)
    if name in sizes() and not is_local(name):
        return create(name, device="meta")
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        return load_meta(folder)
    return None


def _check(options: argparse.Namespace) -> None:
    """ValueError for options that this view has no use for, and for numbers below 0."""
    for name in sorted({name for used in WHAT.values() for name in used}):
        if getattr(options, name) is not None and name not in WHAT[options.what]:
            where = ", ".join(what for what, used in WHAT.items() if name in used)
            raise ValueError(f"--{name} says nothing about {options.what}: it is for {where}")
    for name in ("layer", "head"):
        if (getattr(options, name) or 0) < 0:
            raise ValueError(f"there is no {name} {getattr(options, name)}: they are counted from 0")
    if options.what in WITHOUT_TEXT:
        for name in ("text", "second", "target"):
            if getattr(options, name) is not None and (options.what, name) != ("positions", "text"):
                raise ValueError(f"{options.what} are a model's own: leave the {name} out")


def _model_input(loaded: Loaded, options: argparse.Namespace) -> ModelInput:
    """The text, or of a ViT the image file, as the model's input."""
    from heedful.models.vit import ViT
    from heedful.observe.inputs import image_input, text_input

    if isinstance(loaded.model, ViT):
        if Path(options.text).suffix.lower() not in IMAGES:
            raise ValueError(f"{loaded.name} reads images: give a file ({', '.join(IMAGES)})")
        return image_input(loaded.model, load_image(loaded.model, Path(options.text)))
    return text_input(loaded.model, loaded.tokenizer, options.text, second=options.second, target=options.target)
