"""The views of `heedful show`: each computes something of a model and a text, and gives a figure and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from heedful.text.plural import counted
from heedful.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".html", *figures.ENDINGS)


@dataclass(frozen=True)
class ViewOptions:
    """The model, the input (None for views that need none), and what to show of it."""

    model: Model
    tokenizer: Tokenizer | None
    name: str
    inputs: ModelInput | None = None
    text: str = ""
    kind: look.Kind | None = None
    layer: int | None = None
    head: int | None = None
    ablation: Literal["zero", "mean"] | None = None
    length: int | None = None

    @property
    def model_input(self) -> ModelInput:
        """The input; ValueError where none was given."""
        if self.inputs is None:
            raise ValueError("give a text to look at")
        return self.inputs

    def title(self, more: str = "") -> str:
        """A title that begins with the model's name."""
        return f"{self.name}: {more}" if more else self.name


@dataclass(frozen=True)
class Visualization:
    """A figure and an interactive HTML page of the same, both made when they are needed."""

    draw: Callable[[], Figure]
    page: Callable[[], str]

    def save(self, path: Path) -> None:
        """Write the page (.html) or the figure (.png, .svg, .pdf)."""
        ending = path.suffix.lower()
        if ending not in ENDINGS:
            raise ValueError(f"{path}: what is shown is written as {', '.join(ENDINGS)}")
        if ending == ".html":
            path.write_text(self.page(), encoding="utf-8")
        else:
            figures.save_figure(self.draw(), path)


def _heatmap_view(
    options: ViewOptions,
    title: str,
    draw: Callable[[], Figure],
    matrices: list[HeatmapData],
    tables: list[str] | None = None,
) -> Visualization:
    return Visualization(draw, lambda: heatmap_page(title, options.text, matrices, tables=tables or []))


def attention_view(options: ViewOptions) -> Visualization:
    """The attention weights of the heads of a layer, the last unless given; on the page, of every layer."""
    maps = look.attention_weights(options.model, options.model_input, options.kind, options.layer)
    name = list(maps)[-1]
    rows, columns = look.axis_labels(options.model_input, name)
    weights, heads = _heads(maps[name], options.head)

    def draw() -> Figure:
        title = options.title(name.removesuffix(".weights"))
        if len(heads) == 1:
            return heatmaps.heatmap(
                weights[0], rows, columns, title=f"{title}, head {heads[0]}", scale="weight", top=1.0
            )
        return heatmaps.head_heatmaps(weights, rows, columns, [f"head {h}" for h in heads], title=title)

    told = {key: look.axis_labels(options.model_input, key) for key in maps}
    return Visualization(
        draw, lambda: attention_page(options.title("attention"), options.text, maps, told, head=options.head)
    )


def _heads(weights: Tensor, head: int | None) -> tuple[Tensor, list[int]]:
    if head is None:
        return weights, list(range(len(weights)))
    if not 0 <= head < len(weights):
        raise ValueError(f"there is no head {head}: this layer has 0 to {len(weights) - 1}")
    return weights[head : head + 1], [head]


def heads_view(options: ViewOptions) -> Visualization:
    """A thumbnail of every head of every layer."""
    maps = look.attention_weights(options.model, options.model_input, options.kind, options.layer)
    told = {key: look.axis_labels(options.model_input, key) for key in maps}
    kind = options.kind or look.attention_kinds(options.model)[-1]

    def draw() -> Figure:
        return heatmaps.head_thumbnails(torch.stack(list(maps.values())), title=options.title(f"{kind} attention"))

    return Visualization(
        draw, lambda: attention_page(options.title("every head"), options.text, maps, told, overview=True)
    )


def rollout_view(options: ViewOptions) -> Visualization:
    """Attention rollout after a layer, the last unless given; of a ViT, from the patches to [CLS], over the image."""
    if options.kind == "cross":
        raise ValueError("rollout follows self-attention: choose encoder or decoder")
    by_layer = look.attention_rollout(options.model, options.model_input, options.kind)
    layer = len(by_layer) - 1 if options.layer is None else options.layer
    if not 0 <= layer < len(by_layer):
        raise ValueError(f"there is no layer {layer}: this model has 0 to {len(by_layer) - 1}")
    images = options.model_input.batch.images
    if images is not None:
        return _over_image(options, images[0].cpu(), by_layer[layer])
    labels = options.model_input.labels(
        options.kind or [k for k in look.attention_kinds(options.model) if k != "cross"][-1]
    )
    title = options.title(f"attention rollout after layer {layer}")
    rolled, names = by_layer[layer], ("position", "input")
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.heatmap(
            rolled, labels, labels, title=title, row_name=names[0], column_name=names[1], gamma=0.5
        ),
        [HeatmapData(rolled, labels, labels, "", *names, "share", gamma=0.5)],
    )


