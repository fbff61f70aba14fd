"""`accelerate` replaces modules of a model by faster ones, in place; `restore` undoes those for training.

For **inference** the weight matrices of the blocks and of the language head are packed one by one, each freed once it
is packed; the query, key and value projections become one product, and so do gate and up; on a CPU the blocks of a
decoder become one call (kernels/cpu/decode.py), on a GPU each a few kernels (kernels/cuda/decode.py). The precision
determines:

    precision  activations, norms, biases      embedding table                  bytes per weight
    float32    float32                         float32, beside a packed head    4
    bfloat16   float32, on a GPU bfloat16      bfloat16, beside a packed head   2
    float16    float32, on a GPU float16       float16, beside a packed head    2
    int8       float32, on a GPU bfloat16      int8, likewise                   1.0625, of which scales 0.0625
    int4       as int8                         int8, as is the head             0.625, of which scales 0.125

With int4 the head and the embedding table are int8, since every prediction depends on them. Experts' routers and
recurrent cells are not packed: they are small, or have no packed form. A packed model can be run, but not trained,
moved to another device or saved.

For **training** a pre-norm block becomes one forward and one backward operator on a CPU (kernels/cpu/block.py), and the
three projections of attention one product on a GPU; parameters, their names and their gradients stay the same.

Each replacement has an allow-list of the options it supports (kernels/options.py); modules with others stay unchanged.
"""

from __future__ import annotations

from typing import Literal, TypeVar, cast, get_args

import torch
from torch import nn

from heedful.kernels import options
from heedful.kernels.cpu import library
from heedful.kernels.cpu.block import KernelBlock
from heedful.kernels.cpu.decode import KernelStack
from heedful.kernels.cuda import accelerate_decoder
from heedful.kernels.modules import (
    JointAttention,
    PackedAttention,
    PackedEmbedding,
    PackedFeedForward,
    PackedHead,
    pack_linear,
)
from heedful.kernels.packed import FLOATS, Frozen, Precision, activations
from heedful.models.base import GenerativeModel, Model
from heedful.nn.attention import Attention
from heedful.nn.block import Block, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.lora import refuse_adapted
from heedful.nn.stack import Stack

M = TypeVar("M", bound=nn.Module)
DEVICES = ("cpu", "cuda")  # others, such as Apple's GPUs, have no kernels of their own
TRAINING: dict[type[nn.Module], type[nn.Module]] = {PreNormBlock: KernelBlock, Attention: JointAttention}


def accelerate(model: M, purpose: Literal["inference", "training"], *, precision: Precision | None = None) -> M:
    """Replace modules of the model by faster ones, in place, and return it.

    `precision` is for inference, and that of the model's weights unless given. On a CPU the C kernels are compiled here
    if they are not cached, rather than in the first forward pass.
    """
    restore(model)
    if any(p.device.type == "cpu" for p in model.parameters()):
        library.prepare()
    if purpose == "training":
        if precision is not None:
            raise ValueError("a precision is chosen for inference; training has its own setting (train.precision)")
        for module in model.modules():
            if type(module) in TRAINING and (not isinstance(module, Attention) or _has_plain_projections(module)):
                module.__class__ = TRAINING[type(module)]
        return model
    if not isinstance(model, Model):
        raise ValueError(f"a {type(model).__name__} is no model whose weights can be packed")
    _pack(model, precision or stored_precision(model))
    return model


def restore(model: M) -> M:
    """Put back, in place, the plain modules that `accelerate` for training replaced."""
    plain = {fast: original for original, fast in TRAINING.items()}
    for module in model.modules():
        if type(module) in plain:
            module.__class__ = plain[type(module)]
    return model


def accelerate_as_stored(model: M) -> M:
    """`accelerate` for inference if that loses no precision: a model with something to pack and weights of a type in
    FLOATS, on a device that the kernels are for."""
    first = next(model.parameters())
    lossless = str(first.dtype).removeprefix("torch.") in FLOATS and first.device.type in DEVICES
    return accelerate(model, "inference") if lossless and can_be_packed(model) else model


