"""The heedful operators of torch.library: on fake tensors and under dispatch modes they say what the real ones do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from heedful.kernels import packed
from heedful.kernels.cpu.attention import single_query_attention
from heedful.kernels.cpu.block_op import fused_block
from heedful.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")
SETTINGS = {
    "n_heads": 2, "n_kv_heads": 1, "d_head": 16, "rms": True, "activation": 3, "causal": True, "interleaved": False,
    "scale": 0.25, "eps": 1e-5,
}  # fmt: skip
SHAPES = [(32,), None, (32,), None, (32, 32), (32,), (16, 32), None, (16, 32), None, (32, 32), None, (48, 32), None]
SHAPES += [(48, 32), None, (32, 48), (32,)]


class Calls(TorchDispatchMode):
    """The operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def inputs() -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(0)
    weights = [None if shape is None else (0.2 * torch.randn(shape)).requires_grad_() for shape in SHAPES]
    return torch.randn(3, 7, 32, requires_grad=True), weights


def gradients(x: Tensor, weights: list[Tensor | None]) -> tuple[Tensor, ...]:
    y = fused_block(x, weights, None, None, None, **SETTINGS)
    learning = [x, *[w for w in weights if w is not None and w.requires_grad]]
    return y, *torch.autograd.grad(y, learning, torch.ones_like(y))


def test_under_a_mode_the_block_is_two_operators_with_the_same_results():
    x, weights = inputs()
    real = gradients(x, weights)
    with Calls() as calls:
        seen = gradients(x, weights)
    assert [name for name in calls.names if name.startswith("block")] == ["block_forward", "block_backward"]
    assert all(torch.equal(a, b) for a, b in zip(real, seen, strict=True))


def test_fake_tensors_have_the_shapes_and_flops_of_real_ones():
    x, weights = inputs()
    with FlopCounterMode(display=False) as counted:
        real = gradients(x, weights)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as estimated:
        fakes = [None if w is None else mode.from_tensor(w).detach().requires_grad_() for w in weights]
        fake = gradients(mode.from_tensor(x).detach().requires_grad_(), fakes)
    assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]
    n_weights = sum(w.numel() for w in weights if w is not None and w.ndim == 2)
    attention = 4 * 3 * 2 * 7 * 7 * 16
    assert counted.get_total_flops() == estimated.get_total_flops() == 3 * (2 * 3 * 7 * n_weights + attention)


def test_gradients_that_nobody_wants_are_not_computed():
    x, weights = inputs()
    whole = gradients(x, weights)
    for i in 4, 12, 17:
        weights[i] = weights[i].detach()  # type: ignore[union-attr]
    part = gradients(x, weights)
    assert len(part) == len(whole) - 3
    with Calls():
        assert all(torch.equal(a, b) for a, b in zip(part, gradients(x, weights), strict=True))


@torch.no_grad()
def test_products_and_attention():
    x, layer = torch.randn(3, 5, 32), packed.Float32Panels(torch.randn(70, 32), None)
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16)
    real = layer(x), single_query_attention(q, k, k, None, None, None)
    with Calls() as calls, FlopCounterMode(display=False) as counted:
        seen = layer(x), single_query_attention(q, k, k, None, None, None)
    assert calls.names.count("packed_linear") == calls.names.count("single_query_attention") == 1
    assert all(torch.equal(a, b) for a, b in zip(real, seen, strict=True))
    assert counted.get_total_flops() == 2 * 3 * 5 * 32 * 70 + 4 * 2 * 4 * 9 * 16
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(mode.from_tensor(x)), single_query_attention(*map(mode.from_tensor, (q, k, k)), None, None, None)
    assert [(t.shape, t.stride()) for t in real] == [(t.shape, t.stride()) for t in fake]
