"""`heedful show` and `heedful fill`: what a model does with a text, as a page or a picture, and what fills a blank."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.models.base import Model
    from heedful.observe.reading import Reading

WHAT = (
    "attention",
    "heads",
    "rollout",
    "alignment",
    "ablation",
    "lens",
    "embeddings",
    "tokens",
    "positions",
    "names",
)
WITHOUT_TEXT = ("positions", "names")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def add_show(c: argparse.ArgumentParser, model: str) -> None:
    c.add_argument("model", help=model)
    c.add_argument("text", nargs="?", help="a text; numbers without a tokenizer; an image file for a ViT")
    c.add_argument("--what", choices=WHAT, default="attention", help="default: attention")
    c.add_argument(
        "--out", type=Path, metavar="FILE", help=".html, .png, .svg or .pdf (default: MODEL-WHAT.html)"
    )
    c.add_argument("--layer", type=int, help="of this layer alone (counted from 0)")
    c.add_argument("--head", type=int, help="of this head alone")
    c.add_argument(
        "--kind", choices=["encoder", "decoder", "cross"], help="which attention of an encoder-decoder"
    )
    c.add_argument("--second", metavar="TEXT", help="sentence B, for BERT and its kin")
    c.add_argument(
        "--target", metavar="TEXT", help="what an encoder-decoder is to write (default: its own answer)"
    )
    c.add_argument(
        "--ablate", choices=["zero", "mean"], default="zero", help="what stands in for a head's output"
    )
    c.add_argument("--length", type=int, default=50, metavar="N", help="how many positions (default 50)")


def show(options: argparse.Namespace) -> int:
    import torch

    import heedful
    from heedful.observe.views import ENDINGS, VIEWS, Wish, listing

    if options.out is not None and options.out.suffix.lower() not in ENDINGS:
        raise ValueError(f"{options.out}: what is shown is written as {', '.join(ENDINGS)}")
    loaded = heedful.load(options.model, dtype=torch.float32)  # so that weights add up to 1 in what is shown
    loaded.require("capture")
    if options.what == "names":
        print(listing(loaded.model))
        return 0
    reading, text = None, options.text or ""
    if options.what not in WITHOUT_TEXT:
        if options.text is None:
            raise ValueError(
                f"give a text to look at: heedful show {options.model} TEXT --what {options.what}"
            )
        reading = _read(loaded, options)
    wish = Wish(
        loaded.model, loaded.tokenizer, loaded.name, reading, text, options.kind, options.layer, options.head,
        options.ablate, options.length,
    )  # fmt: skip
    view = VIEWS[options.what](wish)
    out = options.out or Path(f"{loaded.name.replace('/', '-')}-{options.what}.html")
    view.save(out)
    print(out)
    return 0


def _read(loaded: object, options: argparse.Namespace) -> Reading:
    from heedful.loaded import Loaded
    from heedful.models.vit import ViT
    from heedful.observe.reading import read, read_image

    assert isinstance(loaded, Loaded)
    if isinstance(loaded.model, ViT):
        if Path(options.text).suffix.lower() not in IMAGES:
            raise ValueError(f"{loaded.name} reads images: give a file ({', '.join(IMAGES)})")
        return read_image(loaded.model, _image(loaded.model, Path(options.text)))
    return read(loaded.model, loaded.tokenizer, options.text, second=options.second, target=options.target)


def _image(model: Model, path: Path) -> Tensor:
    """A file's pixels from -1 to 1 in the model's size; grey where it has one channel."""
    import torch

    from heedful.data.images import decode

    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    pixels = (
        torch.from_numpy(decode(path, model.config.image_size).copy()).permute(2, 0, 1).float() / 127.5 - 1
    )
    return pixels.mean(dim=0, keepdim=True) if model.config.n_channels == 1 else pixels


def add_fill(c: argparse.ArgumentParser, model: str) -> None:
    c.add_argument("model", help=model)
    c.add_argument("template", help='as "In [Texas|New York], they like to buy _."')
    c.add_argument("--words", metavar="A,B,C", help="compare these words alone, separated by commas")
    c.add_argument(
        "-n", type=int, default=30, metavar="N", help="the likeliest N words of each sentence; 0: all"
    )
    c.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a report: .html, .csv, or the chart as .png, .svg, .pdf",
    )


def fill(options: argparse.Namespace) -> int:
    import torch

    import heedful
    from heedful.observe import report

    if options.out is not None and options.out.suffix.lower() not in report.ENDINGS:
        raise ValueError(f"{options.out}: a report is written as {', '.join(report.ENDINGS)}")
    if options.n < 0:
        raise ValueError(f"-n is {options.n}: it must be 0 or more")
    loaded = heedful.load(options.model, dtype=torch.float32)
    words = None if options.words is None else [word for word in options.words.split(",") if word.strip()]
    found = loaded.fill(options.template, words=words, n=options.n or None)
    if options.out is not None:  # first: whoever reads what is printed may stop early
        report.save(found, loaded.name, options.out)
    print(report.text(found) + (f"\n\n{options.out}" if options.out is not None else ""))
    return 0
