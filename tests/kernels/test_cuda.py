"""Decoding on a GPU: steps by the kernels and in CUDA graphs give what the plain modules give, for every family.

What a graph's state computes is checked on any machine; the kernels and graphs themselves where there is a GPU, and
what they compute by Triton's interpreter (support/interpreted.py).
"""

import copy
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels import packed
from heedful.kernels.cuda import has_triton
from heedful.kernels.cuda.state import GraphMemory, GraphState
from heedful.models.base import Batch, EncoderDecoderModel
from heedful.nn.feedforward import MixtureOfExperts
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import KeyValueState
from support.case import Decoder, EncoderDecoder, error
from support.families import CASES
from support.interpreted import DEVICE, INTERPRETED, accelerated, graphs_of

gpu = pytest.mark.skipif(
    not (has_triton() and (INTERPRETED or torch.cuda.is_available())),
    reason="needs a CUDA device and Triton, or Triton and TRITON_INTERPRET=1",
)
DECODERS = [case for case in CASES if isinstance(case, Decoder) and "longrope" not in case.name]
WITH_ENCODERS = [case for case in CASES if isinstance(case, EncoderDecoder) and "seq2seq" not in case.name]
each_family = pytest.mark.parametrize("case", [*DECODERS, *WITH_ENCODERS], ids=lambda case: case.name)
LENGTHS = [25, 9, 17, 20, 12]
SOURCES = [7, 30, 12, 3, 19]


def prompts(model, n_rows: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    lengths, sources = torch.tensor(LENGTHS[:n_rows]), torch.tensor(SOURCES[:n_rows])
    tokens = torch.randint(3, 50, (n_rows, int(lengths.max())), generator=draw)
    if not isinstance(model, EncoderDecoderModel):
        return Batch(tokens.to(model.device), lengths.to(model.device))
    source = torch.randint(3, 50, (n_rows, int(sources.max())), generator=draw)
    return Batch(*(x.to(model.device) for x in (tokens, lengths, source, sources)))


def prefilled(model, n_rows: int) -> PagedState:
    cross = isinstance(model, EncoderDecoderModel)
    state = PagedState(BlockPool(32, 8), len(model.decoder.blocks), n_rows, cross=cross)
    model.start(prompts(model, n_rows), state=state)
    return state


def request(batch: Batch, row: int, **options) -> Request:
    """The row of a batch."""
    source = None if batch.source is None else tuple(batch.source[row, : SOURCES[row]].tolist())
    return Request(tuple(batch.ids[row, : LENGTHS[row]].tolist()), source=source, **options)


def can_be_paged(model) -> bool:
    return type(model.new_state(0, 0)) is KeyValueState


def new_tokens(n_steps: int, n_rows: int) -> list[list[int]]:
    return torch.randint(3, 50, (n_steps, n_rows), generator=torch.Generator().manual_seed(2)).tolist()


@each_family
@torch.inference_mode()
def test_a_step_needs_no_number_of_a_row_in_python(case):
    model = case.model()
    if not can_be_paged(model):
        pytest.skip("a state of its own")
    state, graph = prefilled(model, 3), prefilled(model, 3)
    unused, memory = graph.pool.allocate(), GraphMemory(graph, 3, 32) if graph.cross else None
    for tokens in new_tokens(3, 3):
        graph.prepare([1] * 3)
        tables = torch.tensor([table + [unused] * (6 - len(table)) for table in graph.tables])
        if memory is not None:
            memory.load(graph)
        device_state = GraphState(graph.pool, len(model.decoder.blocks), tables, torch.tensor(graph.lengths), memory)
        found = model.step(torch.tensor(tokens), device_state)
        graph.advance(1)
        assert error(found, model.step(torch.tensor(tokens), state)) < 1e-5
    if not any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        with FakeTensorMode(allow_non_fake_inputs=True):  # refuses what would ask the device for a number
            model.step(torch.tensor(tokens), device_state)


@gpu
@pytest.mark.parametrize("n_rows", [1, 5])
@each_family
@torch.inference_mode()
def test_graphs_give_the_plain_logits(case, n_rows):
    plain, fast = case.model().to(DEVICE), accelerated(case.model(), "float32")
    one, two = prefilled(plain, n_rows), prefilled(plain, n_rows)
    graphs = graphs_of(fast, two.pool)
    if graphs is None:
        pytest.skip("decoded without graphs")
    for tokens in new_tokens(6, n_rows):  # the first step is not recorded, the second is, the others are replayed
        expected = plain.step(torch.tensor(tokens, device=DEVICE), one)
        assert error(graphs.logits(tokens, two), expected) < 1e-5


SAMPLINGS = {
    "greedy": [Sampling(temperature=0)],
    "top-p": [Sampling(temperature=0.8, top_p=0.9, seed=3)],
    "mixed": [
        Sampling(temperature=0), Sampling(temperature=1.2, top_k=20, min_p=0.02, seed=1),
        Sampling(temperature=0.9, typical_p=0.8, seed=2),
        Sampling(temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.5, seed=3),
        Sampling(temperature=0, presence_penalty=1.5, logit_bias={7: 2.0}),
    ],
}  # fmt: skip


@gpu
@each_family
def test_the_engine_gives_the_plain_ids(case):
    """Rows of different lengths and parameters that end one after the other, so that the step launched ahead is
    for other rows; sampled on the device, without and with log-probabilities."""
    plain, fast = case.model().to(DEVICE), accelerated(case.model(), "float32")
    batch = prompts(plain, 5)
    n_new = 1 if INTERPRETED else 6  # which is slow
    for (name, samplings), logprobs in itertools.product(SAMPLINGS.items(), [None, 3]):
        if INTERPRETED and (logprobs is None) == (name == "mixed"):
            continue
        requests = [
            request(batch, i, max_tokens=n_new * (i + 1), sampling=samplings[i % len(samplings)], logprobs=logprobs)
            for i in range(5)
        ]
        expected = Engine(plain, max_rows=3, state="contiguous").run(requests)
        engine = Engine(fast, max_rows=3, state="paged" if can_be_paged(fast) else None)
        if can_be_paged(fast):
            engine.runner.graphs = graphs_of(fast, engine.runner.pool)
        found = engine.run(requests)
        for one, other in zip(found, expected, strict=True):
            assert one.choices[0].tokens == other.choices[0].tokens, name
            if logprobs is not None:
                both = list(zip(one.choices[0].scores, other.choices[0].scores, strict=True))
                assert [a.logprob for a, _ in both] == pytest.approx([b.logprob for _, b in both], abs=1e-4)
                assert [[i for i, _ in a.top] for a, _ in both] == [[i for i, _ in b.top] for _, b in both]


@gpu
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(seed=3), Sampling(frequency_penalty=0.5, seed=3)]
)
def test_no_step_is_computed_twice_when_rows_come_and_go(sampling, monkeypatch):
    """Nine requests through three rows: without penalties, which the host counts first, a step is launched once for
    each that gives tokens, and a few at the end of all rows."""
    plain = next(case for case in DECODERS if case.name == "gpt2").model().to(DEVICE)
    fast, batch = accelerated(copy.deepcopy(plain), "float32"), prompts(plain, 5)
    requests = [
        request(batch, i % 5, max_tokens=n, sampling=sampling) for i, n in enumerate([2, 5, 3, 4, 1, 6, 2, 4, 3])
    ]
    expected = Engine(plain, state="contiguous").run(requests)
    engine = Engine(fast, max_rows=3, state="paged")
    graphs = engine.runner.graphs = graphs_of(fast, engine.runner.pool)
    calls, launched, choose, replay = [], [], graphs.choose, graphs._replay
    monkeypatch.setattr(graphs, "choose", lambda *given, **more: calls.append(0) or choose(*given, **more))
    monkeypatch.setattr(graphs, "_replay", lambda *given: launched.append(0) or replay(*given))
    for one, other in zip(engine.run(requests), expected, strict=True):
        assert one.choices[0].tokens == other.choices[0].tokens
    assert len(calls) <= len(launched) <= len(calls) + (9 if sampling.frequency_penalty else 1)


