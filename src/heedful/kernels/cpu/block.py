"""Training blocks by the C kernels (block_op.py) instead of PyTorch's operators.

A step of a small model is a thousand operations of PyTorch's, and about half of its time goes to what lies between the
matrix products. `Block.forward` asks `can`, and `run` then does what it would itself do, to within rounding. It steps
aside for whatever it does not know: dropout, other norms and activations, adapters, lower precision, a cache, and
anyone who watches or hooks a part.

    B batch, T positions, E model width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.cpu.block_op import PARTS, fits_workspace, fused_block, supports_input, supports_weight
from heedful.nn.feedforward import FeedForward, gelu_tanh
from heedful.nn.norm import RMSNorm

if TYPE_CHECKING:
    from heedful.nn.attention import View
    from heedful.nn.block import Block

ACTIVATIONS = {F.relu: 0, F.gelu: 1, gelu_tanh: 2, F.silu: 3}  # as in C


def can(block: Block, x: Tensor, view: View) -> bool:
    """Whether `run` does the same as the block's own parts would."""
    return block.training and torch.is_grad_enabled() and view.bias is None and supports_input(x) and _known(block)


def _known(block: Block) -> bool:
    attention, network = block.attention, block.feedforward
    if type(network) is not FeedForward or block.residual != "pre":
        return False
    norms = (block.attention_norm, block.feedforward_norm)
    maps = [attention.query, attention.key, attention.value, attention.output, network.up, network.down]
    if network.gate is not None:
        maps.append(network.gate)
    return (
        block.dropout.p == attention.dropout == network.dropout.p == 0
        and network.act in ACTIVATIONS
        and _nothing_more(block)
        and _like(*norms)
        and all([type(part) is nn.Linear for part in maps])
        and fits_workspace(4 * network.up.weight.numel())
        and not any([_hooked(part) for part in (*maps, *norms, attention, network, block.dropout)])
        and all([supports_weight(p) for part in (*maps, *norms) for p in part._parameters.values()])  # type: ignore[union-attr]
    )


def _nothing_more(block: Block) -> bool:
    """No part that some families have and the kernels do not."""
    attention, network = block.attention, block.feedforward
    more = (
        block.cross, block.attention_after, block.feedforward_after, attention.joint, network.joint, attention.softcap,
        attention.query_norm, attention.key_norm,
    )  # fmt: skip
    return all([part is None for part in more]) and not attention.watch.on


def _like(one: nn.Module | None, two: nn.Module | None) -> bool:
    """Two norms of a kind the kernels know."""
    if type(one) is RMSNorm and type(two) is RMSNorm:
        return one.eps == two.eps and one.offset == two.offset == 0
    return (
        type(one) is nn.LayerNorm and type(two) is nn.LayerNorm and one.eps == two.eps
        and one.weight is not None and two.weight is not None
    )  # fmt: skip


def _hooked(part: nn.Module | None) -> bool:
    return part is not None and bool(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    )


def run(block: Block, x: Tensor, view: View) -> Tensor:
    """x (B, T, E) after the block."""
    attention, network, norm = block.attention, block.feedforward, block.attention_norm
    assert isinstance(network, FeedForward) and isinstance(norm, (RMSNorm, nn.LayerNorm))
    mask = None
    causal = view.mask.is_plain_causal(attention.window)
    if not causal:
        mask = view.mask.dense(attention.window)
        causal = view.mask.causal and view.mask.starts == 0
    cos, sin = (None, None) if view.rotation is None else (view.rotation.cos, view.rotation.sin)
    named = attention._modules | network._modules
    weights: list[Tensor | None] = []
    for part in (norm, block.feedforward_norm, *map(named.get, PARTS[2:])):
        own = {} if part is None else part._parameters
        weights += own.get("weight"), own.get("bias")
    return fused_block(
        x, weights, mask, cos, sin, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads,
        d_head=attention.d_head, rms=type(norm) is RMSNorm, activation=ACTIVATIONS[network.act], causal=causal,
        interleaved=view.rotation is not None and view.rotation.layout == "interleaved",
        scale=attention.d_head**-0.5 if attention.scale is None else attention.scale, eps=norm.eps,
    )  # fmt: skip
