"""Dropout in the training kernels: its random numbers against Philox in numpy, results and gradients against PyTorch
with the same masks, and what follows from torch's seed.

    B batch, T positions, H heads, E width, F hidden width
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.library import library
from heedful.models.base import Batch
from heedful.models.gpt import GPT, GPTConfig
from heedful.nn.attention import Attention
from heedful.nn.block import Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.stack import Stack
from heedful.train.objectives import causal

pytestmark = pytest.mark.skipif(library() is None, reason="dropout is PyTorch's without the C kernels")


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011, section 3.3) of counters (..., 4)."""
    low, (key0, key1) = np.uint64(0xFFFFFFFF), map(np.uint64, key)
    w0, w1, w2, w3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    for _ in range(10):
        first, second = w0 * np.uint64(0xD2511F53), w2 * np.uint64(0xCD9E8D57)
        w0, w1 = (second >> np.uint64(32)) ^ w1 ^ key0, second & low
        w2, w3 = (first >> np.uint64(32)) ^ w3 ^ key1, first & low
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
    return np.stack([w0, w1, w2, w3], axis=-1)


def factors(seed: int, place: int, n_rows: int, n: int, p: float) -> Tensor:
    """The dropout factors (n_rows, n) as csrc/block_dropout.c describes them."""
    columns = np.arange(n)
    counter = np.zeros((n_rows, n, 4), np.uint64)
    counter[..., 0] = columns // 32 * 8 + columns % 16 // 2
    counter[..., 1], counter[..., 3] = np.arange(n_rows)[:, None], place
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    chosen = np.take_along_axis(words, (columns % 32 // 16 * 2 + columns % 2)[None, :, None], axis=-1)[..., 0]
    return torch.from_numpy((chosen >= int(p * 2**32)) / (1 - p))


def test_philox_has_its_published_answers():
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]  # from the authors' file of known answers
    found = [hex(word) for word in philox(np.array(pi), (0xA4093822, 0x299F31D0))]
    assert found == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]
    found = [hex(word) for word in philox(np.zeros(4), (0, 0))]
    assert found == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def block_of(rms: bool, gated: bool, *, weights=0.3, residual=0.2, hidden=0.4) -> PreNormBlock:
    attention = Attention(48, 4, n_kv_heads=2, dropout=weights)
    network = FeedForward(48, 70, "silu", gated=gated, dropout=hidden)
    norm = RMSNorm if rms else torch.nn.LayerNorm
    return PreNormBlock(attention, network, Norms(norm(48), norm(48)), dropout=residual)


def expected(block: PreNormBlock, x: Tensor, seed: int) -> Tensor:
    """The block in PyTorch's operators, with the factors that belong to the seed."""
    attention, network = block.attention, block.feedforward
    n, length, width = x.shape
    residual, n_heads = block.dropout.p, attention.n_heads
    normed = block.attention_norm(x)
    q, k, v = (part(normed).unflatten(-1, (-1, 12)).transpose(1, 2) for part in _projections(attention))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / 12**0.5).masked_fill(hidden, -torch.inf).softmax(dim=-1)
    weights = weights * factors(seed, 0, n * n_heads * length, length, attention.dropout).view_as(weights)
    attended = (weights @ v).transpose(1, 2).flatten(2)
    x = x + attention.output(attended) * factors(seed, 1, n * length, width, residual).view_as(x)
    normed = block.feedforward_norm(x)
    inner = F.silu(network.up(normed)) if network.gate is None else F.silu(network.gate(normed)) * network.up(normed)
    inner = inner * factors(seed, 2, n * length, inner.shape[-1], network.dropout.p).view_as(inner)
    return x + network.down(inner) * factors(seed, 3, n * length, width, residual).view_as(x)


def _projections(attention: Attention) -> list[torch.nn.Linear]:
    return [attention.query, attention.key, attention.value]


