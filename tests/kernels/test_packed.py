"""Packed products against the same product written out by hand, and what packed weights refuse."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels import packed
from heedful.kernels.cpu.library import library
from heedful.kernels.modules import PackedEmbedding, pack_linear
from heedful.kernels.packed import FASTER, FLOATS, PLAIN, Packed, activations, pack_weight, passes_self_check
from heedful.kernels.quantize import QuantizedWeight, keep_integers, kept_integers
from heedful.nn.embed import Embedding

SHAPES = [(64, 32), (96, 256), (50, 33), (1, 64), (257, 160)]  # outputs, inputs
IMPLEMENTATIONS = [(k, w) for (device, k), ws in FASTER.items() if device == "cpu" for w in ws] + list(PLAIN.items())
if library() is None:  # `heedful info` says why
    IMPLEMENTATIONS = [(k, w) for k, w in IMPLEMENTATIONS if not issubclass(w, packed.Panels)]
every_implementation = pytest.mark.parametrize(
    "kind, implementation", IMPLEMENTATIONS, ids=lambda x: x if isinstance(x, str) else x.__name__
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(weight: Tensor, kind: str) -> Tensor:
    """Weights as `pack_weight` hands them on: floats in their own type."""
    return weight.to(FLOATS.get(kind, torch.float32))


def by_hand(weight: Tensor, kind: str, implementation: type[Packed]) -> Tensor:
    """What a kind makes of weights (N, K), by its definition and one number at a time where it matters."""
    if kind in ("float32", "bfloat16", "float16"):
        return weight.to(getattr(torch, kind)).double()
    out = torch.empty_like(weight, dtype=torch.float64)
    narrow = torch.bfloat16 if implementation in (packed.Int8Aten, packed.Int4Aten) else torch.float16
    for n, row in enumerate(weight.double()):
        for begin in range(0, len(row), 32):
            group = row[begin : begin + 32]
            if kind == "int8":
                most = row.abs().max() if implementation is packed.Int8Aten else group.abs().max()
                scale = (most / 127).to(narrow).double()
                out[n, begin : begin + 32] = torch.round(group / scale).clamp(-127, 127) * scale
            else:
                scale = ((group.max() - group.min()) / 15).to(narrow).double()
                middle = (group.min().to(narrow).double() + 8 * scale).to(narrow).double()
                out[n, begin : begin + 32] = torch.round((group - middle) / scale).clamp(-8, 7) * scale + middle
    return out


def limit(kind: str, implementation: type[Packed], x: Tensor, weight: Tensor) -> Tensor:
    """How far a sum may be off, given exact sums over the rounded weights: how x is rounded.

    int8 and int4 in panels round x to half a step at most, in 127 steps of the largest of 32 neighbours; what is in
    bfloat16, and ATen's scales, to 2⁻⁹ of itself, and the result too. Sums are in float32.
    """
    if implementation in (packed.Int8Panels, packed.Int4Panels):
        groups = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
        steps = groups.abs().amax(-1, keepdim=True).expand(groups.shape).flatten(-2)[..., : x.shape[-1]] / 127
        return (steps / 2) @ weight.abs().T + 1e-4
    if kind == "bfloat16" or implementation in (packed.Int4Aten, packed.Int8Aten):
        return 2**-7 * (x.abs() @ weight.abs().T) + 1e-4
    return 1e-6 * (x.abs() @ weight.abs().T) + 1e-6


@every_implementation
@pytest.mark.parametrize("n_rows", [1, 5])
def test_products_are_those_of_the_rounded_weights(kind, implementation, n_rows):
    for n_outputs, n_inputs in SHAPES:
        if not implementation.fits(n_outputs, n_inputs):
            continue
        weight, x = numbers(n_outputs, n_inputs), 3 * numbers(n_rows, n_inputs, seed=1)
        bias = numbers(n_outputs, seed=2)
        dtype = activations("cpu", kind)
        made = implementation(stored(weight, kind), bias.to(dtype))
        x, bias = x.to(dtype).double(), bias.to(dtype).double()
        rounded = by_hand(weight, kind, implementation)
        expected = x @ rounded.T + bias
        got = made(x.to(dtype))
        assert got.dtype == dtype and got.shape == expected.shape
        assert ((got.double() - expected).abs() <= limit(kind, implementation, x, rounded) + 2**-8 * bias.abs()).all()
        assert torch.equal(made(x.to(dtype)[None])[0], got)  # however many dimensions
        without = implementation(stored(weight, kind), None)
        assert ((without(x.to(dtype)).double() + bias - got.double()).abs() <= 0.02 * expected.abs().max()).all()


@pytest.mark.skipif(library() is None, reason="only the C kernels quantize x")
@pytest.mark.parametrize("kind, implementation", [("int8", packed.Int8Panels), ("int4", packed.Int4Panels)])
@pytest.mark.parametrize("large", [20, 1000])
def test_outlier_columns_of_x_cost_no_precision(kind, implementation, large):
    """A few columns of real activations are 20 to 1,000 times the others (Dettmers et al. 2022)."""
    weight, x = numbers(64, 576), numbers(9, 576, seed=1)
    made, rounded = implementation(weight, None), by_hand(weight, kind, implementation)

    def noise(x: Tensor) -> float:
        return (made(x).double() - x.double() @ rounded.T).pow(2).mean().sqrt().item()

    outliers = x.clone()
    outliers[:, [7, 9, 100, 471, 560]] *= large
    assert noise(outliers) < 1.1 * noise(x) + 1e-6 * large
    assert torch.equal(made(outliers)[4:5], made(outliers[4:5]))  # in any batch


@pytest.mark.parametrize("kind, of_file, steps", [("int8", "Q8_0", 0), ("int4", "Q4_1", 0.01)])
def test_weights_of_a_gguf_file_keep_their_grid(kind, of_file, steps):
    """What llama.cpp rounded is rounded no further. The least of a Q4_1 group is on the grid, our zero point is the
    middle, which float16 may round."""
    gguf = pytest.importorskip("gguf")
    type_ = gguf.GGMLQuantizationType[of_file]
    written = gguf.quants.quantize((0.05 * numbers(48, 128)).numpy(), type_)
    weight = torch.from_numpy(gguf.quants.dequantize(written, type_))
    made = PLAIN[kind](weight, None)
    step = weight.unflatten(1, (-1, 32)).abs().amax(-1).max() / (127 if kind == "int8" else 7.5)
    assert (made(torch.eye(128)).T - weight).abs().max() <= steps * step


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_that_a_weight_keeps_are_taken_as_they_are(kind):
    """Integers that leave a part of their range unused, which rounding the weight again would spread over all of it."""
    ints = numbers(48, 64).mul(2).round().clamp(-3, 3)
    scale, zero = numbers(48, 2, seed=1).half(), numbers(48, 2, seed=2).half()
    form = QuantizedWeight(ints.to(torch.int8), scale)
    if kind == "int4":
        form = QuantizedWeight((ints + 6).to(torch.uint8), scale, zero)
        ints = ints - 2  # (q - 8)
    offset = 0 if kind == "int8" else zero.double().repeat_interleave(32, dim=1)
    exact = ints.double() * scale.double().repeat_interleave(32, dim=1) + offset
    weight = form.dequantize()
    assert (weight - exact).abs().max() < 1e-6
    keep_integers(weight, form)
    for implementation in [PLAIN[kind], *FASTER["cpu", kind]]:
        if implementation is packed.Int8Aten or not implementation.fits(48, 64):
            continue  # a scale per row
        near = 0.06 if implementation is packed.Int4Aten else 1e-5  # scales in bfloat16
        assert (implementation(weight, None)(torch.eye(64)).T - exact).abs().max() < near
    joint = pack_linear([layer(weight), layer(2 * weight)], kind, torch.float32)(torch.eye(64)).T
    assert (joint[:48] - exact).abs().max() < 0.06
    weight += 0.01  # the integers are no longer its own
    assert kept_integers(weight, kind) is None


def layer(weight: Tensor) -> nn.Linear:
    made = nn.Linear(*reversed(weight.shape), bias=False)
    made.weight = nn.Parameter(weight.clone())
    if hasattr(weight, "quantized"):
        keep_integers(made.weight, weight.quantized)
    return made


@pytest.mark.parametrize("kind", PLAIN)
def test_every_shape_has_an_implementation(kind):
    for shape in SHAPES:
        weight = numbers(*shape)
        x = numbers(3, shape[1], seed=1).to(activations("cpu", kind))
        made = pack_weight(weight, None, kind)
        exact = x.float() @ weight.T
        assert (made(x).float() - exact).abs().max() < (0.15 if kind == "int4" else 0.03) * exact.abs().max()


@pytest.mark.parametrize("kind, implementation", [w for w in IMPLEMENTATIONS if issubclass(w[1], packed.Panels)])
def test_our_kernels_give_a_row_the_same_bits_in_every_batch(kind, implementation):
    made = implementation(stored(numbers(70, 96), kind), numbers(70, seed=2))
    x = numbers(21, 96, seed=1)
    together = made(x)
    for n in range(1, 21):
        assert torch.equal(made(x[:n]), together[:n]) and torch.equal(made(x[n:]), together[n:])


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_no_number_stays_none(kind):
    x = numbers(2, 64)
    x[1, 40] = torch.nan
    y = pack_weight(numbers(48, 64), None, kind)(x)
    assert y[0].isfinite().all() and y[1].isnan().all()


@pytest.mark.parametrize("kind", PLAIN)
def test_rows_do_not_know_each_other(kind):
    """A row of huge numbers beside it changes nothing, nor does being alone."""
    weight = numbers(48, 64)
    made = pack_weight(weight, None, kind)
    x = numbers(4, 64, seed=1).to(activations("cpu", kind))
    x[2] *= 1000
    together = made(x)
    for i in range(4):
        alone = made(x[i : i + 1])[0]
        assert (together[i] - alone).abs().max() <= 1e-5 * alone.abs().max().clamp(min=1)


@every_implementation
def test_empty_and_zero_inputs(kind, implementation):
    weight = stored(numbers(32, 64), kind)
    made, dtype = implementation(weight, None), activations("cpu", kind)
    assert torch.equal(made(torch.zeros(1, 64, dtype=dtype)), torch.zeros(1, 32, dtype=dtype))
    assert torch.equal(made(torch.zeros(2, 64, dtype=dtype)), torch.zeros(2, 32, dtype=dtype))
    assert made(torch.zeros(0, 64, dtype=dtype)).shape == (0, 32)
    zeros = implementation(torch.zeros_like(weight), None)
    assert zeros(torch.ones(2, 64, dtype=dtype)).abs().max() == 0


@every_implementation
def test_memory_is_what_is_stored(kind, implementation):
    weight = stored(numbers(64, 256), kind)
    bits = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4 + 2 * 16 / 32}[kind]
    per_row = 0 if kind != "int8" else 2 if implementation is packed.Int8Aten else 256 // 32 * 2
    assert implementation(weight, None).nbytes == 64 * 256 * bits / 8 + 64 * per_row
    bias = 64 * (2 if kind == "bfloat16" and implementation is packed.OneDnn else 4)
    assert implementation(weight, numbers(64)).nbytes == implementation(weight, None).nbytes + bias


def test_an_operator_that_is_missing_or_wrong_is_not_used():
    class Missing(packed.OneDnn):
        def product(self, x):
            return torch.ops.mkldnn._no_such_operator(x)

    class Wrong(packed.OneDnn):
        def product(self, x):
            return super().product(x) * 1.001

    class OnlyOneRow(packed.OneDnn):
        def product(self, x):
            return super().product(x) if x.shape[0] == 1 else x.new_full((*x.shape[:-1], 64), torch.nan)

    assert not any(passes_self_check(wrong, "cpu", "float32") for wrong in (Missing, Wrong, OnlyOneRow))


@pytest.mark.parametrize("kind", PLAIN)
def test_without_the_fast_operators_the_plain_ones_serve(kind, monkeypatch):
    monkeypatch.setattr(packed, "FASTER", {})
    weight = numbers(48, 64)
    made = pack_weight(weight, None, kind)
    assert type(made) is PLAIN[kind]


def test_no_warning_reaches_the_user():
    packed.passes_self_check.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in PLAIN:
            pack_weight(numbers(48, 64), None, kind)


def test_the_quantization_engine_is_left_as_it_was():
    before = torch.backends.quantized.engine
    pack_weight(numbers(48, 64), None, "int8")
    assert torch.backends.quantized.engine == before


@every_implementation
def test_gradients_are_refused(kind, implementation):
    made = implementation(stored(numbers(32, 64), kind), None)
    x = numbers(2, 64).to(activations("cpu", kind))
    with torch.enable_grad(), pytest.raises(ValueError, match="gradient"):
        made(x.requires_grad_())


def test_packed_weights_do_not_move():
    model = nn.Sequential(pack_weight(numbers(48, 64), None, "int8"))
    with pytest.raises(ValueError, match="load the model anew"):
        model.to(torch.bfloat16)


@pytest.mark.parametrize("kind, limit", [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 0.5 / 127)])
def test_a_table_gives_rounded_rows(kind, limit):
    plain = Embedding(20, 16, scale=4.0)
    table = PackedEmbedding(plain, kind, torch.float32)
    tokens = torch.tensor([[3, 3, 0], [19, 1, 2]])
    rows = plain(tokens)
    assert table(tokens).dtype == torch.float32
    assert ((table(tokens) - rows).abs() <= 1.001 * limit * rows.abs().amax(dim=-1, keepdim=True)).all()
    assert table.nbytes == (20 * 16 * 2 if kind != "int8" else 20 * 32 + 20 * 2)
