"""Blocks trained by our kernels against the same blocks by PyTorch in float64, and when the kernels step aside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from heedful.kernels.accelerate import accelerate, restore
from heedful.kernels.cpu import adamw
from heedful.kernels.cpu import block as training
from heedful.kernels.cpu.library import library
from heedful.kernels.cpu.memory import keep_memory
from heedful.models.base import Batch, Model
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.llama import Llama, LlamaConfig
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.norm import RMSNorm
from heedful.nn.stack import Stack
from heedful.train.objectives import causal

needs_kernels = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch) -> list[Block]:
    """The blocks that went through the kernels."""
    seen: list[Block] = []
    real = training._run
    monkeypatch.setattr(training, "_run", lambda block, *given: seen.append(block) or real(block, *given))
    return seen


def rough(model: nn.Module) -> nn.Module:
    """Weights far from their first values: large, and no bias 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.1 * torch.randn_like(p) if p.ndim < 2 else 4 * p)
    return accelerate(model.train(), "training")


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def differs(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of a gradient beside its largest number (that of a key's bias is 0 but for rounding)."""
    assert found.keys() == exact.keys()
    largest = max(e.abs().max() for e in exact.values())
    return max(
        ((f - exact[n]).abs().max() / max(exact[n].abs().max(), 1e-2 * largest)).item() for n, f in found.items()
    )


def gpt(length=20, **settings) -> Model:
    sizes = {"d_model": 48, "n_layers": 2, "n_heads": 3, "vocab_size": 31, "max_len": length, "dropout": 0.0}
    return rough(GPT.create(GPTConfig(**sizes | settings)))


def llama(**settings) -> Model:
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 100, "vocab_size": 31}
    return rough(Llama.create(LlamaConfig(**sizes | settings)))


def tokens(n_rows: int, length: int) -> Tensor:
    return torch.randint(31, (n_rows, length))


def documents(n_rows: int, length: int) -> Tensor:
    return torch.randint(3, (n_rows, length)).sort(dim=1).values


CASES = {
    "gpt": lambda: (gpt(), Batch(tokens(5, 20))),
    "one row, many positions": lambda: (gpt(150), Batch(tokens(1, 150))),
    "odd sizes": lambda: (gpt(70, d_model=21, d_ff=37, d_head=5), Batch(tokens(3, 70))),
    "wide heads": lambda: (gpt(13, d_head=72), Batch(tokens(4, 13))),
    "deep products": lambda: (gpt(30, d_model=96, d_ff=300), Batch(tokens(14, 30))),
    "erf": lambda: (gpt(act="gelu"), Batch(tokens(5, 20))),
    "relu": lambda: (gpt(act="relu"), Batch(tokens(5, 20))),
    "two positions": lambda: (gpt(), Batch(tokens(9, 3))),
    "window": lambda: (gpt(40, band=7), Batch(tokens(3, 40))),
    "documents": lambda: (gpt(40), Batch(tokens(3, 40), documents=documents(3, 40))),
    "llama": lambda: (llama(), Batch(tokens(5, 33))),
    "llama, documents": lambda: (llama(), Batch(tokens(3, 33), documents=documents(3, 33))),
}


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_a_model_learns_the_same_as_by_pytorch(case, calls, threads):
    model, batch = CASES[case]()
    ours = causal(model, batch).sum
    found = gradients(model, ours)
    assert len(calls) == 2
    exact = causal(model.double(), batch).sum  # which the kernels leave to PyTorch
    assert len(calls) == 2
    assert abs(ours.item() / exact.item() - 1) < 1e-6
    assert differs(found, gradients(model, exact)) < 1e-5


def autocast_gradients(model: Model, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = causal(model, batch).sum
    return gradients(model, loss)


@needs_kernels
@pytest.mark.parametrize("case", ["gpt", "one row, many positions", "odd sizes", "deep products", "llama"])
def test_bfloat16_is_closer_to_float32_than_autocast_is(case, calls, threads):
    model, batch = CASES[case]()
    exact = autocast_gradients(model, batch, torch.float32)
    ours = autocast_gradients(model, batch, torch.bfloat16)
    assert len(calls) == 4
    autocast = autocast_gradients(restore(model), batch, torch.bfloat16)
    assert len(calls) == 4

    def error(found: dict[str, Tensor]) -> float:
        return sum(((found[name] - exact[name]) ** 2).sum() for name in exact) ** 0.5

    assert error(ours) < error(autocast)


def encoder(norm) -> Stack:
    attention = Attention(32, 2)
    block = PreNormBlock(attention, FeedForward(32, 70, "silu", bias=False), Norms(norm(32), norm(32)))
    return accelerate(Stack([block], causal=False).train(), "training")


@needs_kernels
@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
@pytest.mark.parametrize("lengths", [None, [9, 1, 4]])
def test_a_bidirectional_block_learns_the_same(norm, lengths, calls):
    stack, x = encoder(norm), torch.randn(3, 9, 32)
    given = {
        "positions": torch.arange(9)[None],
        "lengths": None if lengths is None else torch.tensor(lengths),
    }
    weigh = torch.randn(3, 9, 32)
    found, exact = [], []
    for precise, kept in ((False, found), (True, exact)):
        stack = stack.double() if precise else stack
        at = x.detach().to(torch.float64 if precise else torch.float32).requires_grad_()
        kept.append(gradients(stack, (stack(at, **given) * weigh).sum()) | {"x": at.grad.double()})
    assert len(calls) == 1
    assert differs(found[0], exact[0]) < 1e-5


@needs_kernels
def test_the_same_step_twice_is_the_same_to_the_last_bit(threads):
    model, batch = gpt(), Batch(tokens(5, 20))
    first, again = (gradients(model, causal(model, batch).sum) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@needs_kernels
def test_recomputing_a_block_changes_nothing(calls):
    model, batch = gpt(), Batch(tokens(5, 20))
    plain = gradients(model, causal(model, batch).sum)
    model.decoder.recompute = True
    again = gradients(model, causal(model, batch).sum)
    assert len(calls) == 6 and all(torch.equal(plain[name], again[name]) for name in plain)


@needs_kernels
def test_what_is_frozen_has_no_gradient(calls):
    model, batch = gpt(), Batch(tokens(5, 20))
    whole = gradients(model, causal(model, batch).sum)
    for name, p in model.named_parameters():
        p.requires_grad = "blocks.1" in name and "up" not in name and "norm.bias" not in name
    part = gradients(model, causal(model, batch).sum)
    assert len(part) == 12 and all(torch.equal(whole[name], part[name]) for name in part)


@needs_kernels
@pytest.mark.parametrize("name", ["query.weight", "value.bias", "up.bias", "attention_norm.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(name, value):
    model, batch = gpt(), Batch(tokens(5, 20))
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith(name)).view(-1)[0] = value
    assert not all(g.isfinite().all() for g in gradients(model, causal(model, batch).sum).values())


@needs_kernels
def test_weights_that_changed_after_the_forward_pass_are_an_error():
    model, batch = gpt(), Batch(tokens(5, 20))
    optimizer = adamw.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        loss = causal(model, batch).sum
        gradients(model, loss)
        optimizer.step()
    late = causal(model, batch).sum
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_the_kernels_step_aside_for_what_they_do_not_know(calls):
    batch = Batch(tokens(2, 20))

    def through(model: Model) -> int:
        calls.clear()
        causal(model, batch).sum.backward()
        return len(calls)

    expected = 0 if library() is None else 2
    assert through(gpt()) == expected
    assert through(gpt().eval()) == 0  # nothing is trained
    assert through(gpt(dropout=0.1)) == expected
    assert through(gpt(norm_first=False)) == 0
    assert through(gpt(act="quick_gelu")) == 0
    watched, hooked, wrapped = gpt(), gpt(), gpt()
    watched.decoder.blocks[0].attention.watch.on = True
    assert through(watched) == max(0, expected - 1)
    seen: list[Tensor] = []
    hooked.decoder.blocks[0].feedforward.up.register_forward_hook(lambda *given: seen.append(given[2]))
    assert through(hooked) == max(0, expected - 1) and len(seen) == 1
    wrapped.decoder.blocks[1].attention.value = nn.Sequential(wrapped.decoder.blocks[1].attention.value)
    assert through(wrapped) == max(0, expected - 1)
    calls.clear()
    with torch.autocast("cpu", torch.float16):
        causal(gpt(), batch)
    with torch.no_grad():
        causal(gpt(), batch)
    assert not calls


def test_keeping_memory_is_no_more_than_a_wish():
    keep_memory()
    keep_memory()
    assert torch.ones(10**6).sum() == 10**6