def _over_image(options: ViewOptions, image: Tensor, rolled: Tensor) -> Visualization:
    """The share of each patch in [CLS]."""
    height, width = options.model.config.patch
    prediction, heat = _prediction(options), rolled[0, 1:].view(image.shape[-2] // height, image.shape[-1] // width)

    def draw() -> Figure:
        return heatmaps.image_overlay(image, heat, title=options.name, prediction=prediction)

    rows, columns = ([str(i + 1) for i in range(n)] for n in heat.shape)
    patches = HeatmapData(
        heat, rows, columns, "how much of each patch came to [CLS]", "row", "column", "share", cell=32
    )
    return Visualization(
        draw, lambda: heatmap_page(options.title("rollout"), prediction, [patches], [figures.svg(draw())])
    )


def _prediction(options: ViewOptions) -> str:
    """The predicted label of an image and its probability; empty without a classifier."""
    with torch.no_grad():
        logits = options.model(options.model_input.batch).logits
    if logits is None:
        return ""
    chance, best = logits[0].softmax(dim=-1).max(dim=-1)
    labels = options.model.config.labels
    return f"{labels[int(best)] if labels else int(best)} ({100 * float(chance):.0f} %)"


def alignment_view(options: ViewOptions) -> Visualization:
    """The alignment of target and source: the mean over heads and layers unless one is chosen."""
    weights = look.alignment(options.model, options.model_input, options.layer, options.head)
    rows, columns = options.model_input.targets, options.model_input.source
    title = options.title("alignment")

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

    maps = look.attention_weights(options.model, options.model_input, "cross", options.layer)
    told = {key: look.axis_labels(options.model_input, key) for key in maps}
    if len(maps) > 1:
        maps["all layers"] = torch.stack(list(maps.values())).mean(dim=0)
        told["all layers"] = rows, columns
    return Visualization(draw, lambda: attention_page(title, options.text, maps, told, head=options.head))


def ablation_view(options: ViewOptions) -> Visualization:
    """The importance of each head by ablation."""
    scores = look.head_importance(
        options.model, options.model_input.batch, options.kind, ablation=options.ablation or "zero"
    )
    layers, count = [str(i) for i in range(len(scores))], [str(i) for i in range(scores.shape[1])]
    title = options.title("what each head is worth here")
    rows = [[f"layer {i}", *(f"{x:.4f}" for x in row)] for i, row in enumerate(scores.tolist())]
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.heatmap(
            scores, layers, count, title=title, row_name="layer", column_name="head", scale="KL (nats)"
        ),
        [HeatmapData(scores, layers, count, "", "layer", "head", "KL (nats)", cell=28)],
        [html_table(["without head", *count], rows)],
    )


def lens_view(options: ViewOptions) -> Visualization:
    """The logit lens: the likeliest token after each layer."""
    found = logit_lens(options.model, options.model_input.batch)
    writer = None if options.tokenizer is None else options.tokenizer.target
    pieces = [[token_label(writer, i) for i in row] for row in found.ids[:, :, 0].tolist()]
    title = options.title("what each layer would say")
    rows = [[layer, *(f"{p:.3f}" for p in row)] for layer, row in zip(found.layers, found.final.tolist(), strict=True)]
    best = [
        [
            ", ".join(f"{token_label(writer, i)} {100 * p:.1f} %" for i, p in zip(*some, strict=True))
            for some in zip(*layer, strict=True)
        ]
        for layer in zip(found.ids.tolist(), found.probabilities.tolist(), strict=True)
    ]
    data = HeatmapData(
        found.probabilities[:, :, 0].flip(0), found.layers[::-1], options.model_input.tokens, "", "after layer", "at",
        "probability", top=1.0, words=pieces[::-1], notes=best[::-1],
    )  # fmt: skip
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.lens_heatmap(found, options.model_input.tokens, pieces, title=title),
        [data],
        [html_table(["p of the last layer's token, after layer", *options.model_input.tokens], rows)],
    )


