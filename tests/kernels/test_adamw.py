"""What our kernels do to lists of tensors against PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

from heedful.kernels.cpu import adamw as kernels
from heedful.kernels.cpu.library import library

needs_kernels = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")
SIZES = [(1,), (16,), (17, 3), (64, 65), (5, 4, 3), (1000,)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


@needs_kernels
def test_norm_and_scale(threads):
    tensors = draw(0)
    exact = torch.cat([t.flatten() for t in tensors]).double().norm().item()
    assert kernels.supports_tensors(tensors)
    assert abs(float(kernels.total_norm(tensors)) / exact - 1) < 1e-6
    kernels.scale_(tensors, 0.25)
    assert all(torch.equal(t, 0.25 * before) for t, before in zip(tensors, draw(0), strict=True))


@needs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_norm_says_what_is_no_number(value):
    tensors = draw(0)
    tensors[3][-1, -1] = value
    assert not torch.isfinite(kernels.total_norm(tensors))


def adamw(kind: type[torch.optim.AdamW], weights: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    return kind(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=True)


def take_steps(optimizer: torch.optim.AdamW, weights: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        for p, g in zip(weights, draw(seed), strict=True):
            p.grad = g
        weights[1].grad = None if seed % 2 else weights[1].grad  # not all learn in every step
        optimizer.step()


def test_adamw_is_torchs(threads):
    """Step by step, and when either goes on with the state of the other."""
    ours, theirs = ([torch.nn.Parameter(t) for t in draw(9)] for _ in range(2))
    one, two = adamw(kernels.AdamW, ours), adamw(torch.optim.AdamW, theirs)
    take_steps(one, ours, range(6))
    take_steps(two, theirs, range(6))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-6
    three, four = adamw(kernels.AdamW, theirs), adamw(torch.optim.AdamW, ours)
    three.load_state_dict(two.state_dict())
    four.load_state_dict(one.state_dict())
    take_steps(three, theirs, range(6, 9))
    take_steps(four, ours, range(6, 9))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-6
        assert three.state[b]["step"] == four.state[a]["step"]


def test_what_the_kernels_do_not_take_is_torchs():
    weights = [torch.nn.Parameter(torch.ones(4, 3).double()), torch.nn.Parameter(torch.ones(3, 4).T)]
    assert not kernels.supports_tensors(weights[:1]) and not kernels.supports_tensors(weights[1:])
    optimizer = kernels.AdamW(weights, lr=0.1)
    for _ in range(3):
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all((p < 0.8).all() for p in weights)
