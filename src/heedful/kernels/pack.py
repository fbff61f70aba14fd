"""Packing a loaded model's weights for speed, or into fewer bits: what a kind means is in kernels/packed.py.

The matrices of the blocks and of the language head are packed one by one, each freed when its packed form is there;
queries, keys and values, and a gate with what it gates, become one product. The rest follows the kind:

    kind      activations, norms, biases      table of embeddings              bytes per weight
    float32   float32                         float32, beside a packed head    4
    bfloat16  float32, on a GPU bfloat16      bfloat16, beside a packed head   2
    float16   float32, on a GPU float16       float16, beside a packed head    2
    int8      float32, on a GPU bfloat16      int8, a scale per row, likewise  1.0625, of which scales 0.0625
    int4      as int8                         int8, as is the head             0.625, of which scales 0.125

A head that shares the table's numbers is packed apart from it, since rows cannot be read from the packed form. With
int4 the head and the table are int8: together they decide every token. Experts' routers, and recurrent cells, stay
as they are: they are small, or there is no packed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from heedful.kernels.cpu.decode import fuse
from heedful.kernels.packed import FLOATS, Frozen, Kind, Packed, Plain, Table, activations, product
from heedful.models.base import GenerativeModel, Model
from heedful.nn.block import Block
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.lora import refuse_adapted
from heedful.nn.stack import Stack

M = TypeVar("M", bound=Model)


def pack(model: M, kind: Kind) -> M:
    """The same model, changed in place; it then runs, but neither learns nor moves nor is saved."""
    if kind not in get_args(Kind):
        raise ValueError(f"weights are packed as {', '.join(get_args(Kind))}, not as {kind}")
    if model.packed is not None:
        raise ValueError(f"this model is packed already, as {model.packed}: load it anew")
    refuse_adapted(model, "packed")
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not blocks and not isinstance(model, GenerativeModel):
        raise ValueError(f"a {model.family} model has nothing to pack")
    largest = torch.finfo(torch.float16).max
    if kind == "float16" and any(p.abs().max() > largest for p in model.parameters()):
        raise ValueError(f"some weights are beyond float16's {largest:,.0f}: use bfloat16")
    model.packed, model.n_packed = kind, model.n_parameters()
    dtype = activations(model.device.type, kind)
    if not blocks and kind not in FLOATS:
        dtype = torch.float32  # recurrent cells are not packed, and cuDNN prefers it
    packer = Packer(kind, dtype)
    for block in blocks:
        packer.block(block)
    for head in [m for m in model.modules() if isinstance(m, LanguageHead)]:
        packer.head(head)
    packer.rest(model)
    for stack in [m for m in model.modules() if isinstance(m, Stack) and m.causal]:
        stack.fused = fuse([b for b in stack.blocks if isinstance(b, Block)])
    return model


def pack_as_stored(model: M) -> M:
    """Packed for speed in the type that its weights have: for who only runs it."""
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    return pack(model, cast(Kind, stored)) if isinstance(model, GenerativeModel) and stored in FLOATS else model


class Packer:
    """What packing does to each part of a model; `dtype` is that of the activations."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype

    def block(self, block: Block) -> None:
        attention = block.attention
        attention.joint = self.joined([attention.query, attention.key, attention.value])
        del attention.query, attention.key, attention.value
        for module in list(block.modules()):
            if isinstance(module, FeedForward) and module.gate is not None:
                module.joint = self.joined([module.gate, module.up])
                del module.gate, module.up
            if not isinstance(module, MixtureOfExperts):  # of which the linear part is the router
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(module, name, self.joined([child]))

    def head(self, head: LanguageHead) -> None:
        packed = self.product(head.weight, head.bias, "int8" if self.kind == "int4" else self.kind)
        if not isinstance(packed, Plain):  # it would only be a second name for the same
            head.packed = packed
            head.weight = head.bias = None  # type: ignore[assignment]

    def rest(self, model: Model) -> None:
        """Tables of tokens narrower than the activations; what remains takes the activations' type."""
        if self.kind in ("int8", "int4") or FLOATS[self.kind] != self.dtype:
            names = [n for n, m in model._modules.items() if isinstance(m, Embedding) and n.endswith("embed")]
            packed: dict[nn.Module, Table] = {}  # two names may have one table
            for name in names:
                table = getattr(model, name)
                if table not in packed:
                    packed[table] = Table(table, self.kind, self.dtype)
                setattr(model, name, packed[table])
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self.dtype)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # one memory again, as cuDNN wants it

    def joined(self, layers: Sequence[nn.Linear]) -> Packed:
        """One product in place of several on the same input."""
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [layer.bias for layer in layers]
        if all(b is None for b in biases):
            return self.product(weight, None, self.kind)
        given: list[Tensor] = [
            b if b is not None else layer.weight.new_zeros(layer.out_features)
            for b, layer in zip(biases, layers, strict=True)
        ]
        return self.product(weight, torch.cat(given), self.kind)

    def product(self, weight: Tensor, bias: Tensor | None, kind: Kind) -> Packed:
        return product(weight, None if bias is None else bias.detach().to(self.dtype), kind)


def n_bytes(model: nn.Module) -> int:
    """The memory of a model's weights, packed or not."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors) + sum(m.nbytes for m in model.modules() if isinstance(m, Frozen))
