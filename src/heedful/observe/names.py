"""One table of names for what a model computes on the way, the same for every family.

    decoder.embeddings            what stands for each token or patch               (B, T, E)
    decoder.positions             what is added to say where it stands              (1, T, E)
    decoder.bias                  what distance adds to the scores                  (1, H, T, S)
    decoder.0.before              the residual stream before a block, and after it  (B, T, E)
    decoder.0.self.queries        rotated where the model rotates                   (B, H, T, D)
    decoder.0.self.keys           likewise, and values; with all that is cached     (B, G, S, D)
    decoder.0.self.scores         -inf where looking is not allowed                 (B, H, T, S)
    decoder.0.self.weights        their softmax                                     (B, H, T, S)
    decoder.0.self.heads          what each head brings back                        (B, H, T, D)
    decoder.0.self.output         all heads through the output projection           (B, T, E)
    decoder.0.feedforward.hidden  after the activation, and gated                   (B, T, F)
    decoder.0.feedforward.output                                                    (B, T, E)
    decoder.0.after
    decoder.output                the last hidden states, after the last norm       (B, T, E)
    logits, pooled, next_sentence

An encoder has the same; a decoder beside one has `decoder.0.cross.*` too. A recurrent encoder-decoder has `after` and
`cross` of its top layer, which is the only one that PyTorch's cells show; it has one head.

    B batch, T target, S source, H heads, G key/value heads, D head size, E width, F hidden width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from heedful.models.base import EncoderDecoderModel, Model
from heedful.nn.attention import Attention, Watch
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead, MaskedHead
from heedful.nn.recurrent import Align, Decoder, Recurrence
from heedful.nn.stack import Stack

Shape = tuple[str | int, ...]
WATCHED = ("queries", "keys", "values", "scores", "weights", "heads")
SIDES = {"encoder": ("source_embed", "embed_source"), "decoder": ("target_embed", "embed_target")}


@dataclass(frozen=True)
class HookPoint:
    """Where a named value is: what goes into a module (`side` "input") or comes out of it, or what a method returns."""

    name: str
    shape: Shape
    module: nn.Module
    side: Literal["input", "output"] = "output"
    item: int | None = None  # of an output that is a tuple
    method: str | None = None  # of the model, where no module computes it
    watch: Watch | None = None  # must be on for it to be computed
    during: str | None = None  # a method of the model: both halves share the module, this half calls it from there
    joined: int | None = None  # a module that computes it in several calls: the dimension along which they follow
    within: nn.Module | None = None  # and the module whose one call those belong to


def hook_points(model: Model) -> dict[str, HookPoint]:
    """Every name that this model has, in the order in which it computes them."""
    return {place.name: place for place in _hook_points(model)}


def activation_names(model: Model) -> dict[str, Shape]:
    """The names and shapes of all that can be captured; a letter is a size that depends on the input."""
    return {name: place.shape for name, place in hook_points(model).items()}


def stack_names(model: Model) -> list[str]:
    """ "encoder", "decoder" or both; the bag of words of CBOW is an encoder."""
    return [half for half in SIDES if hasattr(model, half)] or ["encoder"]


def _hook_points(model: Model) -> Iterator[HookPoint]:
    for half in stack_names(model):
        yield from _inputs(model, half)
        part = getattr(model, half, None)
        if isinstance(part, Stack):
            yield from _stack(half, part, model.config.d_model)
        elif isinstance(part, Recurrence):
            top = part.cells.num_layers - 1
            shape = ("B", _length(half), part.d_model)
            yield HookPoint(f"{half}.{top}.after", shape, part, item=0)
            yield HookPoint(f"{half}.state", ("B", part.cells.num_layers, "C"), part, item=1)
        elif isinstance(part, Decoder):
            yield from _recurrent(half, part)
    yield from _outputs(model)


def _length(half: str) -> str:
    return "S" if half == "encoder" else "T"


def _inputs(model: Model, half: str) -> Iterator[HookPoint]:
    own, method = SIDES[half]
    shape: Shape = ("B", _length(half), getattr(model.config, "d_embed", None) or model.config.d_model)
    during = method if isinstance(model, EncoderDecoderModel) else None
    for name in (own, "embed", "patch"):
        module = getattr(model, name, None)
        if isinstance(module, nn.Module):
            yield HookPoint(f"{half}.embeddings", shape, module, during=during)
            break
    position = getattr(model, "position", None)
    if isinstance(position, nn.Module):
        yield HookPoint(f"{half}.positions", (1, *shape[1:]), position, during=during)
    elif position is not None and hasattr(model, "positions"):  # ViT's, resized to the image
        yield HookPoint(f"{half}.positions", shape[1:], model, method="positions")


def _stack(half: str, stack: Stack, width: int) -> Iterator[HookPoint]:
    length = _length(half)
    stream = ("B", length, width)
    if stack.bias is not None:
        yield HookPoint(f"{half}.bias", (1, "H", length, length), stack.bias)
    for i, block in enumerate(stack.blocks):
        assert isinstance(block, Block)
        base = f"{half}.{i}"
        yield HookPoint(f"{base}.before", stream, block, "input")
        yield from _attention(f"{base}.self", block.attention, (length, length), stream)
        if block.cross is not None:
            yield from _attention(f"{base}.cross", block.cross, (length, "S"), stream)
        yield from _feedforward(f"{base}.feedforward", block.feedforward, stream)
        yield HookPoint(f"{base}.after", stream, block)
    yield HookPoint(f"{half}.output", stream, stack)


def _attention(base: str, layer: Attention, lengths: tuple[str, str], stream: Shape) -> Iterator[HookPoint]:
    target, source = lengths
    query, key = ("B", layer.n_heads, target, layer.d_head), ("B", layer.n_kv_heads, source, layer.d_head)
    square = ("B", layer.n_heads, target, source)
    shapes: list[Shape] = [query, key, key, square, square, query]
    for name, shape in zip(WATCHED, shapes, strict=True):
        yield HookPoint(f"{base}.{name}", shape, getattr(layer.watch, name), watch=layer.watch)
    yield HookPoint(f"{base}.output", stream, layer)


def _feedforward(base: str, network: nn.Module, stream: Shape) -> Iterator[HookPoint]:
    if isinstance(network, MixtureOfExperts):
        yield HookPoint(f"{base}.router", ("B·T", len(network.experts)), network.router)
        for i, expert in enumerate(network.experts):
            assert isinstance(expert, FeedForward)
            yield HookPoint(f"{base}.experts.{i}.hidden", ("N", _hidden_width(expert)), expert.down, "input")
    elif isinstance(network, FeedForward):
        yield HookPoint(f"{base}.hidden", (*stream[:2], _hidden_width(network)), network.down, "input")
    yield HookPoint(f"{base}.output", stream, network)


def _hidden_width(network: FeedForward) -> int | str:
    width: int | str = getattr(network.down, "in_features", "F")
    return width


def _recurrent(half: str, decoder: Decoder) -> Iterator[HookPoint]:
    recurrence, width = decoder.recurrence, decoder.recurrence.d_model
    base = f"{half}.{recurrence.cells.num_layers - 1}"
    yield HookPoint(f"{base}.after", ("B", "T", width), recurrence, item=0, joined=1, within=decoder)
    align = getattr(decoder, "align", None)
    if isinstance(align, Align):
        query, key, square = ("B", 1, "T", width), ("B", 1, "S", width), ("B", 1, "T", "S")
        shapes: list[Shape] = [query, key, key, square, square, query]
        for name, shape in zip(WATCHED, shapes, strict=True):
            module = getattr(align.watch, name)
            joined = None if shape is key else 2
            yield HookPoint(f"{base}.cross.{name}", shape, module, watch=align.watch, joined=joined, within=decoder)
    yield HookPoint(f"{half}.output", ("B", "T", width), decoder, item=0)


def _outputs(model: Model) -> Iterator[HookPoint]:
    pooler, following, head = (getattr(model, name, None) for name in ("pooler", "next_sentence", "head"))
    if isinstance(pooler, nn.Module):
        yield HookPoint("pooled", ("B", model.config.d_model), pooler)
    if isinstance(following, nn.Module):
        yield HookPoint("next_sentence", ("B", 2), following)
    if isinstance(head, LanguageHead | MaskedHead):
        last = head.vocabulary if isinstance(head, MaskedHead) else head
        width: int | str = "V" if last.weight is None else last.weight.shape[0]
        yield HookPoint("logits", ("B", _length(stack_names(model)[-1]), width), head)
    elif isinstance(head, nn.Linear):
        per_token = getattr(model.config, "head", "") in ("tag", "answer")
        yield HookPoint("logits", ("B", "S", head.out_features) if per_token else ("B", head.out_features), head)
