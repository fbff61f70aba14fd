"""A pass by our kernels in one call against the same packed model layer by layer, and when it steps aside."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.decode import DecodeBlocks, KernelStack
from heedful.kernels.cpu.library import library
from heedful.models.base import Batch, EncoderDecoderModel
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState
from support import families
from support.tiny import tiny as random_model

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")

CASES = {c.name: c for c in families.CASES if c.generates}
ONE_CALL = [  # decoders that are one call; contract/test_contract.py says which are not, and why
    name for name, case in CASES.items() if any(isinstance(m, KernelStack) for m in case.model("inference").modules())
]
DECODERS = [name for name in ONE_CALL if CASES[name].packs and "longrope" not in name]  # that has a state of its own


def tiny(name: str, precision: str = "float32"):
    return accelerate(CASES[name].model(), "inference", precision=precision)


@contextmanager
def plain_blocks(model):
    """Inside, the decoder's blocks run one by one."""
    model.decoder.__class__ = Stack
    yield
    model.decoder.__class__ = KernelStack


def prompts(model) -> Batch:
    draw = torch.Generator().manual_seed(1)
    tokens, lengths = torch.randint(3, 50, (3, 9), generator=draw), torch.tensor([9, 2, 5])
    if isinstance(model, EncoderDecoderModel):
        return Batch(source=tokens, source_lengths=lengths)
    return Batch(tokens, lengths)


@torch.no_grad()
def steps(model, n: int = 4) -> torch.Tensor:
    """The logits of some steps of rows of different lengths, and of rows that came and went."""
    _, state = model.start(prompts(model))
    found = [model.step(torch.tensor([4 + i, 9, 6 + i]), state) for i in range(n)]
    state.select([2, 0, 0])
    found.append(model.step(torch.tensor([7, 8, 9]), state))
    state.remove_row(0)
    found.append(model.step(torch.tensor([7, 8]), state))
    found.append(model.step(torch.tensor([[7, 8, 3], [1, 2, 4]]), state).flatten(0, 1))
    found.append(model.step(torch.tensor([7, 8]), state))
    return torch.cat(found)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """One entry for each call of the library."""
    seen, real = [], DecodeBlocks.__call__
    monkeypatch.setattr(DecodeBlocks, "__call__", lambda *given: seen.append(1) or real(*given))
    return seen


@pytest.mark.parametrize("name", [n for n in ONE_CALL if "longrope" not in n])
def test_a_step_is_that_of_the_layers(name, calls):
    model = tiny(name)
    ours = steps(model)
    assert len(calls) == (8 if isinstance(model, EncoderDecoderModel) else 9)  # not where a source is read first
    with plain_blocks(model):
        theirs = steps(model)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("kind, limit", [("bfloat16", 0.05), ("float16", 1e-4), ("int8", 0.05), ("int4", 0.05)])
def test_so_it_is_with_fewer_bits(kind, limit):
    for name in "gpt2", "qwen3", "t5":
        model = tiny(name, kind)
        ours = steps(model)
        with plain_blocks(model):
            theirs = steps(model)
        assert (ours - theirs).abs().max() < limit * theirs.abs().max()


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company():
    model = tiny("llama3.2", "int8")
    tokens = torch.randint(3, 50, (5, 6), generator=torch.Generator().manual_seed(1))
    _, state = model.start(Batch(tokens))
    alone = []
    for i in range(5):
        _, single = model.start(Batch(tokens))
        single.select([i])
        alone.append(model.step(torch.tensor([5 + i]), single)[0])
    assert torch.equal(model.step(torch.tensor([5, 6, 7, 8, 9]), state), torch.stack(alone))


