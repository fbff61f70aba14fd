"""Decoding on a GPU: steps by the kernels and in CUDA graphs give what the plain modules give, for every family.

What a graph's state computes is checked on any machine; the kernels and graphs themselves where there is a GPU.
"""

import pytest
import torch

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cuda import decode_graphs, has_triton, supports_graphs
from heedful.kernels.cuda.state import GraphState
from heedful.models.base import Batch
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import KeyValueState
from support.case import Decoder, error
from support.families import CASES

gpu = pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and Triton")
DECODERS = [case for case in CASES if isinstance(case, Decoder) and "longrope" not in case.name]
each_decoder = pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
LENGTHS = [25, 9, 17, 20, 12]


def prompts(model, n_rows: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 50, (n_rows, max(LENGTHS[:n_rows])), generator=draw)
    return Batch(tokens.to(model.device), torch.tensor(LENGTHS[:n_rows]).to(model.device))


def prefilled(model, n_rows: int) -> PagedState:
    state = PagedState(BlockPool(32, 8), len(model.decoder.blocks), n_rows)
    model.start(prompts(model, n_rows), state=state)
    return state


def new_tokens(n_steps: int, n_rows: int) -> list[list[int]]:
    return torch.randint(3, 50, (n_steps, n_rows), generator=torch.Generator().manual_seed(2)).tolist()


@each_decoder
@torch.inference_mode()
def test_a_step_needs_no_number_of_a_row_in_python(case):
    model = case.model()
    if type(model.new_state(0, 0)) is not KeyValueState:
        pytest.skip("a state of its own")
    state, graph = prefilled(model, 3), prefilled(model, 3)
    unused = graph.pool.allocate()
    for tokens in new_tokens(3, 3):
        graph.prepare([1] * 3)
        tables = torch.tensor([table + [unused] * (6 - len(table)) for table in graph.tables])
        device_state = GraphState(graph.pool, len(model.decoder.blocks), tables, torch.tensor(graph.lengths))
        found = model.step(torch.tensor(tokens), device_state)
        graph.advance(1)
        assert error(found, model.step(torch.tensor(tokens), state)) < 1e-5


@gpu
@pytest.mark.parametrize("n_rows", [1, 5])
@each_decoder
@torch.inference_mode()
def test_graphs_give_the_plain_logits(case, n_rows):
    plain = case.model().cuda()
    fast = accelerate(case.model().cuda(), "inference", precision="float32")
    if not supports_graphs(fast):
        pytest.skip("decoded without graphs")
    one, two = prefilled(plain, n_rows), prefilled(plain, n_rows)
    graphs = decode_graphs(fast, two.pool)
    for tokens in new_tokens(6, n_rows):  # the first step is not recorded, the second is, the others are replayed
        expected = plain.step(torch.tensor(tokens, device="cuda"), one)
        assert error(graphs.logits(tokens, two), expected) < 1e-5


@gpu
@each_decoder
def test_the_engine_gives_the_plain_ids(case):
    """Rows of different lengths that end one after the other, so that the step launched ahead is repeated."""
    plain, fast = case.model().cuda(), accelerate(case.model().cuda(), "inference", precision="float32")
    tokens, lengths = prompts(plain, 5).tokens.tolist(), LENGTHS
    for sampling in Sampling(temperature=0), Sampling(temperature=0.8, top_p=0.9, seed=3):
        requests = [
            Request(tuple(row[:n]), max_tokens=6 + 5 * i, sampling=sampling)
            for i, (row, n) in enumerate(zip(tokens, lengths, strict=True))
        ]
        expected = Engine(plain, max_rows=3, state="contiguous").run(requests)
        found = Engine(fast, max_rows=3).run(requests)
        assert [r.choices[0].tokens for r in found] == [r.choices[0].tokens for r in expected]


@gpu
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@torch.inference_mode()
def test_narrow_weights_are_those_of_the_plain_modules(precision):
    """Both paths round the same weights; the kernels keep sums and the residual stream in float32."""
    case = next(case for case in DECODERS if case.name == "llama3")
    fast = accelerate(case.model().cuda(), "inference", precision=precision)
    state, graph_state = prefilled(fast, 3), prefilled(fast, 3)
    graphs = decode_graphs(fast, graph_state.pool)
    for tokens in new_tokens(4, 3):
        expected = fast.step(torch.tensor(tokens, device="cuda"), state).float()
        assert error(graphs.logits(tokens, graph_state), expected) < 0.05