def next_seed() -> int:
    """What a block will draw, without drawing it."""
    state = torch.get_rng_state()
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.set_rng_state(state)
    return seed


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rms, gated", [(False, False), (True, True)])
def test_results_and_gradients_are_those_of_pytorch_with_the_same_masks(rms, gated, threads):
    torch.manual_seed(3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        stack = accelerate(Stack([block_of(rms, gated)], causal=True).train(), "training")
        x, weigh = torch.randn(2, 37, 48), torch.randn(2, 37, 48)
        seed, at = next_seed(), x.clone().requires_grad_()
        y = stack(at, torch.arange(37)[None])
        (y * weigh).sum().backward()
    finally:
        torch.set_num_threads(before)
    found = {name: p.grad.double() for name, p in stack.named_parameters()} | {"x": at.grad.double()}
    stack.zero_grad()
    stack, exact_x = stack.double(), x.double().requires_grad_()
    exact = expected(stack.blocks[0], exact_x, seed)
    (exact * weigh).sum().backward()
    assert (y - exact).abs().max() < 1e-5
    right = {name: p.grad for name, p in stack.named_parameters()} | {"x": exact_x.grad}
    largest = max(g.abs().max() for g in right.values())
    assert found.keys() == right.keys()
    assert all((found[name] - right[name]).abs().max() < 1e-5 * largest for name in right)


def revealing(p: float) -> Stack:
    """A stack of one block that adds its dropout factors to x: its attention is 1, its feed-forward network 0."""
    block = block_of(False, False, residual=p)
    with torch.no_grad():
        for layer, bias in ((block.attention.output, 1.0), (block.feedforward.down, 0.0)):
            layer.weight.zero_()
            layer.bias.fill_(bias)
    return accelerate(Stack([block], causal=True).train(), "training")


def test_the_factors_are_distributed_as_dropout_has_them():
    torch.manual_seed(4)
    p, positions = 0.2, torch.arange(256)[None]
    stack = revealing(p)
    # Two steps, or two layers: what a block is called for makes no difference to the seed that it draws.
    first, second = (stack(torch.zeros(8, 256, 48), positions).detach().double() for _ in range(2))
    n = first.numel()
    assert torch.unique(first).allclose(torch.tensor([0, 1.25], dtype=torch.double))
    kept = (first > 0).double()
    assert abs(kept.mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    assert abs(first.mean() - 1) < 0.01 and abs(first.var() - p / (1 - p)) < 0.01
    centred = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    others = {
        "the next column": (centred[..., 1:], centred[..., :-1]),
        "the next position": (centred[:, 1:], centred[:, :-1]),
        "the next row": (centred[1:], centred[:-1]),
        "16 columns further": (centred[..., 16:], centred[..., :-16]),
        "the next step": (centred, ((second > 0).double() - (1 - p)) / (p * (1 - p)) ** 0.5),
    }
    for name, (one, two) in others.items():
        assert abs((one * two).mean()) < 4 / one.numel() ** 0.5, name


def gpt(p: float) -> tuple[GPT, Batch]:
    torch.manual_seed(5)
    sizes = {"d_model": 48, "n_layers": 2, "n_heads": 3, "vocab_size": 31, "max_len": 20}
    model = GPT.create(GPTConfig(**sizes, dropout=p)).train()
    return accelerate(model, "training"), Batch(torch.randint(31, (5, 20)))


def gradients(model: GPT, batch: Batch, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    causal(model, batch).sum.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_step_follows_from_the_seed_and_recomputed_blocks_drop_the_same():
    model, batch = gpt(0.2)
    one, again, other = (gradients(model, batch, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    model.decoder.recompute = True
    assert all(map(torch.equal, one, gradients(model, batch, 1)))


def test_without_dropout_nothing_is_drawn_and_all_of_it_drops_both_sublayers():
    model, batch = gpt(0.0)
    gradients(model, batch, 1)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    x = torch.randn(3, 9, 48)
    assert torch.equal(revealing(1.0)(x, torch.arange(9)[None]), x)
    stack = revealing(0.5)
    stack.blocks[0].dropout.eval()
    assert torch.equal(stack(x, torch.arange(9)[None]), x + 1)
