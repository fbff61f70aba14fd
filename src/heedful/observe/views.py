"""What `heedful show` can show of a model and a text, each as a picture and as a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.models.base import DecoderModel, Model
from heedful.observe import attention as look
from heedful.observe import drawings, figures
from heedful.observe.capture import names
from heedful.observe.lens import embeddings, logit_lens
from heedful.observe.page import attention_page, figure_page, table
from heedful.observe.positions import positions
from heedful.observe.reading import Reading, piece
from heedful.observe.similarity import cosines
from heedful.observe.table import halves
from heedful.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".html", *figures.ENDINGS)


@dataclass(frozen=True)
class Wish:
    """What to show of what. `reading` is missing where no text is needed."""

    model: Model
    tokenizer: Tokenizer | None
    name: str
    reading: Reading | None = None
    text: str = ""
    kind: look.Kind | None = None
    layer: int | None = None
    head: int | None = None
    how: str = "zero"
    length: int = 50

    @property
    def read(self) -> Reading:
        if self.reading is None:
            raise ValueError("give a text to look at")
        return self.reading

    def title(self, more: str = "") -> str:
        return f"{self.name}: {more}" if more else self.name


@dataclass(frozen=True)
class View:
    """A picture; the page with it, or a page of its own that one can play with."""

    draw: Callable[[], Figure]
    page: Callable[[], str]

    def save(self, path: Path) -> None:
        ending = path.suffix.lower()
        if ending not in ENDINGS:
            raise ValueError(f"{path}: what is shown is written as {', '.join(ENDINGS)}")
        if ending == ".html":
            path.write_text(self.page(), encoding="utf-8")
        else:
            figures.save(self.draw(), path)


def _plain(wish: Wish, title: str, draw: Callable[[], Figure], tables: list[str] | None = None) -> View:
    return View(draw, lambda: figure_page(title, wish.text, [figures.svg(draw())], tables or []))


def attention(wish: Wish) -> View:
    """The heads of one layer, the last unless given; on a page, of every layer."""
    maps = look.attention(wish.model, wish.read, wish.kind, wish.layer)
    name = list(maps)[-1]
    rows, columns = look.labels(wish.read, name)
    weights, heads = _heads(maps[name], wish.head)

    def draw() -> Figure:
        title = wish.title(name.removesuffix(".weights"))
        if len(heads) == 1:
            return figures.heatmap(
                weights[0], rows, columns, title=f"{title}, head {heads[0]}", scale="weight", top=1.0
            )
        return figures.maps(weights, rows, columns, [f"head {h}" for h in heads], title=title)

    told = {key: look.labels(wish.read, key) for key in maps}
    return View(draw, lambda: attention_page(wish.title("attention"), wish.text, maps, told))


def _heads(weights: Tensor, head: int | None) -> tuple[Tensor, list[int]]:
    if head is None:
        return weights, list(range(len(weights)))
    if not 0 <= head < len(weights):
        raise ValueError(f"there is no head {head}: this layer has 0 to {len(weights) - 1}")
    return weights[head : head + 1], [head]


def heads(wish: Wish) -> View:
    """Every head of every layer, small."""
    maps = look.attention(wish.model, wish.read, wish.kind, wish.layer)
    told = {key: look.labels(wish.read, key) for key in maps}
    kind = wish.kind or look.kinds(wish.model)[-1]

    def draw() -> Figure:
        return figures.thumbnails(torch.stack(list(maps.values())), title=wish.title(f"{kind} attention"))

    return View(draw, lambda: attention_page(wish.title("every head"), wish.text, maps, told))


def rollout(wish: Wish) -> View:
    """How much of each input has come to each position by a layer, the last unless given; over the image of a ViT."""
    if wish.kind == "cross":
        raise ValueError("rollout follows self-attention: choose encoder or decoder")
    by_layer = look.rolled_out(wish.model, wish.read, wish.kind)
    layer = len(by_layer) - 1 if wish.layer is None else wish.layer
    if not 0 <= layer < len(by_layer):
        raise ValueError(f"there is no layer {layer}: this model has 0 to {len(by_layer) - 1}")
    images = wish.read.batch.images
    if images is not None:
        said = _said(wish)
        size = wish.model.config.patch_size
        heat = by_layer[layer][0, 1:].view(images.shape[-2] // size, images.shape[-1] // size)
        return _plain(
            wish,
            wish.title("rollout"),
            lambda: drawings.over_image(images[0].cpu(), heat, title=wish.name, said=said),
        )
    labels = wish.read.labels(wish.kind or [k for k in look.kinds(wish.model) if k != "cross"][-1])
    title = wish.title(f"attention rollout after layer {layer}")
    return _plain(
        wish,
        title,
        lambda: figures.heatmap(
            by_layer[layer], labels, labels, title=title, row_name="position", column_name="input", gamma=0.5
        ),
    )


def _said(wish: Wish) -> str:
    """The classifier's word for an image."""
    with torch.no_grad():
        logits = wish.model(wish.read.batch).logits
    if logits is None:
        return ""
    chance, best = logits[0].softmax(dim=-1).max(dim=-1)
    labels = wish.model.config.labels
    return f"{labels[int(best)] if labels else int(best)} ({100 * float(chance):.0f} %)"


