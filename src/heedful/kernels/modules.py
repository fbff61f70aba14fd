"""The modules that `accelerate` puts in place of plain ones, with packed weights (kernels/packed.py).

Each is a subclass of the module it replaces and keeps its options; only the matrix products differ.

    B batch, T positions, E model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.cpu.attention import single_query_attention, supports_single_query
from heedful.kernels.packed import FLOATS, Frozen, Packed, Plain, Precision, pack_weight
from heedful.kernels.quantize import GROUP, QuantizedWeight, keep_integers, kept_integers, quantize_weight
from heedful.nn.attention import Attention
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead


def pack_linear(layers: Sequence[nn.Module], precision: Precision, dtype: torch.dtype) -> Packed:
    """Linear layers with the same input as one packed layer; `dtype` is that of the activations."""
    assert all(isinstance(layer, nn.Linear) for layer in layers)
    weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    weight = _concatenate(weights, precision) if len(weights) > 1 else weights[0]
    if all(layer.bias is None for layer in layers):
        return pack_weight(weight, None, precision)
    biases = [
        w.new_zeros(len(w)) if layer.bias is None else layer.bias for layer, w in zip(layers, weights, strict=True)
    ]
    return pack_weight(weight, torch.cat(biases).detach().to(dtype), precision)  # type: ignore[arg-type]


def _concatenate(weights: Sequence[Tensor], precision: Precision) -> Tensor:
    """Weights with the same inputs as one, which keeps their integers if any has some."""
    weight = torch.cat([w.detach() for w in weights])
    if (precision == "int8" or precision == "int4") and any(kept_integers(w, precision) for w in weights):
        joint = QuantizedWeight.concatenate([quantize_weight(w, precision) for w in weights])
        weight = joint.dequantize().to(weight)
        keep_integers(weight, joint)
    return weight


def _split_joint(layer: Attention, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product of the three projections (B, T, ...) as queries (B, H, T, D), keys and values (B, G, T, D)."""
    widths = [n * layer.d_head for n in (layer.n_heads, layer.n_kv_heads, layer.n_kv_heads)]
    q, k, v = product.split(widths, dim=-1)
    q, k = layer._split(q, layer.query_norm, layer.n_heads), layer._split(k, layer.key_norm, layer.n_kv_heads)
    return q, k, layer._heads(v, layer.n_kv_heads)


class PackedAttention(Attention):
    """Attention with packed weights, whose query, key and value projections are one product; on a CPU a C kernel
    computes a single query per row (one new token)."""

    joint: Packed

    @classmethod
    def replace(cls, part: Attention, precision: Precision, dtype: torch.dtype) -> None:
        """Turn a plain self-attention layer into this class, in place."""
        part.__class__ = cls
        assert isinstance(part, cls)
        part.joint = pack_linear([part.query, part.key, part.value], precision, dtype)
        part.output = pack_linear([part.output], precision, dtype)  # type: ignore[assignment]
        del part.query, part.key, part.value

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D) of x (B, T, E), by one product."""
        return _split_joint(self, self.joint(x))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """`Attention.attend`, by the C kernel for a single query per row."""
        if self.watch.on or self.softcap is not None or causal or not supports_single_query(q, k, v):
            return super().attend(q, k, v, mask, bias, causal=causal)
        return single_query_attention(q, k, v, mask, bias, self.scale)


class JointAttention(Attention):
    """Attention that computes queries, keys and values by one product in training on a GPU, faster than by three."""

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D) of x (B, T, E)."""
        layers = (self.query, self.key, self.value)
        plain = all([type(m) is nn.Linear and not m._forward_hooks and not m._forward_pre_hooks for m in layers])
        if not (x.is_cuda and self.training and plain):
            return super().queries_keys_values(x)
        bias = None if self.query.bias is None else torch.cat([m.bias for m in layers])
        return _split_joint(self, F.linear(x, torch.cat([m.weight for m in layers]), bias))


class PackedFeedForward(FeedForward):
    """A gated feed-forward layer whose gate and up projections are one packed product."""

    joint: Packed

    @classmethod
    def replace(cls, part: FeedForward, precision: Precision, dtype: torch.dtype) -> None:
        """Turn a plain gated layer into this class, in place."""
        assert part.gate is not None
        part.__class__ = cls
        assert isinstance(part, cls)
        part.joint = pack_linear([part.gate, part.up], precision, dtype)
        part.down = pack_linear([part.down], precision, dtype)  # type: ignore[assignment]
        del part.gate, part.up

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, E) -> (B, T, E)."""
        gate, up = self.joint(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.act(gate) * up))


class PackedHead(LanguageHead):
    """A language head with packed weights. One that is tied to the embedding gets its own copy, since rows cannot be
    looked up in the packed form."""

    packed: Packed

    @classmethod
    def replace(cls, part: LanguageHead, precision: Precision, dtype: torch.dtype, *, tied: bool) -> None:
        """Turn a plain head into this class, in place."""
        bias = None if part.bias is None else part.bias.detach().to(dtype)
        packed = pack_weight(part.weight, bias, precision)
        if isinstance(packed, Plain):
            return  # not packed: a copy would only take memory
        if tied:
            packed.n_weights -= part.weight.numel()  # counted with the embedding
        part.__class__ = cls
        assert isinstance(part, cls)
        part.packed = packed
        part.weight = part.bias = None  # type: ignore[assignment]

    def project(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., V)."""
        return self.packed(x)


class PackedEmbedding(Frozen):
    """An embedding table in a narrower float type, or in int8 with a scale per group; outputs are of type `dtype`."""

    def __init__(self, table: Embedding, precision: Precision, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.dtype, self.n_columns = table.scale, dtype, table.weight.shape[1]
        self.scales: Tensor | None = None
        if precision in FLOATS:
            self.weight = table.weight.detach().to(FLOATS[precision])
        else:
            quantized = quantize_weight(table.weight, "int8")
            self.scales = quantized.scale
            self.weight = F.pad(quantized.ints, (0, -self.n_columns % GROUP)).unflatten(1, (-1, GROUP))
        self.n_weights = table.weight.numel()
        self.nbytes = self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., E)."""
        rows = tokens.flatten()
        x = self.weight.index_select(0, rows).to(self.dtype)
        if self.scales is not None:
            x = x * self.scales.index_select(0, rows)[..., None].to(self.dtype)
            x = x.flatten(1)[:, : self.n_columns]
        x = x.reshape(*tokens.shape, -1)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)
