"""A pre-norm block for training on a CPU, as one fused forward and one fused backward operator (block_op.py).

A training step of a small model is a thousand PyTorch operators, and about half of its time is spent outside the matrix
products. `KernelBlock` computes the same as `PreNormBlock`, to within rounding, and falls back to it for what the
operator does not support: other norms and activations, adapters, bfloat16 weights, a cache, hooks.

    B batch, T positions, E model width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels import options
from heedful.kernels.cpu.block_op import PARTS, fits_workspace, fused_block, supports_input, supports_weight
from heedful.kernels.modules import JointAttention
from heedful.nn.attention import AttentionInfo
from heedful.nn.block import Cross, PreNormBlock
from heedful.nn.feedforward import FeedForward, gelu_tanh
from heedful.nn.norm import RMSNorm
from heedful.nn.state import Cache

ACTIVATIONS = {F.relu: 0, F.gelu: 1, gelu_tanh: 2, F.silu: 3}  # numbered as in C


class KernelBlock(PreNormBlock):
    """A pre-norm block that uses the fused operator in training where its modules and options are supported."""

    def forward(self, x: Tensor, info: AttentionInfo, cache: Cache | None = None, cross: Cross | None = None) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        if cache is None and cross is None and self.training and torch.is_grad_enabled() and supports_input(x):
            if _supports_info(info) and _supports(self):
                return _run(self, x, info)
        return super().forward(x, info, cache, cross)


def _supports_info(info: AttentionInfo) -> bool:
    return options.is_info(info) and info.bias is None and info.memory is None


def _supports(block: KernelBlock) -> bool:
    """Whether the operator supports every module of the block and all their options."""
    attention, network = block.attention, block.feedforward
    if not (
        options.has_only(block, KernelBlock, options.BLOCK - {"cross"})
        and options.is_attention(attention, JointAttention)
        and options.is_feedforward(network)
        and options.is_dropout(block.dropout)
    ):
        return False
    assert isinstance(network, FeedForward)
    absent = (block.attention_after, block.feedforward_after, block.cross_norm)
    linear = [attention.query, attention.key, attention.value, attention.output, network.up, network.down]
    if network.gate is not None:
        linear.append(network.gate)
    norms = (block.attention_norm, block.feedforward_norm)
    return (
        attention.softcap is None
        and attention.query_norm is None
        and attention.key_norm is None
        and not attention.watch.on
        and network.act in ACTIVATIONS
        and all([type(norm) is nn.Identity for norm in absent])
        and _are_alike(*norms)
        and all([options.is_linear(part) for part in linear])
        and fits_workspace(4 * network.up.weight.numel())
        and not any([options.is_hooked(p) for p in (*linear, *norms, *absent, attention, network, block.dropout)])
        and all([supports_weight(p) for part in (*linear, *norms) for p in part._parameters.values()])
    )


def _are_alike(one: nn.Module, two: nn.Module) -> bool:
    """Whether both norms are supported, of the same class and with the same epsilon."""
    if type(one) is not type(two) or not (options.is_norm(one) and options.is_norm(two)):
        return False
    if isinstance(one, RMSNorm) and isinstance(two, RMSNorm):
        return one.eps == two.eps and one.offset == two.offset == 0
    return one.eps == two.eps


def _run(block: PreNormBlock, x: Tensor, info: AttentionInfo) -> Tensor:
    attention, network, norm = block.attention, block.feedforward, block.attention_norm
    assert isinstance(network, FeedForward) and isinstance(norm, (RMSNorm, nn.LayerNorm))
    mask = None
    causal = info.mask.is_plain_causal(attention.window)
    if not causal:
        mask = info.mask.dense(attention.window)
        causal = info.mask.causal and info.mask.starts == 0
    cos, sin = (None, None) if info.rotation is None else (info.rotation.cos, info.rotation.sin)
    named = attention._modules | network._modules
    weights: list[Tensor | None] = []
    for part in (norm, block.feedforward_norm, *map(named.get, PARTS[2:])):
        own = {} if part is None else part._parameters
        weights += own.get("weight"), own.get("bias")
    residual, hidden = (part.p * part.training for part in (block.dropout, network.dropout))
    return fused_block(
        x, weights, mask, cos, sin, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads,
        d_head=attention.d_head, rms=type(norm) is RMSNorm, activation=ACTIVATIONS[network.act], causal=causal,
        interleaved=info.rotation is not None and info.rotation.layout == "interleaved",
        scale=attention.d_head**-0.5 if attention.scale is None else attention.scale, eps=norm.eps,
        dropout=(attention.dropout * attention.training, residual, hidden, residual),
    )  # fmt: skip