def alignment(wish: Wish) -> View:
    """Where in the source each target was looked for: the mean over heads and layers unless one is chosen."""
    weights = look.alignment(wish.model, wish.read, wish.layer, wish.head)
    rows, columns = wish.read.says, wish.read.source
    title = wish.title("alignment")

    def draw() -> Figure:
        return figures.heatmap(
            weights[: len(rows)],
            rows,
            columns,
            title=title,
            row_name="written",
            column_name="read",
            scale="weight",
        )

    maps = look.attention(wish.model, wish.read, "cross", wish.layer)
    told = {key: look.labels(wish.read, key) for key in maps}
    return View(draw, lambda: attention_page(title, wish.text, maps, told))


def ablation(wish: Wish) -> View:
    """How far the output moves without each head."""
    scores = look.head_scores(wish.model, wish.read.batch, wish.kind, how=wish.how)  # type: ignore[arg-type]
    layers, count = [str(i) for i in range(len(scores))], [str(i) for i in range(scores.shape[1])]
    title = wish.title("what each head is worth here")
    rows = [[f"layer {i}", *(f"{x:.4f}" for x in row)] for i, row in enumerate(scores.tolist())]
    return _plain(
        wish,
        title,
        lambda: figures.heatmap(
            scores, layers, count, title=title, row_name="layer", column_name="head", scale="KL (nats)"
        ),
        [table(["without head", *count], rows)],
    )


def lens(wish: Wish) -> View:
    """What each layer would say."""
    found = logit_lens(wish.model, wish.read.batch)
    writer = None if wish.tokenizer is None else wish.tokenizer.target
    pieces = [[piece(writer, i) for i in row] for row in found.ids[:, :, 0].tolist()]
    title = wish.title("what each layer would say")
    rows = [
        [layer, *(f"{p:.3f}" for p in row)]
        for layer, row in zip(found.layers, found.final.tolist(), strict=True)
    ]
    return _plain(
        wish,
        title,
        lambda: drawings.lens(found, wish.read.tokens, pieces, title=title),
        [table(["p of the last layer's token, after layer", *wish.read.tokens], rows)],
    )


def shown_embeddings(wish: Wish) -> View:
    """How alike the tokens are: as they come in, halfway, and at the end."""
    half = halves(wish.model)[0] if wish.kind in (None, "cross") else wish.kind
    layers = embeddings(wish.model, wish.read.batch, half)[:, 0].cpu()
    last = len(layers) - 1
    chosen = sorted({0, last // 2, last}) if wish.layer is None else [wish.layer + 1]
    if not all(0 <= i <= last for i in chosen):
        raise ValueError(f"there is no layer {wish.layer}: this model has 0 to {last - 1}")
    called = ["as they come in" if i == 0 else f"after layer {i - 1}" for i in chosen]
    title = wish.title("how alike its tokens are")
    labels = wish.read.labels(half)
    return _plain(
        wish,
        title,
        lambda: drawings.similarities([cosines(layers[i]) for i in chosen], called, labels, title=title),
    )


def tokens(wish: Wish) -> View:
    """The text cut into tokens; of a language model, with its surprise at each."""
    read = wish.read
    bits = surprise(wish.model, read)
    title = wish.title(f"{len(read.tokens)} tokens")
    ids = read.ids or [0] * len(read.tokens)
    rows = [
        (i, label, index, "" if b is None else f"{b:.2f}")
        for i, (label, index, b) in enumerate(zip(read.tokens, ids, bits, strict=True))
    ]
    head = ["position", "token", "id", "surprise (bits)"]
    return _plain(
        wish, title, lambda: drawings.tokens(read.tokens, ids, bits, title=title), [table(head, rows)]
    )


@torch.no_grad()
def surprise(model: Model, reading: Reading) -> list[float | None]:
    """-log2 p of each token after those before it; None of the first, and of models that do not go on with a text."""
    nothing: list[float | None] = [None] * len(reading.tokens)
    logits = model(reading.batch).logits if isinstance(model, DecoderModel) else None
    if logits is None:
        return nothing
    ids = reading.batch.ids[0]
    told = logits[0, :-1].float().log_softmax(dim=-1)
    known = ids[1:].clamp(max=told.shape[-1] - 1)
    return [None, *(told.gather(1, known[:, None])[:, 0] / -math.log(2)).tolist()]


def shown_positions(wish: Wish) -> View:
    """How the model tells positions apart."""
    found = positions(wish.model, wish.length)
    title = wish.title(found.about)
    if found.kind == "bias":
        reach = found.values.shape[1]
        x = list(range(-wish.length + 1, reach - wish.length + 1))
        return _plain(
            wish,
            title,
            lambda: drawings.curves(
                x, found.values, title=title, x_name="distance", y_name="added to the score"
            ),
        )
    across = "pair of dimensions" if found.kind == "rotary" else "dimension"
    return _plain(wish, title, lambda: drawings.positions(found.values, title=title, column_name=across))


def listing(model: Model) -> str:
    """All names that can be captured, with their shapes, as lines of text."""
    found = {name: f"({', '.join(map(str, shape))})" for name, shape in names(model).items()}
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {shape}" for name, shape in found.items())


VIEWS: dict[str, Callable[[Wish], View]] = {
    "attention": attention,
    "heads": heads,
    "rollout": rollout,
    "alignment": alignment,
    "ablation": ablation,
    "lens": lens,
    "embeddings": shown_embeddings,
    "tokens": tokens,
    "positions": shown_positions,
}
