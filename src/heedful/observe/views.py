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
from heedful.observe import charts, figures, heatmaps
from heedful.observe.html_page import HeatmapData, attention_page, heatmap_page, html_table, token_page
from heedful.observe.inputs import ModelInput, token_label
from heedful.observe.lens import hidden_states, logit_lens
from heedful.observe.names import activation_names, stack_names
from heedful.observe.positions import position_encoding
from heedful.observe.similarity import cosine_similarity, projection_similarity
from heedful.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".html", *figures.ENDINGS)


@dataclass(frozen=True)
class ViewOptions:
    """What to show of what. `reading` is missing where no text is needed."""

    model: Model
    tokenizer: Tokenizer | None
    name: str
    reading: ModelInput | None = None
    text: str = ""
    kind: look.Kind | None = None
    layer: int | None = None
    head: int | None = None
    how: str | None = None
    length: int | None = None

    @property
    def read(self) -> ModelInput:
        if self.reading is None:
            raise ValueError("give a text to look at")
        return self.reading

    def title(self, more: str = "") -> str:
        return f"{self.name}: {more}" if more else self.name


@dataclass(frozen=True)
class Visualization:
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
            figures.save_figure(self.draw(), path)


def _plain(
    wish: ViewOptions,
    title: str,
    draw: Callable[[], Figure],
    matrices: list[HeatmapData],
    tables: list[str] | None = None,
) -> Visualization:
    return Visualization(draw, lambda: heatmap_page(title, wish.text, matrices, tables=tables or []))


def attention_view(wish: ViewOptions) -> Visualization:
    """The heads of one layer, the last unless given; on a page, of every layer."""
    maps = look.attention_weights(wish.model, wish.read, wish.kind, wish.layer)
    name = list(maps)[-1]
    rows, columns = look.axis_labels(wish.read, name)
    weights, heads = _heads(maps[name], wish.head)

    def draw() -> Figure:
        title = wish.title(name.removesuffix(".weights"))
        if len(heads) == 1:
            return heatmaps.heatmap(
                weights[0], rows, columns, title=f"{title}, head {heads[0]}", scale="weight", top=1.0
            )
        return heatmaps.head_heatmaps(weights, rows, columns, [f"head {h}" for h in heads], title=title)

    told = {key: look.axis_labels(wish.read, key) for key in maps}
    return Visualization(draw, lambda: attention_page(wish.title("attention"), wish.text, maps, told, head=wish.head))


def _heads(weights: Tensor, head: int | None) -> tuple[Tensor, list[int]]:
    if head is None:
        return weights, list(range(len(weights)))
    if not 0 <= head < len(weights):
        raise ValueError(f"there is no head {head}: this layer has 0 to {len(weights) - 1}")
    return weights[head : head + 1], [head]


def heads_view(wish: ViewOptions) -> Visualization:
    """Every head of every layer, small."""
    maps = look.attention_weights(wish.model, wish.read, wish.kind, wish.layer)
    told = {key: look.axis_labels(wish.read, key) for key in maps}
    kind = wish.kind or look.attention_kinds(wish.model)[-1]

    def draw() -> Figure:
        return heatmaps.head_thumbnails(torch.stack(list(maps.values())), title=wish.title(f"{kind} attention"))

    return Visualization(draw, lambda: attention_page(wish.title("every head"), wish.text, maps, told, overview=True))


def rollout_view(wish: ViewOptions) -> Visualization:
    """How much of each input has come to each position by a layer, the last unless given; over the image of a ViT."""
    if wish.kind == "cross":
        raise ValueError("rollout follows self-attention: choose encoder or decoder")
    by_layer = look.attention_rollout(wish.model, wish.read, wish.kind)
    layer = len(by_layer) - 1 if wish.layer is None else wish.layer
    if not 0 <= layer < len(by_layer):
        raise ValueError(f"there is no layer {layer}: this model has 0 to {len(by_layer) - 1}")
    images = wish.read.batch.images
    if images is not None:
        return _over_image(wish, images[0].cpu(), by_layer[layer])
    labels = wish.read.labels(wish.kind or [k for k in look.attention_kinds(wish.model) if k != "cross"][-1])
    title = wish.title(f"attention rollout after layer {layer}")
    rolled, names = by_layer[layer], ("position", "input")
    return _plain(
        wish,
        title,
        lambda: heatmaps.heatmap(
            rolled, labels, labels, title=title, row_name=names[0], column_name=names[1], gamma=0.5
        ),
        [HeatmapData(rolled, labels, labels, "", *names, "share", gamma=0.5)],
    )


