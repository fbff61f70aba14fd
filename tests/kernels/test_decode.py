"""A pass by our kernels in one call against the same packed model layer by layer, and when it steps aside."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.kernels.cpu.library import library
from heedful.kernels.pack import pack
from heedful.models.base import Batch, EncoderDecoderModel
from heedful.nn.paged import PagedState, Pool
from heedful.nn.state import KeyValueState

pytestmark = pytest.mark.skipif(
    library() is None, reason="our kernels need Linux, AVX-512 with VNNI and BF16, and a C compiler"
)

SMALL = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 96, "vocab_size": 50}
GROUPED = SMALL | {"n_kv_heads": 2, "d_head": 16, "full_layers": 0}
FUSED = {
    "gpt2": SMALL | {"max_len": 64},
    "gpt3-125m": SMALL | {"max_len": 64},
    "gpt1": SMALL | {"max_len": 64},
    "gpt-neo-125m": SMALL | {"max_len": 64, "window": 5},
    "gpt-j-6b": SMALL | {"d_rotary": 8, "max_len": 64},
    "pythia-70m": SMALL | {"max_len": 64},
    "llama3.2-1b": GROUPED,
    "mistral-7b-v0.1": GROUPED | {"window": 4},
    "qwen2.5-0.5b": GROUPED,
    "qwen3-0.6b": GROUPED,
    "olmo2-1b": SMALL,
    "gemma-2b": GROUPED,
    "phi3-mini-4k": SMALL,
    "t5-small": SMALL | {"d_head": 16, "n_decoder_layers": 2},
    "flan-t5-small": SMALL | {"d_head": 16, "n_decoder_layers": 2},
    "opus-mt-en-de": SMALL | {"n_decoder_layers": 2, "max_len": 64, "start_id": 1, "pad_id": 1},
}


def settings(name: str) -> dict[str, object]:
    """Those of the wished that this family has."""
    known = heedful.create(name, device="meta").config
    return {key: value for key, value in FUSED[name].items() if hasattr(known, key)}


def tiny(name: str, kind: str = "float32"):
    torch.manual_seed(0)
    model = heedful.create(name, **settings(name)).eval()
    for p in model.parameters():  # what begins at 0 or 1 would hide mistakes
        p.data += 0.1 * torch.randn_like(p)
    return pack(model, kind)


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
    state.drop(0)
    found.append(model.step(torch.tensor([7, 8]), state))
    found.append(model.step(torch.tensor([[7, 8, 3], [1, 2, 4]]), state).flatten(0, 1))
    found.append(model.step(torch.tensor([7, 8]), state))
    return torch.cat(found)


@pytest.mark.parametrize("name", FUSED)
def test_a_step_is_that_of_the_layers(name):
    model = tiny(name)
    assert model.decoder.fused is not None
    calls = []
    fused, model.decoder.fused = model.decoder.fused, Counting(model.decoder.fused, calls)
    ours = steps(model)
    assert len(calls) == (8 if isinstance(model, EncoderDecoderModel) else 9)  # not where a source is read first
    model.decoder.fused = None
    theirs = steps(model)
    assert fused is not None and (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


class Counting:
    def __init__(self, fused, calls):
        self.fused, self.calls, self.can = fused, calls, fused.can

    def __call__(self, *given):
        self.calls.append(1)
        return self.fused(*given)


@pytest.mark.parametrize("kind, limit", [("bfloat16", 0.05), ("float16", 1e-4), ("int8", 0.05), ("int4", 0.05)])
def test_so_it_is_with_fewer_bits(kind, limit):
    for name in "gpt2", "qwen3-0.6b", "t5-small":
        model = tiny(name, kind)
        ours = steps(model)
        model.decoder.fused = None
        theirs = steps(model)
        assert (ours - theirs).abs().max() < limit * theirs.abs().max()


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company():
    model = tiny("llama3.2-1b", "int8")
    tokens = torch.randint(3, 50, (5, 6), generator=torch.Generator().manual_seed(1))
    _, state = model.start(Batch(tokens))
    alone = []
    for i in range(5):
        _, single = model.start(Batch(tokens))
        single.select([i])
        alone.append(model.step(torch.tensor([5 + i]), single)[0])
    assert torch.equal(model.step(torch.tensor([5, 6, 7, 8, 9]), state), torch.stack(alone))


def pages(model, n_rows: int) -> PagedState:
    return PagedState(Pool(60, 4), len(model.decoder.blocks), n_rows)


@pytest.mark.parametrize("name", [n for n in FUSED if n not in ("t5-small", "flan-t5-small", "opus-mt-en-de")])
@torch.no_grad()
def test_pages_give_the_same_bits(name):
    """Prompts of different lengths, steps, rows that come twice, go and are cut; and nothing is lost of the pool."""
    model = tiny(name)
    calls = []
    model.decoder.fused = Counting(model.decoder.fused, calls)
    batch = prompts(model)
    logits, plain = model.start(batch)
    paged = pages(model, 3)
    found, same = model.start(batch, state=paged)
    assert same is paged and torch.equal(found, logits) and paged.lengths == plain.lengths
    assert paged.pool.n_used == sum(-(-n // 4) for n in paged.lengths)  # padding takes no room
    for act in (
        lambda s: None,
        lambda s: s.select([2, 0, 0, 1]),
        lambda s: s.drop(1),
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
    model = tiny("llama3.2-1b", kind)
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
    pool = Pool(2, 4)
    state = PagedState(pool, 2, 1)
    model.step(torch.tensor([[3, 4, 5]]), state)
    for layer in pool.layers.values():
        for values in layer:
            values.fill_(torch.nan)
    state.select([])
    state = PagedState(pool, 2, 1)
    model.step(torch.tensor([[3, 4]]), state)
    fused, model.decoder.fused = model.decoder.fused, None
    found = model.step(torch.tensor([[5, 6, 7]]), state)[0, -1]
    model.decoder.fused = fused
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
def test_it_steps_aside_for_whoever_watches():
    model = tiny("gpt2")
    _, state = model.start(Batch(torch.tensor([[3, 4, 5]])))
    x = torch.randn(1, 1, 64)
    can = model.decoder.fused.can
    assert can(x, state)
    seen = []
    hook = model.decoder.blocks[1].attention.register_forward_hook(lambda *given: seen.append(1))
    assert not can(x, state)
    model.step(torch.tensor([4]), state)
    assert seen
    hook.remove()
    assert can(x, state)
    model.decoder.blocks[0].attention.watch.on = True
    assert not can(x, state)


class Strange(KeyValueState):
    """What another state remembers the kernels cannot know."""


@torch.no_grad()
def test_it_steps_aside_for_what_it_does_not_know():
    model = tiny("gpt2")
    _, state = model.start(Batch(torch.tensor([[3, 4, 5]])))
    can = model.decoder.fused.can
    assert can(torch.randn(1, 2, 64), state) and not can(torch.randn(1, 1, 64), None)
    assert not can(torch.randn(1, 1, 64), Strange(2, 1))
    with torch.enable_grad():
        assert not can(torch.randn(1, 1, 64), state)
    assert tiny("gpt2").decoder.fused is not None
    for name, changes in ("gemma2-2b", GROUPED), ("mixtral-8x7b", GROUPED | {"n_experts": 2}):
        known = heedful.create(name, device="meta").config
        model = heedful.create(name, **{k: v for k, v in changes.items() if hasattr(known, k)})
        assert pack(model, "float32").decoder.fused is None
