"""GPTQ against optimal brain quantization with explicit inverses, and on whole models of several families."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import heedful
from heedful.kernels.accelerate import accelerate
from heedful.kernels.gptq import compensated_integers, descend, gptq
from heedful.kernels.quantize import QuantizedWeight, best_grid, kept_integers, quantize_groups_int4, quantize_weight
from heedful.kernels.quantize_model import quantize_blocks
from heedful.models.base import Batch, Model
from heedful.nn.block import Block
from support.adapters import tiny


def inputs(n: int, width: int, seed: int = 0) -> Tensor:
    """Correlated inputs, as real ones are."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=draw) / width**0.5 + 0.3
    return torch.randn(n, width, generator=draw) @ mix


def weights(n: int, width: int, seed: int = 7) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def by_brain_surgeon(weight: Tensor, moments: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Optimal brain quantization (Frantar and Alistarh 2022, equation 2) in GPTQ's order: round a column, move the
    others by its error along the inverse of the moments of those that are left, which is computed anew each time."""
    left = sorted(range(weight.shape[1]), key=lambda i: -moments[i, i].item())
    weight, ints = weight.double().clone(), torch.zeros(weight.shape)
    scales, zeros = (x.double().repeat_interleave(32, dim=1) for x in (scale, zero_point))
    while left:
        inverse = torch.linalg.inv(moments[left][:, left])
        first = left[0]
        ints[:, first] = (weight[:, first] / scales[:, first] + zeros[:, first]).round().clamp(-8, 7)
        error = weight[:, first] - (ints[:, first] - zeros[:, first]) * scales[:, first]
        weight[:, left] -= error[:, None] / inverse[0, 0] * inverse[0]
        left = left[1:]
    return ints


def test_columns_are_compensated_as_the_formula_says():
    x, weight = inputs(500, 160).double(), weights(5, 160)
    moments, grid = x.T @ x, best_grid(weight, torch.ones(160))
    found, expected = compensated_integers(weight, moments, *grid), by_brain_surgeon(weight, moments, *grid)
    assert (found == expected).float().mean() > 0.99  # a tie that float32 rounds the other way moves a few others
    assert torch.equal(found[:, :1], expected[:, :1]) and found.min() >= -8 and found.max() <= 7


def test_coordinate_descent_only_decreases_the_error():
    x, weight = inputs(500, 96).double(), weights(7, 96)
    moments, (scale, zero_point) = x.T @ x, best_grid(weight, torch.ones(96))
    ints = compensated_integers(weight, moments, scale, zero_point)
    errors = []
    for _ in range(4):
        rounded = (ints - zero_point.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
        errors.append(((weight - rounded).double() @ x.T).square().sum(1))
        ints, scale = descend(weight, moments.float(), ints, scale, zero_point)
        assert ints.min() >= -8 and ints.max() <= 7 and torch.equal((15 * scale).half().float(), 15 * scale)
    assert all((b <= a * 1.0001).all() for a, b in itertools.pairwise(errors))
    assert errors[1].sum() < 0.95 * errors[0].sum()


def test_outputs_change_less_than_by_rounding_to_the_nearest():
    x, weight = inputs(1000, 128), weights(64, 128)
    made = gptq(weight, x.T @ x).dequantize()
    nearest = QuantizedWeight(*quantize_groups_int4(weight)).dequantize()
    other = inputs(1000, 128)[torch.randperm(1000)[:300]]

    def error(rounded: Tensor) -> float:
        return (other @ (rounded - weight).T).square().mean().item()

    assert error(made) < 0.5 * error(nearest)


def test_inputs_that_deviate_are_corrected_for():
    """Against the least-squares solution: the weight that gives the unquantized model's outputs from the inputs."""
    x = inputs(2000, 64)
    original, weight = x @ (torch.eye(64) + 0.1 * weights(64, 64, 1)), weights(8, 64)
    wanted = original @ weight.T
    plain, corrected = gptq(weight, x.T @ x), gptq(weight, x.T @ x, (original - x).T @ x, damping=1e-6)
    best = torch.linalg.lstsq(x, wanted).solution.T
    assert (corrected.dequantize() - best).abs().mean() < 0.4 * (plain.dequantize() - best).abs().mean()
    assert (x @ corrected.dequantize().T - wanted).square().mean() < (
        0.1 * (x @ plain.dequantize().T - wanted).square().mean()
    )


def test_inputs_that_are_always_zero_and_weights_of_zero():
    x, weight = inputs(100, 64), weights(4, 64)
    x[:, 5], weight[2] = 0, 0
    made = gptq(weight, x.T @ x).dequantize()
    assert made.isfinite().all() and (made[2] == 0).all()
    assert gptq(weight, torch.zeros(64, 64)).dequantize().isfinite().all()


# --- models ----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "gpt": {}, "llama": {"d_ff": 64}, "gpt_neox": {"d_ff": 64}, "transformer": {"d_ff": 64}, "bert": {"d_ff": 64},
    "mixtral": {"d_ff": 64, "n_experts": 4, "n_kv_heads": 2},
}  # fmt: skip


