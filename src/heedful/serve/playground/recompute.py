"""Attention of any layer without running the whole model again.

One forward pass keeps the inputs of each attention layer: 1.5 MB a layer for 512 tokens of GPT-2, where the weights
take 12.6 MB. From its inputs a single layer is recomputed on demand, with bit-identical results. What is needed of all
layers is reduced layer by layer during the pass, so that the weights of two layers are never in memory together.

    H heads, T rows, S columns
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, Model
from heedful.models.encoder import EncoderModel
from heedful.nn.attention import Attention
from heedful.nn.recurrent import Decoder
from heedful.observe.capture import Edit, capture

LayerInputs = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]  # args and kwargs, by the name of the layer's weights


def attention_module(model: Model, name: str) -> nn.Module:
    """The module that computes the weights of this name; of a recurrent decoder the decoder itself, for all steps."""
    half, layer, kind, _ = name.split(".")
    part = model.get_submodule(half)
    if isinstance(part, Decoder):
        return part
    block = part.get_submodule(f"blocks.{layer}")
    found = block.cross if kind == "cross" else block.attention
    assert isinstance(found, Attention)
    return found


def capture_layer_inputs(model: Model, batch: Batch, names: list[str]) -> LayerInputs:
    """Run the model, without its head where that is possible, and keep the inputs of these attention layers."""
    found: LayerInputs = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _module, args, kwargs: found.update({name: (args, kwargs)})

    with ExitStack() as stack:
        for name in names:
            module = attention_module(model, name)
            stack.callback(module.register_forward_pre_hook(remember(name), with_kwargs=True).remove)
        if isinstance(model, DecoderModel | EncoderModel | EncoderDecoderModel):
            model.hidden(batch)
        else:
            model(batch)
    return found


def recompute_layer(model: Model, inputs: LayerInputs, name: str, parts: tuple[str, ...]) -> list[Tensor]:
    """Activations of one layer ("queries", "weights", ...), from its inputs: each (H, ...), of the batch's one row."""
    base = name.rpartition(".")[0]
    places = [f"{base}.{part}" for part in parts]
    args, kwargs = inputs[name]
    with capture(model, places) as acts:
        attention_module(model, name)(*args, **kwargs)
    return [acts[place][0].float().cpu() for place in places]


def reduce_layers(reduce: Callable[[Tensor], Tensor], names: list[str]) -> tuple[dict[str, Edit], dict[str, Tensor]]:
    """Edits that change nothing, and a dict that they fill in a pass: `reduce` of each layer's weights (H, T, S)."""
    found: dict[str, Tensor] = {}

    def edit_of(name: str) -> Edit:
        def edit(x: Tensor) -> Tensor:
            found[name] = reduce(x[0].float().cpu())
            return x

        return edit

    return {name: edit_of(name) for name in names}, found