def _over_image(wish: ViewOptions, image: Tensor, rolled: Tensor) -> Visualization:
    """What has come to [CLS] from each patch."""
    size = wish.model.config.patch_size
    said, heat = _said(wish), rolled[0, 1:].view(image.shape[-2] // size, image.shape[-1] // size)

    def draw() -> Figure:
        return heatmaps.image_overlay(image, heat, title=wish.name, prediction=said)

    rows, columns = ([str(i + 1) for i in range(n)] for n in heat.shape)
    patches = HeatmapData(
        heat, rows, columns, "how much of each patch came to [CLS]", "row", "column", "share", cell=32
    )
    return Visualization(draw, lambda: heatmap_page(wish.title("rollout"), said, [patches], [figures.svg(draw())]))


def _said(wish: ViewOptions) -> str:
    """The classifier's word for an image."""
    with torch.no_grad():
        logits = wish.model(wish.read.batch).logits
    if logits is None:
        return ""
    chance, best = logits[0].softmax(dim=-1).max(dim=-1)
    labels = wish.model.config.labels
    return f"{labels[int(best)] if labels else int(best)} ({100 * float(chance):.0f} %)"


def alignment_view(wish: ViewOptions) -> Visualization:
    """Where in the source each target was looked for: the mean over heads and layers unless one is chosen."""
    weights = look.alignment(wish.model, wish.read, wish.layer, wish.head)
    rows, columns = wish.read.targets, wish.read.source
    title = wish.title("alignment")

    def draw() -> Figure:
        return heatmaps.heatmap(
            weights[: len(rows)],
            rows,
            columns,
            title=title,
            row_name="written",
            column_name="read",
            scale="weight",
        )

    maps = look.attention_weights(wish.model, wish.read, "cross", wish.layer)
    told = {key: look.axis_labels(wish.read, key) for key in maps}
    if len(maps) > 1:
        maps["all layers"] = torch.stack(list(maps.values())).mean(dim=0)
        told["all layers"] = rows, columns
    return Visualization(draw, lambda: attention_page(title, wish.text, maps, told, head=wish.head))


def ablation_view(wish: ViewOptions) -> Visualization:
    """How far the output moves without each head."""
    scores = look.head_importance(wish.model, wish.read.batch, wish.kind, how=wish.how or "zero")  # type: ignore[arg-type]
    layers, count = [str(i) for i in range(len(scores))], [str(i) for i in range(scores.shape[1])]
    title = wish.title("what each head is worth here")
    rows = [[f"layer {i}", *(f"{x:.4f}" for x in row)] for i, row in enumerate(scores.tolist())]
    return _plain(
        wish,
        title,
        lambda: heatmaps.heatmap(
            scores, layers, count, title=title, row_name="layer", column_name="head", scale="KL (nats)"
        ),
        [HeatmapData(scores, layers, count, "", "layer", "head", "KL (nats)", cell=28)],
        [html_table(["without head", *count], rows)],
    )


def lens_view(wish: ViewOptions) -> Visualization:
    """What each layer would say."""
    found = logit_lens(wish.model, wish.read.batch)
    writer = None if wish.tokenizer is None else wish.tokenizer.target
    pieces = [[token_label(writer, i) for i in row] for row in found.ids[:, :, 0].tolist()]
    title = wish.title("what each layer would say")
    rows = [[layer, *(f"{p:.3f}" for p in row)] for layer, row in zip(found.layers, found.final.tolist(), strict=True)]
    best = [
        [
            ", ".join(f"{token_label(writer, i)} {100 * p:.1f} %" for i, p in zip(*some, strict=True))
            for some in zip(*layer, strict=True)
        ]
        for layer in zip(found.ids.tolist(), found.probabilities.tolist(), strict=True)
    ]
    said = HeatmapData(
        found.probabilities[:, :, 0].flip(0), found.layers[::-1], wish.read.tokens, "", "after layer", "at",
        "probability", top=1.0, words=pieces[::-1], notes=best[::-1],
    )  # fmt: skip
    return _plain(
        wish,
        title,
        lambda: heatmaps.lens_heatmap(found, wish.read.tokens, pieces, title=title),
        [said],
        [html_table(["p of the last layer's token, after layer", *wish.read.tokens], rows)],
    )


def similarity_view(wish: ViewOptions) -> Visualization:
    """How alike the tokens are: as they come in, halfway, and at the end."""
    if wish.kind is not None and wish.kind not in stack_names(wish.model):
        raise ValueError(
            f"this model has no {wish.kind} whose embeddings are seen: {', '.join(stack_names(wish.model))}"
        )
    half = wish.kind or stack_names(wish.model)[0]
    layers = hidden_states(wish.model, wish.read.batch, half)[:, 0].cpu()
    last = len(layers) - 1
    chosen = sorted({0, last // 2, last}) if wish.layer is None else [wish.layer + 1]
    if not all(0 <= i <= last for i in chosen):
        raise ValueError(f"there is no layer {wish.layer}: this model has 0 to {last - 1}")
    called = ["as they come in" if i == 0 else f"after layer {i - 1}" for i in chosen]
    title = wish.title("how alike its tokens are")
    labels = wish.read.labels(half)
    alike = [cosine_similarity(layers[i]) for i in chosen]
    return _plain(
        wish,
        title,
        lambda: heatmaps.similarity_heatmaps(alike, called, labels, title=title),
        [
            HeatmapData(x, labels, labels, name, scale="cosine", signed=True, top=1.0)
            for x, name in zip(alike, called, strict=True)
        ],
    )


def projection_view(wish: ViewOptions) -> Visualization:
    """How alike the tokens are as they enter a layer, the last unless given, and to a head's queries and keys."""
    half = stack_names(wish.model)[-1]
    layers = [name for name in activation_names(wish.model) if name.startswith(half) and name.endswith(".self.queries")]
    if not layers:
        raise ValueError(
            f"a {wish.model.family} model has no self-attention: its queries and keys are what is compared"
        )
    layer, head = len(layers) - 1 if wish.layer is None else wish.layer, wish.head or 0
    both = projection_similarity(wish.model, wish.read.batch, layer, head)
    called = [f"before layer {layer}", f"queries and keys of head {head}"]
    title = wish.title("how alike its tokens are, before and after projection")
    labels = wish.read.labels(half)
    return _plain(
        wish,
        title,
        lambda: heatmaps.similarity_heatmaps([x.cpu() for x in both], called, labels, title=title),
        [
            HeatmapData(x.cpu(), labels, labels, name, scale="cosine", signed=True, top=1.0)
            for x, name in zip(both, called, strict=True)
        ],
    )


def token_view(wish: ViewOptions) -> Visualization:
    """The text cut into tokens; of a language model, with its surprise at each."""
    read = wish.read
    if read.batch.images is not None:
        raise ValueError(f"{wish.name} reads images, which are not cut into tokens of a vocabulary")
    labels = read.source or read.tokens  # what was given, not what an encoder-decoder answered
    ids: list[int] = (read.batch.ids if read.batch.source is None else read.batch.source)[0].tolist()
    bits = [None] * len(labels) if read.source else surprisals(wish.model, read)
    title = wish.title(f"{len(labels)} tokens")
    told = list(zip(labels, ids, bits, strict=True))
    rows = [(i, label, n, *([] if b is None else [f"{b:.2f}"])) for i, (label, n, b) in enumerate(told)]
    head = ["position", "token", "id", *(["surprise (bits)"] if any(b is not None for b in bits) else [])]
    return Visualization(
        lambda: charts.token_chart(labels, ids, bits, title=title),
        lambda: token_page(title, wish.text, told, [html_table(head, rows)]),
    )


@torch.no_grad()
def surprisals(model: Model, reading: ModelInput) -> list[float | None]:
    """-log2 p of each token after those before it; None of the first, and of models that do not go on with a text."""
    nothing: list[float | None] = [None] * len(reading.tokens)
    logits = model(reading.batch).logits if isinstance(model, DecoderModel) else None
    if logits is None:
        return nothing
    ids = reading.batch.ids[0]
    told = logits[0, :-1].float().log_softmax(dim=-1)
    known = ids[1:].clamp(max=told.shape[-1] - 1)
    return [None, *(told.gather(1, known[:, None])[:, 0] / -math.log(2)).tolist()]


def position_view(wish: ViewOptions) -> Visualization:
    """How the model tells positions apart."""
    n = 50 if wish.length is None else wish.length
    found = position_encoding(wish.model, n)
    title = wish.title(found.about)
    if found.kind == "bias":
        reach = found.values.shape[1]
        x = list(range(-n + 1, reach - n + 1))
        heads = [str(i) for i in range(len(found.values))]
        return _plain(
            wish,
            title,
            lambda: charts.line_chart(x, found.values, title=title, x_name="distance", y_name="added to the score"),
            [
                HeatmapData(
                    found.values,
                    heads,
                    [str(i) for i in x],
                    "",
                    "head",
                    "distance",
                    "added",
                    signed=True,
                    cell=12,
                )
            ],
        )
    across = "pair of dimensions" if found.kind == "rotary" else "dimension"
    rows, width = found.values.shape
    labels = [str(i) for i in range(rows)], [str(i) for i in range(width)]
    most, cell = heatmaps.robust_max(found.values), max(2, min(8, 900 // width))
    return _plain(
        wish,
        title,
        lambda: heatmaps.position_heatmap(found.values, title=title, column_name=across),
        [HeatmapData(found.values, *labels, "", "position", across, signed=True, top=most, cell=cell)],
    )


def format_names(model: Model) -> str:
    """All names that can be captured, with their shapes, as lines of text."""
    found = {name: f"({', '.join(map(str, shape))})" for name, shape in activation_names(model).items()}
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {shape}" for name, shape in found.items())


VIEWS: dict[str, Callable[[ViewOptions], Visualization]] = {
    "attention": attention_view,
    "heads": heads_view,
    "rollout": rollout_view,
    "alignment": alignment_view,
    "ablation": ablation_view,
    "lens": lens_view,
    "embeddings": similarity_view,
    "projection": projection_view,
    "tokens": token_view,
    "positions": position_view,
}
