"""`heedful show`, `heedful fill` and `heedful probe`: what a model does with a text, as a page or a picture; what fills
a blank; which of its layers know best."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.models.base import Model
    from heedful.observe.reading import Reading

# What can be shown, and the options that choose among it.
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
WITHOUT_TEXT = ("positions", "names")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def add_show(c: argparse.ArgumentParser, model: str) -> None:
    c.add_argument("model", help=model)
    c.add_argument("text", nargs="?", help="a text; numbers without a tokenizer; an image file for a ViT")
    c.add_argument(
        "--what", choices=[*WHAT], default="attention", metavar="WHAT",
        help="attention (default): the heads of a layer; heads: every head, small; rollout: what has come from where; "
        "alignment: target to source; ablation: how far the output moves without each head; lens: what each layer "
        "would say; embeddings: how alike the tokens are, by layer; projection: the same before and after a head's "
        "projections; tokens: with the surprise at each; positions; names: all that can be captured",
    )  # fmt: skip
    c.add_argument("--out", type=Path, metavar="FILE", help=".html, .png, .svg or .pdf (default: MODEL-WHAT.html)")
    c.add_argument("--layer", type=int, help="of this layer alone (counted from 0)")
    c.add_argument("--head", type=int, help="of this head alone")
    c.add_argument("--kind", choices=["encoder", "decoder", "cross"], help="which attention of an encoder-decoder")
    c.add_argument("--second", metavar="TEXT", help="sentence B, for BERT and its kin")
    c.add_argument("--target", metavar="TEXT", help="what an encoder-decoder is to write (default: its own answer)")
    c.add_argument("--ablate", choices=["zero", "mean"], help="what stands in for a head's output (default: zero)")
    c.add_argument("--length", type=int, metavar="N", help="how many positions (default 50)")


def show(options: argparse.Namespace) -> int:
    import torch

    import heedful
    from heedful.observe.views import ENDINGS, VIEWS, Wish, listing

    if options.out is not None and options.out.suffix.lower() not in ENDINGS:
        raise ValueError(f"{options.out}: what is shown is written as {', '.join(ENDINGS)}")
    _check(options)
    loaded = heedful.load(options.model, dtype=torch.float32)  # so that weights add up to 1 in what is shown
    loaded.require("capture")
    if options.what == "names":
        print(listing(loaded.model))
        return 0
    reading, text = None, options.text or ""
    if options.what not in WITHOUT_TEXT:
        if options.text is None:
            raise ValueError(f"give a text to look at: heedful show {options.model} TEXT --what {options.what}")
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
            if getattr(options, name) is not None:
                raise ValueError(f"{options.what} are a model's own: leave the {name} out")


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
    pixels = torch.from_numpy(decode(path, model.config.image_size).copy()).permute(2, 0, 1).float() / 127.5 - 1
    return pixels.mean(dim=0, keepdim=True) if model.config.n_channels == 1 else pixels


def add_fill(c: argparse.ArgumentParser, model: str) -> None:
    c.add_argument("model", nargs="?", help=f"{model}; not needed where the template names its models")
    c.add_argument(
        "template",
        help='as "In [Texas|New York], they like to buy _."; a first bracket may name models: '
        '"[bert-books|shakespeare]: My lord, _"',
    )
    c.add_argument("--words", metavar="A,B,C", help="compare these words alone, separated by commas")
    c.add_argument("-n", type=int, default=30, metavar="N", help="the likeliest N words of each sentence; 0: all")
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
    from heedful.observe.template import parse
    from heedful.weights.find import is_here, shipped

    if options.out is not None and options.out.suffix.lower() not in report.ENDINGS:
        raise ValueError(f"{options.out}: a report is written as {', '.join(report.ENDINGS)}")
    if options.n < 0:
        raise ValueError(f"-n is {options.n}: it must be 0 or more")
    models = parse(options.template, is_here, shipped()).models
    if options.model is None and not models:
        raise ValueError(
            "which model? heedful fill MODEL TEMPLATE; or name models in the template, as "
            f"[bert-books|shakespeare]: My lord, _ (of those that ship there are {', '.join(shipped())})"
        )
    if options.model is not None and models and options.model not in models:
        raise ValueError(f"the template names its models, {' and '.join(models)}: leave {options.model} out")
    loaded = heedful.load(options.model or models[0], dtype=torch.float32)
    words = None if options.words is None else [word for word in options.words.split(",") if word.strip()]
    found = loaded.fill(options.template, words=words, n=options.n or None)
    if options.out is not None:  # first: whoever reads what is printed may stop early
        report.save(found, " and ".join(models) or loaded.name, options.out)
    print(report.text(found) + (f"\n\n{options.out}" if options.out is not None else ""))
    return 0


def add_probe(c: argparse.ArgumentParser, model: str) -> None:
    c.add_argument("model", help=model)
    c.add_argument("train", type=Path, help="tagged sentences, CoNLL's columns: a word and last its tag in each line")
    c.add_argument("dev", type=Path, help="others, on which is measured")
    c.add_argument(
        "--layers", nargs="+", metavar="WHICH",
        help="first, last, second_to_last, sum_all, sum_last_four, concat_last_four, or numbers of layers from 0; "
        "`each`: every layer alone (default: the table of BERT's paper)",
    )  # fmt: skip
    c.add_argument("--train-sentences", type=int, metavar="N", help="at most so many, evenly spread (default: all)")
    c.add_argument("--dev-sentences", type=int, metavar="N", help="likewise")
    c.add_argument("--column", type=int, default=-1, metavar="N", help="the tag's column, from 0 (default: last)")


def probe(options: argparse.Namespace) -> int:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import heedful
    from heedful.data.tagged import Tagged, read_tagged
    from heedful.evaluate import probe as probing

    def few(path: Path, most: int | None) -> list[tuple[list[str], list[str]]]:
        found = read_tagged(path, options.column)
        return [found[i] for i in probing.spread(len(found), most)]

    train, dev = few(options.train, options.train_sentences), few(options.dev, options.dev_sentences)
    loaded = heedful.load(options.model, dtype=torch.float32)
    loaded.require("capture")
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, and reads no text")
    longest = loaded.model.longest
    tags = {tag for _, found in (*train, *dev) for tag in found}
    names = sorted(tags, key=lambda tag: (tag != "O", tag))
    known, tested = (Tagged(part, loaded.tokenizer, names=names, longest=longest) for part in (train, dev))
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
    print(f"{counts}\n\n{probing.table(rows, loaded.name)}")
    return 0