def batches(model: Model, n: int, seed: int = 0) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(23, (2 * n, 8, 16), generator=draw)
    if model.family == "transformer":
        return [Batch(tokens=a, source=b) for a, b in zip(ids[:n], ids[n:], strict=True)]
    return [Batch(tokens) for tokens in ids[:n]]


def layers(model: Model) -> dict[str, nn.Linear]:
    found = {f"{n}.{k}": m for n, b in model.named_modules() if isinstance(b, Block) for k, m in b.named_modules()}
    return {n: m for n, m in found.items() if isinstance(m, nn.Linear) and "router" not in n}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_changes_less_and_is_loaded_as_it_was_saved(family, tmp_path):
    model = tiny(family, **FAMILIES[family])
    for parameter in model.parameters():  # larger than initial weights are, so that blocks matter
        parameter.mul_(3 if parameter.ndim == 2 else 1)
    plain, nearest = copy.deepcopy(model), copy.deepcopy(model)
    report = quantize_blocks(model, batches(model, 20))
    assert sorted(report.compensated) == sorted(layers(model)) and not report.nearest
    for layer in layers(nearest).values():
        layer.weight.copy_(quantize_weight(layer.weight, "int4").dequantize())

    def error(rounded: Model) -> float:
        pairs = [(rounded(batch).hidden, plain(batch).hidden) for batch in batches(model, 5, seed=1)]
        return sum((a - b).square().mean().item() for a, b in pairs)

    assert error(model) < 0.8 * error(nearest)

    heedful.save(model, tmp_path / "m", quantize="int4")
    again = heedful.load(tmp_path / "m").model
    exact = {name: kept_integers(layer.weight, "int4") for name, layer in layers(model).items()}
    for name, layer in layers(again).items():
        assert torch.equal(layer.weight, exact[name].dequantize())
    accelerate(model, "inference", precision="int4")
    packed = heedful.load(tmp_path / "m", quantize="int4").model
    joint = [m for m in model.modules() if type(m).__name__ == "Int4Panels"]
    others = [m for m in packed.modules() if type(m).__name__ == "Int4Panels"]
    assert len(joint) == len(others) and all(
        torch.equal(a.weight, b.weight) and torch.equal(a.scales, b.scales) for a, b in zip(joint, others, strict=True)
    )


def test_what_cannot_be_calibrated_is_said():
    model = tiny("gpt", d_model=48, n_heads=2)
    report = quantize_blocks(model, batches(model, 1))
    assert report.nearest and all("down" not in name for name in report.nearest)  # 48 inputs; 192 are whole groups
    assert "to the nearest: " in str(report)
    with pytest.raises(ValueError, match="no text"):
        quantize_blocks(model, [])
