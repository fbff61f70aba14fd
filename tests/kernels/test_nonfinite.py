"""NaN and infinity come out of every kernel as they come out of PyTorch's operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels import packed
from heedful.kernels.cpu import adamw
from heedful.kernels.cpu.attention import single_query_attention
from heedful.kernels.cpu.block_op import fused_block
from heedful.kernels.cpu.decode import KINDS, byte_strides
from heedful.kernels.cpu.decode_op import SINGLE_BLOCK, DecodeLayer, DecodeStep, LayerCache, NormWeights, decode
from heedful.kernels.cpu.library import library
from heedful.kernels.cpu.sampling import page_masses, row_argmax, top_p_cutoff
from heedful.kernels.cpu.structs import INT64

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")
NAN, INF = torch.nan, torch.inf
VALUES = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
PANELS = {
    "float32": packed.Float32Panels, "float16": packed.Float16Panels, "bfloat16": packed.BFloat16Panels,
    "int8": packed.Int8Panels, "int4": packed.Int4Panels,
}  # fmt: skip
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)),  # oneDNN's, which F.gelu may be, says NaN at infinity
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> bool:
    """NaN where NaN, each infinity where it is, and close elsewhere."""
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- products --------------------------------------------------------------------------------------------------------


@VALUES
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_products_of_floats(kind, value):
    dtype = packed.FLOATS[kind]
    weight, bias = numbers(50, 33), numbers(50, seed=1)
    x = numbers(5, 33, seed=2).bfloat16().float()  # processors with an instruction for bfloat16 round x, others do not
    x[1, 7] = value
    x[3, 7], x[3, 32] = value, -value
    with torch.no_grad():
        ours = PANELS[kind](weight.to(dtype), bias)(x)
        assert same(ours, F.linear(x, weight.to(dtype).float(), bias), 1e-2)
        weight[4, 5] = value
        ours = PANELS[kind](weight.to(dtype), bias)(x)
        assert same(ours, F.linear(x, weight.to(dtype).float(), bias), 1e-2)


@VALUES
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_products_of_integers(kind, value):
    """x is rounded in groups of 32: what it is beside an infinity is lost, but nothing finite comes of it."""
    weight, x = numbers(64, 96), numbers(5, 96, seed=2)
    x[1, 7] = value
    with torch.no_grad():
        ours, theirs = PANELS[kind](weight, None)(x), F.linear(x, weight)
        assert not ours[1].isfinite().any() and ours[[0, 2, 3, 4]].isfinite().all()
        if value != value:
            assert ours[1].isnan().all()
        elif kind == "int8":
            clear = weight[:, 7].abs() > 0.1  # not rounded to 0
            assert torch.equal(ours[1, clear], theirs[1, clear])


# --- attention -------------------------------------------------------------------------------------------------------


@VALUES
@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
def test_attention(where, value):
    q, k, v, bias = numbers(2, 4, 1, 32), numbers(2, 2, 37, 32, seed=1), numbers(2, 2, 37, 32, seed=2), None
    if where == "query":
        q[1, 2, 0, 3] = value
    elif where == "key":
        k[1, 1, 20, 3] = value
    elif where == "value":
        v[1, 1, 20, 3] = value
    else:
        bias = numbers(1, 4, 1, 37, seed=3)
        bias[0, 1, 0, 9] = value
    with torch.no_grad():
        ours = single_query_attention(q, k, v, None, bias, None)
        keys, values = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
        scores = q.double() @ keys.transpose(2, 3) * 32**-0.5 + (0 if bias is None else bias.double())
        assert same(ours, (scores.softmax(-1) @ values).float())


def test_masked_positions_are_not_read():
    q, k, v = numbers(1, 2, 1, 32), numbers(1, 2, 20, 32, seed=1), numbers(1, 2, 20, 32, seed=2)
    mask = torch.arange(20)[None, None, None] < 12
    with torch.no_grad():
        clean = single_query_attention(q, k, v, mask, None, None)
        k[:, :, 15], v[:, :, 13], v[:, :, 19] = NAN, NAN, INF
        assert torch.equal(single_query_attention(q, k, v, mask, None, None), clean)


@torch.no_grad()
def test_a_query_that_sees_nothing_gets_zeros():
    q, k = numbers(1, 2, 1, 32), numbers(1, 2, 20, 32, seed=1)
    mask, bias = torch.zeros(1, 1, 1, 20, dtype=torch.bool), torch.full((1, 1, 1, 20), -INF)
    for given, both in ((mask, None), mask), ((None, bias), bias):
        assert same(single_query_attention(q, k, k, *given, None), F.scaled_dot_product_attention(q, k, k, both), 0)


# --- decoding: norms, activations, residuals -------------------------------------------------------------------------


def decode_once(
    x: Tensor, *, activation: int, norm: str, weights: dict[str, Tensor],
    cache: tuple[Tensor, Tensor] | None = None, position: int = 0,
) -> Tensor:  # fmt: skip
    """One token of one row through one pre-norm block of the kernels."""
    panels = {name: packed.Float32Panels(w, None) for name, w in weights.items()}
    layer = DecodeLayer(activation=activation, n_heads=2, n_kv_heads=2, d_head=16, scale=0.25)
    weight = torch.ones(32)
    for name in ("attention_norm", "feedforward_norm"):
        setattr(layer, name, NormWeights(2 if norm == "rms" else 1, 32, weight.data_ptr(), None, 1e-5))
    for name, product in panels.items():
        setattr(layer, name, product.matrix)
    keys, values = cache or (torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))
    tables, out = torch.zeros(1, 1, dtype=torch.long), x.clone()
    caches = (LayerCache * 1)(LayerCache(KINDS[keys.dtype], keys.data_ptr(), values.data_ptr(), *byte_strides(keys)))
    step = DecodeStep(width=32, block_tables=tables.data_ptr(), max_blocks=1, block_size=SINGLE_BLOCK)
    decode((DecodeLayer * 1)(layer), caches, step, (INT64 * 1)(0), (INT64 * 1)(position), None, out)
    return out


@VALUES
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("where", ["input", "hidden"])
def test_decoding(where, activation, norm, value):
    weights = {"qkv": 0.2 * numbers(96, 32), "output": 0.2 * numbers(32, 32, seed=1)}
    weights |= {"up": 0.2 * numbers(48, 32, seed=2), "down": 0.2 * numbers(32, 48, seed=3)}
    x = numbers(1, 32, seed=4)
    if where == "input":
        x[0, 3] = value
    else:
        weights["up"][5] = 0
        weights["up"][5, 0] = value
    with torch.no_grad():
        ours = decode_once(x, activation=list(ACTIVATIONS).index(activation), norm=norm, weights=weights)
        normalize = partial(F.layer_norm if norm == "layer" else F.rms_norm, normalized_shape=(32,), eps=1e-5)
        middle = x + F.linear(F.linear(normalize(x), weights["qkv"])[:, 64:], weights["output"])
        hidden = ACTIVATIONS[activation](F.linear(normalize(middle), weights["up"]))
        assert same(ours, middle + F.linear(hidden, weights["down"]))


@VALUES
def test_what_is_in_the_cache_reaches_the_output(value):
    weights = {"qkv": numbers(96, 32), "output": numbers(32, 32, seed=1)}
    weights |= {"up": numbers(48, 32, seed=2), "down": numbers(32, 48, seed=3)}
    x, keys, values = numbers(1, 32, seed=4), numbers(1, 2, 4, 16, seed=5), numbers(1, 2, 4, 16, seed=6)
    given = {"activation": 3, "norm": "rms", "weights": weights}
    assert decode_once(x, **given, cache=(keys.clone(), values.clone()), position=2).isfinite().all()
    values[0, 0, 3] = value  # after the last position: not read
    assert decode_once(x, **given, cache=(keys.clone(), values.clone()), position=2).isfinite().all()
    keys[0, 0, 1, 0] = NAN  # once such a score was a weight near 0
    assert decode_once(x, **given, cache=(keys.clone(), values.clone()), position=2).isnan().all()


@VALUES
def test_a_cache_in_8_bits_keeps_what_is_not_finite(value):
    weights = {"qkv": numbers(96, 32), "output": numbers(32, 32, seed=1)}
    weights |= {"up": numbers(48, 32, seed=2), "down": numbers(32, 48, seed=3)}
    given, x = {"activation": 3, "norm": "rms", "weights": weights}, numbers(1, 32, seed=4)
    cache = torch.zeros(1, 2, 4, 18, dtype=torch.int8), torch.zeros(1, 2, 4, 18, dtype=torch.int8)
    assert same(decode_once(x, **given, cache=cache), decode_once(x, **given), 0.5)
    weights["qkv"][70, 3] = value  # a value of the first head
    assert not decode_once(x, **given, cache=cache).isfinite().any()


# --- sampling --------------------------------------------------------------------------------------------------------


def test_sampling():
    logits = numbers(6, 1000)
    logits[1, 300], logits[1, 700] = NAN, NAN
    logits[2, 900] = INF
    logits[3, ::2] = -INF
    logits[4] = -INF
    values, indices = row_argmax(logits)
    theirs = logits.max(-1)
    assert same(values, theirs.values, 0) and torch.equal(indices, theirs.indices)
    shares = logits.softmax(-1)
    cutoffs, last = top_p_cutoff(logits, values, 1.0, 0.5)
    masses = page_masses(logits, values, 1.0)
    lost = shares.isnan().any(-1)
    assert torch.equal(cutoffs.isnan(), lost) and lost.tolist() == [False, True, True, False, True, False]
    assert torch.equal(masses.isnan().any(-1), lost)
    assert torch.equal(page_masses(logits, values, 1.0, (cutoffs, last)).isnan().any(-1), lost)
    exact = F.pad(shares, (0, 24)).unflatten(1, (4, 256)).sum(-1)[~lost]
    assert same(masses[~lost] / masses[~lost].sum(-1, keepdim=True), exact)


# --- training --------------------------------------------------------------------------------------------------------


def plain_block(x: Tensor, w: list[Tensor | None], activation: str, *, rms: bool) -> Tensor:
    def normalize(t: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(t, (32,), weight, 1e-5) if rms else F.layer_norm(t, (32,), weight, None, 1e-5)

    normed = normalize(x, w[0])
    q, k, v = (F.linear(normed, w[i]).unflatten(-1, (2, 16)).transpose(1, 2) for i in (4, 6, 8))  # type: ignore[arg-type]
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = (q @ k.transpose(2, 3) * 0.25).masked_fill(~causal, -INF).softmax(-1)
    middle = x + F.linear((weights @ v).transpose(1, 2).flatten(2), w[10])  # type: ignore[arg-type]
    return middle + F.linear(ACTIVATIONS[activation](F.linear(normalize(middle, w[2]), w[12])), w[16])  # type: ignore[arg-type]


@VALUES
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_training_a_block(where, activation, rms, value):
    """The last position alone is spoilt, so that causal attention keeps it from the others."""
    shapes = {0: (32,), 2: (32,), 4: (32, 32), 6: (32, 32), 8: (32, 32), 10: (32, 32), 12: (48, 32), 16: (32, 48)}
    weights: list[Tensor | None] = [None] * 18
    for i, shape in shapes.items():
        weights[i] = (torch.ones(shape) if len(shape) == 1 else 0.2 * numbers(*shape, seed=i)).requires_grad_()
    x, d_y = numbers(2, 13, 32, seed=20), numbers(2, 13, 32, seed=21)
    if where == "input":
        x[1, 12, 3] = value
    elif where == "weight":
        weights[16].data[5, 7] = value  # type: ignore[union-attr]
    else:
        d_y[1, 12, 3] = value
    learning = [x.requires_grad_(), *[w for w in weights if w is not None]]
    settings = {"n_heads": 2, "n_kv_heads": 2, "d_head": 16, "causal": True, "interleaved": False}
    kind = list(ACTIVATIONS).index(activation)
    ours = fused_block(x, weights, None, None, None, rms=rms, activation=kind, scale=0.25, eps=1e-5, **settings)
    theirs = plain_block(x, weights, activation, rms=rms)
    before = slice(None), slice(None, 12)
    assert same(ours[1, 12], theirs[1, 12]) and same(ours[0], theirs[0])
    if where != "input":  # there a product with 0 of the attention weights spreads it, as far as tiles reach
        assert same(ours[before], theirs[before])
    for one, two in zip(
        torch.autograd.grad(ours, learning, d_y), torch.autograd.grad(theirs, learning, d_y), strict=True
    ):
        assert torch.equal(one.isfinite(), two.isfinite()) if where != "input" else not one.isfinite().all()
        finite = one.isfinite() & two.isfinite()
        assert same(one[finite], two[finite], 1e-3)


# --- optimizer -------------------------------------------------------------------------------------------------------


@VALUES
def test_norm_scale_and_adamw(value):
    tensors = [numbers(40), numbers(7, 9, seed=1)]
    tensors[1][3, 4] = value
    assert same(adamw.total_norm(tensors), torch.nn.utils.get_total_norm(tensors))
    scaled = [t.clone() for t in tensors]
    adamw.scale_(scaled, 0.0)
    assert all(same(a, b * 0.0) for a, b in zip(scaled, tensors, strict=True))
    results = []
    for kind in adamw.AdamW, torch.optim.AdamW:
        weights = [nn.Parameter(numbers(40, seed=3)), nn.Parameter(numbers(7, 9, seed=4))]
        optimizer = kind(weights, lr=0.1)
        for gradients in ([torch.ones_like(w) for w in weights], tensors):
            for w, g in zip(weights, gradients, strict=True):
                w.grad = g.clone()
            optimizer.step()
        results.append(weights)
    assert all(same(a, b) for a, b in zip(*results, strict=True))