@gpu
@pytest.mark.parametrize("n_rows", [1, 5, 65])
@pytest.mark.parametrize(("plain", "fast"), [(packed.Int8, packed.Int8Triton), (packed.Int4, packed.Int4Triton)])
@torch.inference_mode()
def test_quantized_products_are_those_of_dequantized_weights(plain, fast, n_rows):
    """Outputs and inputs that fill no tile; 65 rows are multiplied without the kernel."""
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(50, 96, generator=draw).to(DEVICE), torch.randn(50, generator=draw).to(DEVICE)
    x = torch.randn(n_rows, 2, 96, generator=draw).to(DEVICE)[:, :1]  # not contiguous
    assert fast.fits(50, 96)
    for with_bias in bias, None:
        expected = plain(weight, with_bias)(x)
        assert error(fast(weight, with_bias)(x), expected) < (0.02 if n_rows > 1 else 1e-5)  # bfloat16 in tensor cores


@gpu
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@torch.inference_mode()
def test_narrow_weights_are_those_of_the_plain_modules(precision):
    """Both paths round the same weights; the kernels keep sums and the residual stream in float32."""
    case = next(case for case in DECODERS if case.name == "llama3")
    fast = accelerated(case.model(), precision)
    state, graph_state = prefilled(fast, 3), prefilled(fast, 3)
    graphs = graphs_of(fast, graph_state.pool)
    for tokens in new_tokens(4, 3):
        expected = fast.step(torch.tensor(tokens, device=DEVICE), state).float()
        assert error(graphs.logits(tokens, graph_state), expected) < 0.05
    x = torch.randn(70, fast.config.d_model, generator=torch.Generator().manual_seed(3))
    x = x.to(DEVICE, next(fast.parameters()).dtype)
    assert error(fast.head(x)[:3].float(), fast.head(x[:3]).float()) < 0.02  # more rows than the kernels take


@torch.inference_mode()
def test_sources_that_come_and_go_are_where_the_graph_reads_them():
    case = next(case for case in WITH_ENCODERS if case.name == "t5")
    state = prefilled(case.model(), 5)
    memory = GraphMemory(state, 8, 32)
    for change in (lambda: None, lambda: state.remove_row(1), lambda: state.select([2, 2, 0])):
        change()
        memory.load(state)
        n, m = state.n_rows, state.cross[0].keys.shape[2]
        assert memory.lengths.tolist() == [*state.memory_lengths.tolist(), *[1] * (8 - n)]
        for layer, cache in zip(memory.layers, state.cross, strict=True):
            for found, expected in zip(layer, (cache.keys, cache.values), strict=True):
                assert torch.equal(found[:n, :, :m], expected)
                assert not found[n:].any() and not found[:, :, m:].any()
        memory.layers[0][0][n - 1] = torch.nan  # of a request that failed: its row is the next to be removed
