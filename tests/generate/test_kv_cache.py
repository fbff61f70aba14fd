"""A KV cache in 8 bits, from the option to the scores: what it loses, what it never depends on, what it takes."""

from __future__ import annotations

import re

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.data.samples import sample_file
from heedful.evaluate.perplexity import score_text
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.library import library
from heedful.models.base import Batch
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import KeyValueState
from heedful.serve.memory import estimate_memory
from heedful.weights.resolve import shipped_models
from support.case import error
from support.families import CASES

# Grouped queries, norms on queries, windows, biases by distance, parallel blocks, cross-attention, LongRoPE.
CHOSEN = ("gpt2", "gpt-j", "llama3", "gemma2", "olmo2", "t5-v1.1", "marian", "phi3-longrope")
chosen = pytest.mark.parametrize("case", [c for c in CASES if c.name in CHOSEN], ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def decoded(model, batch: Batch) -> torch.Tensor:
    """The logits after a prompt and of some steps, with rows that were reordered."""
    logits, state = model.start(batch)
    found = [logits, *(model.step(torch.tensor([4 + i, 9, 6 + i]), state) for i in range(5))]
    state.select([2, 0, 0])
    return torch.cat([*found, model.step(torch.tensor([[7, 8], [9, 4], [5, 5]]), state).flatten(0, 1)])


@chosen
def test_steps_are_near_those_with_floats_on_both_paths(case):
    model, batch = case.model(), case.batch()
    exact = decoded(model, batch)
    model.set_kv_cache("int8")
    plain = decoded(model, batch)
    ours = decoded(accelerate(model, "inference"), batch)
    assert 0 < error(plain, exact) < 0.03 and error(ours, exact) < 0.03
    assert error(ours, plain) < 0.01  # a number between two steps may go either way


@pytest.mark.skipif(library() is None, reason="PyTorch's products depend on the batch in the last bit")
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_neither_chunks_nor_other_rows_nor_pages_change_a_bit(name):
    model = accelerate(next(c for c in CASES if c.name == name).model(), "inference")
    model.set_kv_cache("int8")
    ids = torch.randint(3, 50, (3, 40), generator=torch.Generator().manual_seed(1))

    def score(state: KeyValueState, rows: list[int], chunks: list[int]) -> torch.Tensor:
        return torch.cat([model.step(part, state) for part in ids[rows].split(chunks, dim=1)], dim=1)

    n = len(model.decoder.blocks)
    whole = score(model.new_state(3, 0), [0, 1, 2], [40])
    assert torch.equal(score(model.new_state(3, 0), [0, 1, 2], [7, 1, 1, 13, 18]), whole)
    assert torch.equal(score(model.new_state(1, 0), [1], [20, 20]), whole[1:2])
    assert torch.equal(score(PagedState(BlockPool(9, 16, kind="int8"), n, 3), [0, 1, 2], [1, 39]), whole)


@pytest.mark.skipif(library() is None, reason="the C kernels are compared with PyTorch's operators")
def test_one_layer_by_the_kernels_is_that_of_the_plain_path():
    """In the first layer both round the same numbers."""
    model = heedful.load("shakespeare", dtype=torch.float32, kv_cache="int8").model
    ids = torch.randint(3, 60, (2, 50), generator=torch.Generator().manual_seed(1))
    states = []
    for path in ("plain", "kernels"):
        if path == "kernels":
            accelerate(model, "inference")
        states.append(model.new_state(2, 0))
        model.hidden(Batch(ids), states[-1])
    for name in ("keys", "values"):
        plain, ours = (getattr(state.caches[0], name)[:2, :, :50] for state in states)
        assert (plain != ours).float().mean() < 1e-3
        assert (plain[..., :-2].int() - ours[..., :-2].int()).abs().max() <= 1


def test_perplexity_is_within_a_thousandth():
    text = sample_file("sample:text").read_text(encoding="utf-8")[:4000]
    loaded = [heedful.load("shakespeare", quantize="float32", kv_cache=kind) for kind in (None, "int8")]
    exact, rounded = (score_text(m.model, m.tokenizer, text, window=256, stride=256).perplexity for m in loaded)
    assert exact != rounded and abs(rounded / exact - 1) < 1e-3


def test_the_engine_pages_it_and_reuses_prefixes():
    """Greedy answers of requests that share a prefix, in a pool and alone; each block takes the bytes told."""
    loaded = heedful.load("shakespeare", quantize="float32", kv_cache="int8")
    prompt = loaded.tokenizer.encode("ROMEO:\nO, she doth teach the torches to burn bright!\n")
    requests = [
        Request(prompt=(*prompt, token), sampling=Sampling(temperature=0), max_tokens=12) for token in (5, 6, 5)
    ]
    alone = [Engine(loaded.model).run([request])[0].choices[0].tokens for request in requests]
    engine = Engine(loaded.model, state="paged", cache_tokens=512)
    assert [result.choices[0].tokens for result in engine.run(requests)] == alone
    again = engine.runner.n_prefilled
    assert engine.run(requests[:1])[0].choices[0].tokens == alone[0] and engine.runner.n_prefilled - again < len(prompt)
    pool = engine.runner.pool
    taken = sum(keys.nbytes + values.nbytes for keys, values in pool.layers.values())
    assert taken == 512 * loaded.model.kv_bytes_per_token("int8")
    assert 3.5 < loaded.model.kv_bytes_per_token() / loaded.model.kv_bytes_per_token("int8") < 4


def test_beams_and_drafts_are_those_of_plain_decoding():
    loaded = heedful.load("shakespeare", quantize="float32", kv_cache="int8")
    greedy = loaded.generate("ROMEO:", max_tokens=30, temperature=0)
    assert loaded.generate("ROMEO:", max_tokens=30, temperature=0, draft="lookup") == greedy
    assert loaded.generate("ROMEO:", max_tokens=30, beams=3)


def test_the_server_counts_the_smaller_cache():
    path = shipped_models()["shakespeare"]
    model = heedful.load("shakespeare").model
    plain, small = (estimate_memory(path, None, 1000, None, kind) for kind in (None, "int8"))
    n_heads, d_head, n_layers = model.config.n_heads, model.decoder.blocks[0].attention.d_head, model.config.n_layers
    assert plain.per_token == 2 * n_layers * n_heads * d_head * 4
    assert small.per_token == 2 * n_layers * n_heads * (d_head + 2)
    assert plain.minimum - small.minimum == 1000 * (plain.per_token - small.per_token)


def test_the_option_is_the_same_on_the_command_line(capsys, tmp_path):
    written = ["--max-tokens", "20", "--temperature", "0", "--quantize", "float32", "--kv-cache", "int8"]
    assert main(["generate", "shakespeare", "ROMEO:", *written]) == 0
    loaded = heedful.load("shakespeare", quantize="float32", kv_cache="int8")
    assert capsys.readouterr().out == "ROMEO:" + loaded.generate("ROMEO:", max_tokens=20, temperature=0) + "\n"
    assert main(["info", "shakespeare"]) == 0
    assert re.search(r"KV cache +9.22 kB per token, int8 2.45 kB", capsys.readouterr().out)


def test_a_model_without_a_kv_cache_says_so():
    with pytest.raises(ValueError, match="a bert has no KV cache"):
        heedful.load("sentiment", kv_cache="int8")
    with pytest.raises(ValueError, match="a seq2seq has no KV cache"):
        next(c for c in CASES if c.name == "seq2seq-gru-bi-dot").model().set_kv_cache("int8")
    with pytest.raises(ValueError, match="stored as int8, not as int2"):
        heedful.load("shakespeare", kv_cache="int2")  # type: ignore[arg-type]
