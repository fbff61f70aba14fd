"""Any layer's attention without running the whole model again.

A pass keeps what enters each attention layer: of 512 tokens of GPT-2 1.5 MB a layer, where the weights are 12.6 MB.
From that, one layer alone is computed when somebody looks at it, to the same bits. What needs all layers is made of
each as the pass comes through it, so that no two layers' weights are in memory at once.

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

Entered = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]  # by the name of the layer's weights


def computing(model: Model, name: str) -> nn.Module:
    """The module whose one call computes the weights of this name: a recurrent decoder's steps belong together."""
    half, layer, which, _ = name.split(".")
    part = model.get_submodule(half)
    if isinstance(part, Decoder):
        return part
    block = part.get_submodule(f"blocks.{layer}")
    found = block.cross if which == "cross" else block.attention
    assert isinstance(found, Attention)
    return found


def entering(model: Model, batch: Batch, names: list[str]) -> Entered:
    """What enters these layers in a pass of the model; its head is left out, if that is possible."""
    found: Entered = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _module, given, named: found.update({name: (given, named)})

    with ExitStack() as stack:
        for name in names:
            module = computing(model, name)
            stack.callback(module.register_forward_pre_hook(remember(name), with_kwargs=True).remove)
        if isinstance(model, DecoderModel | EncoderModel | EncoderDecoderModel):
            model.hidden(batch)
        else:
            model(batch)
    return found


def within(model: Model, entered: Entered, name: str, what: tuple[str, ...]) -> list[Tensor]:
    """What is computed in one layer, as "queries" or "weights", from what entered it: each (H, ...), of the one row."""
    base = name.rpartition(".")[0]
    places = [f"{base}.{part}" for part in what]
    given, named = entered[name]
    with capture(model, places) as acts:
        computing(model, name)(*given, **named)
    return [acts[place][0].float().cpu() for place in places]


def passing(make: Callable[[Tensor], Tensor], names: list[str]) -> tuple[dict[str, Edit], dict[str, Tensor]]:
    """Edits for a pass that change nothing, and what they will have made of each layer's weights (H, T, S) by then."""
    found: dict[str, Tensor] = {}

    def see(name: str) -> Edit:
        def edit(x: Tensor) -> Tensor:
            found[name] = make(x[0].float().cpu())
            return x

        return edit

    return {name: see(name) for name in names}, found
