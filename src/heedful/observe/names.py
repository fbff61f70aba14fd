"""The names of a model's activations, the same for every family, and the hook points where they are.

    decoder.embeddings            of tokens or patches                              (B, T, E)
    decoder.positions             added position encodings                          (1, T, E)
    decoder.bias                  added to the attention scores, by distance        (1, H, T, S)
    decoder.0.before              the residual stream before a block, and after it  (B, T, E)
    decoder.0.self.queries        after rotary positions, if there are any          (B, H, T, D)
    decoder.0.self.keys           likewise, and values; with the KV cache           (B, G, S, D)
    decoder.0.self.scores         -inf where masked                                 (B, H, T, S)
    decoder.0.self.weights        their softmax                                     (B, H, T, S)
    decoder.0.self.heads          the weighted sum of values of each head           (B, H, T, D)
    decoder.0.self.output         after the output projection                       (B, T, E)
    decoder.0.feedforward.hidden  after the activation, and gated                   (B, T, F)
    decoder.0.feedforward.output                                                    (B, T, E)
    decoder.0.after
    decoder.output                the last hidden states, after the last norm       (B, T, E)
    logits, pooled, next_sentence

An encoder has the same names; a decoder of an encoder-decoder has `decoder.0.cross.*` too. A recurrent encoder-decoder
has `after` and `cross` of its top layer, the only one whose output PyTorch's LSTM and GRU return; it has one head.

    B batch, T target, S source, H heads, G key/value heads, D head size, E width, F hidden width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from heedful.models.base import EncoderDecoderModel, Model
from heedful.models.heads import ChoiceHead, MaskedHead, PoolerHead, PretrainingHead, SequenceHead, TokenHead
from heedful.nn.attention import Attention, Watch
from heedful.nn.block import Block
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.head import LabelHead, LanguageHead
from heedful.nn.recurrent import Align, Decoder, Recurrence
from heedful.nn.stack import Stack

Shape = tuple[str | int, ...]
WATCHED = ("queries", "keys", "values", "scores", "weights", "heads")
SIDES = {"encoder": ("source_embed", "encode"), "decoder": ("target_embed", "decode")}


@dataclass(frozen=True)
class HookPoint:
    """Where an activation is: the input or output (`side`) of a module, or the return value of a method."""

    name: str
    shape: Shape
    module: nn.Module
    side: Literal["input", "output"] = "output"
    item: int | None = None  # index into an output that is a tuple
    method: str | None = None  # of the model: its return value, where no module computes it
    watch: Watch | None = None  # switches to the explicit attention that computes it
    during: str | None = None  # a method of the model: only calls of the module within it count (shared embeddings)
    joined: int | None = None  # the dimension along which the pieces of several calls are concatenated
    within: nn.Module | None = None  # the module whose one call those calls belong to


def hook_points(model: Model) -> dict[str, HookPoint]:
    """The hook points of a model by activation name, in the order of computation."""
    return {point.name: point for point in _hook_points(model)}


def activation_names(model: Model) -> dict[str, Shape]:
    """The activations that can be captured: names and shapes; a letter is a size that depends on the input."""
    return {name: point.shape for name, point in hook_points(model).items()}


def stack_names(model: Model) -> list[str]:
    """ "encoder", "decoder" or both; CBOW's bag of words counts as an encoder."""
    return [stack_name for stack_name in SIDES if hasattr(model, stack_name)] or ["encoder"]


def _hook_points(model: Model) -> Iterator[HookPoint]:
    for stack_name in stack_names(model):
        yield from _inputs(model, stack_name)
        part = getattr(model, stack_name, None)
        if isinstance(part, Stack):
            yield from _stack(stack_name, part, model.config.d_model)
        elif isinstance(part, Recurrence):
            top = part.cells.num_layers - 1
            shape = ("B", _length(stack_name), part.d_model)
            yield HookPoint(f"{stack_name}.{top}.after", shape, part, item=0)
            yield HookPoint(f"{stack_name}.state", ("B", part.cells.num_layers, "C"), part, item=1)
        elif isinstance(part, Decoder):
            yield from _recurrent(stack_name, part)
    yield from _outputs(model)