def similarity_view(options: ViewOptions) -> Visualization:
    """Cosine similarities of the tokens' hidden states: embeddings, a middle layer, the last; or one layer."""
    if options.kind is not None and options.kind not in stack_names(options.model):
        raise ValueError(
            f"this model has no {options.kind} whose embeddings are seen: {', '.join(stack_names(options.model))}"
        )
    stack_name = options.kind or stack_names(options.model)[0]
    layers = hidden_states(options.model, options.model_input.batch, stack_name)[:, 0].cpu()
    last = len(layers) - 1
    chosen = sorted({0, last // 2, last}) if options.layer is None else [options.layer + 1]
    if not all(0 <= i <= last for i in chosen):
        raise ValueError(f"there is no layer {options.layer}: this model has 0 to {last - 1}")
    called = ["as they come in" if i == 0 else f"after layer {i - 1}" for i in chosen]
    title = options.title("how alike its tokens are")
    labels = options.model_input.labels(stack_name)
    alike = [cosine_similarity(layers[i]) for i in chosen]
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.similarity_heatmaps(alike, called, labels, title=title),
        [
            HeatmapData(x, labels, labels, name, scale="cosine", signed=True, top=1.0)
            for x, name in zip(alike, called, strict=True)
        ],
    )


def projection_view(options: ViewOptions) -> Visualization:
    """Cosine similarities of the tokens before a layer (default: the last), and of a head's queries with its keys."""
    stack_name = stack_names(options.model)[-1]
    layers = [
        name
        for name in activation_names(options.model)
        if name.startswith(stack_name) and name.endswith(".self.queries")
    ]
    if not layers:
        raise ValueError(
            f"a {options.model.family} model has no self-attention: its queries and keys are what is compared"
        )
    layer, head = len(layers) - 1 if options.layer is None else options.layer, options.head or 0
    both = projection_similarity(options.model, options.model_input.batch, layer, head)
    called = [f"before layer {layer}", f"queries and keys of head {head}"]
    title = options.title("how alike its tokens are, before and after projection")
    labels = options.model_input.labels(stack_name)
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.similarity_heatmaps([x.cpu() for x in both], called, labels, title=title),
        [
            HeatmapData(x.cpu(), labels, labels, name, scale="cosine", signed=True, top=1.0)
            for x, name in zip(both, called, strict=True)
        ],
    )


def token_view(options: ViewOptions) -> Visualization:
    """The tokens of the text; of a causal language model, with the surprisal of each."""
    inputs = options.model_input
    if inputs.batch.images is not None:
        raise ValueError(f"{options.name} reads images, which are not cut into tokens of a vocabulary")
    labels = inputs.source or inputs.tokens  # what was given, not what an encoder-decoder answered
    ids: list[int] = (inputs.batch.ids if inputs.batch.source is None else inputs.batch.source)[0].tolist()
    bits = [None] * len(labels) if inputs.source else surprisals(options.model, inputs)
    title = options.title(counted(len(labels), "token"))
    told = list(zip(labels, ids, bits, strict=True))
    rows = [(i, label, n, *([] if b is None else [f"{b:.2f}"])) for i, (label, n, b) in enumerate(told)]
    head = ["position", "token", "id", *(["surprise (bits)"] if any(b is not None for b in bits) else [])]
    return Visualization(
        lambda: charts.token_chart(labels, ids, bits, title=title),
        lambda: token_page(title, options.text, told, [html_table(head, rows)]),
    )


@torch.no_grad()
def surprisals(model: Model, inputs: ModelInput) -> list[float | None]:
    """The surprisal -log2 p of each token given those before it; None for the first, and without a causal model."""
    nothing: list[float | None] = [None] * len(inputs.tokens)
    causal = isinstance(model, DecoderModel) and "generate" in model.abilities
    logits = model(inputs.batch).logits if causal else None
    if logits is None:
        return nothing
    ids = inputs.batch.ids[0]
    told = logits[0, :-1].float().log_softmax(dim=-1)
    known = ids[1:].clamp(max=told.shape[-1] - 1)
    return [None, *(told.gather(1, known[:, None])[:, 0] / -math.log(2)).tolist()]


def position_view(options: ViewOptions) -> Visualization:
    """The position encoding: added vectors, rotary cosines, or attention bias by distance."""
    tokens = []
    if options.text:
        if options.tokenizer is None:
            tokens = options.text.split()
        else:
            tokens = [options.tokenizer.token(i) for i in options.tokenizer.encode(options.text, add_special=True)]
    n = options.length or len(tokens) or 50
    found = position_encoding(options.model, n)
    title = options.title(found.about)
    if found.kind == "bias":
        reach = found.values.shape[1]
        x = list(range(-n + 1, reach - n + 1))
        heads = [str(i) for i in range(len(found.values))]
        return _heatmap_view(
            options,
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
    named = [f"{i} {token}" for i, token in enumerate(tokens[:rows])]
    labels = [*named, *(str(i) for i in range(len(named), rows))], [str(i) for i in range(width)]
    most, cell = heatmaps.robust_max(found.values), max(2, min(8, 900 // width))
    return _heatmap_view(
        options,
        title,
        lambda: heatmaps.position_heatmap(found.values, title=title, column_name=across),
        [HeatmapData(found.values, *labels, "", "position", across, signed=True, top=most, cell=cell)],
    )


def format_names(model: Model) -> str:
    """The activation names of a model with their shapes, as lines of text."""
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