def pages(model, n_rows: int) -> PagedState:
    return PagedState(BlockPool(60, 4), len(model.decoder.blocks), n_rows)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_pages_give_the_same_bits(name, calls):
    """Prompts of different lengths, steps, rows that come twice, go and are cut; and nothing is lost of the pool."""
    model = tiny(name)
    batch = prompts(model)
    logits, plain = model.start(batch)
    paged = pages(model, 3)
    found, same = model.start(batch, state=paged)
    assert same is paged and torch.equal(found, logits) and paged.lengths == plain.lengths
    assert paged.pool.n_used == sum(-(-n // 4) for n in paged.lengths)  # padding takes no room
    for act in (
        lambda s: None,
        lambda s: s.select([2, 0, 0, 1]),
        lambda s: s.remove_row(1),
        lambda s: s.truncate([5, 2, 4]),
        lambda s: s.free(1),
    ):
        act(plain), act(paged)
        tokens = torch.tensor([7, 8, 9, 10][: plain.n_rows])
        several = torch.stack([tokens, tokens + 3, tokens + 5], dim=1)
        assert torch.equal(model.step(tokens, paged), model.step(tokens, plain))
        assert torch.equal(model.step(several, paged), model.step(several, plain))
        assert paged.lengths == plain.lengths
    assert len(calls) == 2 + 4 * 5
    paged.select([])
    assert paged.pool.n_used == 0


@pytest.mark.parametrize("kind", ["float32", "int8"])
@torch.no_grad()
def test_a_text_may_be_cut_anywhere(kind, monkeypatch):
    model = tiny("llama3.2", kind)
    tokens = torch.randint(3, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    whole = model.step(tokens, pages(model, 1))
    parts, state = [], pages(model, 1)
    for n in 1, 7, 16, 3, 13:
        at = state.lengths[0]
        parts.append(model.step(tokens[:, at : at + n], state))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    monkeypatch.setattr("heedful.kernels.cpu.decode_op.MAX_TOKENS", 6)
    assert torch.equal(model.step(tokens, pages(model, 1)), whole)
    beside = pages(model, 3)
    beside.lengths = [0, 0, 0]
    batch = Batch(torch.cat([tokens, tokens.flip(1), tokens + 0]), torch.tensor([40, 11, 23]))
    assert torch.equal(model.start(batch, state=beside)[0][[0, 2]], whole[0, [39, 22]])


@torch.no_grad()
def test_what_was_left_in_a_block_does_no_harm():
    """A block that held no numbers is used again, by our kernels and then by PyTorch's, which read all of it."""
    model = tiny("gpt2")
    pool = BlockPool(2, 4)
    state = PagedState(pool, 2, 1)
    model.step(torch.tensor([[3, 4, 5]]), state)
    for layer in pool.layers.values():
        for values in layer:
            values.fill_(torch.nan)
    state.select([])
    state = PagedState(pool, 2, 1)
    model.step(torch.tensor([[3, 4]]), state)
    with plain_blocks(model):
        found = model.step(torch.tensor([[5, 6, 7]]), state)[0, -1]
    _, plain = model.start(Batch(torch.tensor([[3, 4, 5, 6]])))
    assert (found - model.step(torch.tensor([7]), plain)[0]).abs().max() < 1e-4


def test_threads_change_nothing():
    model, before = tiny("gpt2", "int8"), torch.get_num_threads()
    found = []
    try:
        for n in 1, 2, 3:
            torch.set_num_threads(n)
            found.append(steps(model, 2))
    finally:
        torch.set_num_threads(before)
    assert (found[0] - found[1]).abs().max() < 1e-6 and (found[0] - found[2]).abs().max() < 1e-6


@torch.no_grad()
def test_hooks_and_watches_get_the_plain_blocks(calls):
    model = tiny("gpt2")
    _, state = model.start(Batch(torch.tensor([[3, 4, 5]])))
    seen: list[int] = []
    hook = model.decoder.blocks[1].attention.register_forward_hook(lambda *given: seen.append(1))
    model.step(torch.tensor([4]), state)
    assert seen == [1] and len(calls) == 1
    hook.remove()
    model.step(torch.tensor([4]), state)
    assert len(calls) == 2
    model.decoder.blocks[0].attention.watch.on = True
    model.step(torch.tensor([4]), state)
    assert len(calls) == 2


class Strange(KeyValueState):
    """A state that the library does not know."""


@torch.no_grad()
def test_other_states_and_gradients_get_the_plain_blocks(calls):
    model = tiny("gpt2")
    _, state = model.start(Batch(torch.tensor([[3, 4, 5]])))
    assert len(calls) == 1
    model.start(Batch(torch.tensor([[3, 4, 5]])), state=Strange(2, 1))
    with torch.enable_grad():
        model.step(torch.tensor([4]), state)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "family, size, window", [("llama", 16, None), ("llama", 64, None), ("mistral", 32, 5), ("mistral", 80, 40)]
)
@torch.no_grad()
def test_a_long_prompt_in_one_pass_has_the_bits_of_its_tokens_one_by_one(family, size, window):
    model = random_model(family, d_head=size, max_len=128, **({} if window is None else {"window": window}))
    for p in model.parameters():
        p.mul_(0.1 if p.ndim > 1 else 1)
    tokens = torch.randint(3, 60, (1, 100), generator=torch.Generator().manual_seed(0))
    plain = model(tokens).logits[0]
    accelerate(model, "inference", precision="float32")

    def logits(parts, block=None):
        state = model.new_state(1, 128) if block is None else PagedState(BlockPool(64, block), 2, 1)
        return torch.cat([model.step(part, state)[0] for part in tokens.split(parts, dim=1)])

    alone = logits([1] * 100)
    assert (alone - plain).abs().max() < 2e-5 * plain.abs().max()
    for block in (None, 4, 16, 24):
        for parts in ([100], [7, 1, 13, 79]):
            assert torch.equal(logits(parts, block), alone)