def _length(stack_name: str) -> str:
    return "S" if stack_name == "encoder" else "T"


def _inputs(model: Model, stack_name: str) -> Iterator[HookPoint]:
    own, method = SIDES[stack_name]
    shape: Shape = ("B", _length(stack_name), getattr(model.config, "d_embed", None) or model.config.d_model)
    during = method if isinstance(model, EncoderDecoderModel) else None
    for name in (own, "embed", "patch"):
        module = getattr(model, name, None)
        if isinstance(module, nn.Module):
            yield HookPoint(f"{stack_name}.embeddings", shape, module, during=during)
            break
    position = getattr(model, "position", None)
    if isinstance(position, nn.Module):
        yield HookPoint(f"{stack_name}.positions", (1, *shape[1:]), position, during=during)
    elif position is not None and hasattr(model, "positions"):  # ViT's, resized to the image
        yield HookPoint(f"{stack_name}.positions", shape[1:], model, method="positions")


def _stack(stack_name: str, stack: Stack, width: int) -> Iterator[HookPoint]:
    length = _length(stack_name)
    stream = ("B", length, width)
    if stack.bias is not None:
        yield HookPoint(f"{stack_name}.bias", (1, "H", length, length), stack.bias)
    for i, block in enumerate(stack.blocks):
        assert isinstance(block, Block)
        base = f"{stack_name}.{i}"
        yield HookPoint(f"{base}.before", stream, block, "input")
        yield from _attention(f"{base}.self", block.attention, (length, length), stream)
        if block.cross is not None:
            yield from _attention(f"{base}.cross", block.cross, (length, "S"), stream)
        yield from _feedforward(f"{base}.feedforward", block.feedforward, stream)
        yield HookPoint(f"{base}.after", stream, block)
    yield HookPoint(f"{stack_name}.output", stream, stack)


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


def _recurrent(stack_name: str, decoder: Decoder) -> Iterator[HookPoint]:
    recurrence, width = decoder.recurrence, decoder.recurrence.d_model
    base = f"{stack_name}.{recurrence.cells.num_layers - 1}"
    yield HookPoint(f"{base}.after", ("B", "T", width), recurrence, item=0, joined=1, within=decoder)
    align = getattr(decoder, "align", None)
    if isinstance(align, Align):
        query, key, square = ("B", 1, "T", width), ("B", 1, "S", width), ("B", 1, "T", "S")
        shapes: list[Shape] = [query, key, key, square, square, query]
        for name, shape in zip(WATCHED, shapes, strict=True):
            module = getattr(align.watch, name)
            joined = None if shape is key else 2
            yield HookPoint(f"{base}.cross.{name}", shape, module, watch=align.watch, joined=joined, within=decoder)
    yield HookPoint(f"{stack_name}.output", ("B", "T", width), decoder, item=0)


def _outputs(model: Model) -> Iterator[HookPoint]:
    head = getattr(model, "head", None)
    rows: Shape = ("B", "C") if isinstance(head, ChoiceHead) else ("B",)
    if isinstance(head, PoolerHead | PretrainingHead | SequenceHead):
        yield HookPoint("pooled", (*rows, model.config.d_model), head.pooler)
    if isinstance(head, PretrainingHead):
        yield HookPoint("next_sentence", ("B", 2), head.next_sentence)
    if isinstance(head, LanguageHead | MaskedHead):
        last = head.vocabulary if isinstance(head, MaskedHead) else head
        width: int | str = "V" if last.weight is None else last.weight.shape[0]
        yield HookPoint("logits", ("B", _length(stack_names(model)[-1]), width), head)
    elif isinstance(head, LabelHead):
        yield HookPoint("logits", ("B", head.classifier.out_features), head)
    elif isinstance(head, SequenceHead | TokenHead):
        n_labels = head.classifier.out_features
        yield HookPoint("logits", ("B", "S", n_labels) if head.per_token else (*rows, n_labels), head.classifier)