def can_be_packed(model: nn.Module) -> bool:
    """Whether a model has something to pack: blocks, or a language head."""
    return isinstance(model, GenerativeModel) or any(isinstance(module, Block) for module in model.modules())


def stored_precision(model: nn.Module) -> Precision:
    """The type of a model's weights; float32 if it is none that can be packed."""
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    return cast(Precision, stored) if stored in FLOATS else "float32"


def packed_precision(model: nn.Module) -> Precision | None:
    """The precision of a packed model, None for an unpacked one."""
    return getattr(model, "_packed_precision", None)


def _pack(model: Model, precision: Precision) -> None:
    if precision not in get_args(Precision):
        raise ValueError(f"weights are packed as {', '.join(get_args(Precision))}, not as {precision}")
    if (already := packed_precision(model)) is not None:
        raise ValueError(f"this model is packed already, as {already}: load it anew")
    refuse_adapted(model, "packed")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ValueError("a model that is divided over processes is not packed: load it without quantize")
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not can_be_packed(model):
        raise ValueError(f"a {model.family} model has nothing to pack")
    largest = torch.finfo(torch.float16).max
    if precision == "float16" and any(p.abs().max() > largest for p in model.parameters()):
        raise ValueError(f"some weights are beyond float16's {largest:,.0f}: use bfloat16")
    dtype = activations(model.device.type, precision)
    if not blocks and precision not in FLOATS:
        dtype = torch.float32  # recurrent cells are not packed, and cuDNN prefers it
    for block in blocks:
        _pack_block(block, precision, dtype)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, Embedding)}
    for head in [m for m in model.modules() if options.is_head(m)]:
        assert isinstance(head, LanguageHead)
        tied = id(head.weight) in tables
        PackedHead.replace(head, "int8" if precision == "int4" else precision, dtype, tied=tied)
    _pack_rest(model, precision, dtype)
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        KernelStack.replace(stack)
    if isinstance(model, GenerativeModel):
        accelerate_decoder(model)
    model._packed_precision = precision  # type: ignore[assignment]


def _has_plain_projections(part: Attention) -> bool:
    """Whether nothing stands in the way of computing its projections together."""
    return options.is_attention(part) and all(options.is_linear(getattr(part, name)) for name in options.PROJECTIONS)


def _pack_block(block: Block, precision: Precision, dtype: torch.dtype) -> None:
    if _has_plain_projections(block.attention):
        PackedAttention.replace(block.attention, precision, dtype)
    for module in list(block.modules()):
        if options.is_feedforward(module):
            assert isinstance(module, FeedForward)
            if module.gate is not None and all(options.is_linear(m) for m in (module.gate, module.up, module.down)):
                PackedFeedForward.replace(module, precision, dtype)
        if not isinstance(module, MixtureOfExperts):  # its own linear layer is the router
            for name, child in list(module.named_children()):
                if options.is_linear(child):
                    setattr(module, name, pack_linear([child], precision, dtype))


def _pack_rest(model: Model, precision: Precision, dtype: torch.dtype) -> None:
    """Pack embedding tables that are narrower than the activations; convert the other parameters to their type."""
    if precision in ("int8", "int4") or FLOATS[precision] != dtype:
        packed: dict[nn.Module, PackedEmbedding] = {}  # an encoder and decoder may share a table
        for name, table in list(model._modules.items()):
            if name.endswith("embed") and table is not None and options.is_embedding(table):
                assert isinstance(table, Embedding)
                if table not in packed:
                    packed[table] = PackedEmbedding(table, precision, dtype)
                setattr(model, name, packed[table])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs contiguous weights


def n_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, packed or not; of those that are divided over processes, this one's."""
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *model.buffers())]
    return sum(t.nbytes for t in tensors) + sum(m.nbytes for m in model.modules() if isinstance(m, Frozen))
