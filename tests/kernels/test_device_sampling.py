"""Sampling on the device: the same tokens and scores as generate/sampling.py, whose filters are compared with
transformers', for rows of different parameters in one batch; and nothing that a CUDA graph could not record."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.generate.request import Sampling
from heedful.generate.sampling import Sampler, apply_penalties, sample, token_scores
from heedful.kernels.cuda.device_sampling import RowSampling, SamplingKind

V = 1000
PROMPT = [5, 7, 7, 2, 900]
GREEDY = Sampling(temperature=0)
ROWS = {
    "greedy": [GREEDY, GREEDY],
    "drawn": [Sampling(temperature=0.7), GREEDY, Sampling(temperature=1.6)],
    "filters": [
        Sampling(temperature=0.8, top_k=40), Sampling(top_p=0.9), Sampling(min_p=0.05), Sampling(temperature=1e-4),
        Sampling(temperature=1.3, top_k=100, top_p=0.8, min_p=0.01), GREEDY, Sampling(top_k=10**9), Sampling(top_p=0),
        Sampling(top_k=1),
    ],
    "typical": [Sampling(typical_p=0.6), Sampling(top_k=50, typical_p=0.4), Sampling(top_p=0.5), Sampling(typical_p=0)],
    "penalties": [
        Sampling(repetition_penalty=1.3), Sampling(temperature=0, frequency_penalty=0.7, presence_penalty=0.4),
        Sampling(logit_bias={3: 8.0, 11: -100.0}), Sampling(temperature=0.5, top_p=0.9, repetition_penalty=0.8),
        Sampling(temperature=0, logit_bias={999: 100.0}), GREEDY,
    ],
}  # fmt: skip
each_batch = pytest.mark.parametrize("params", ROWS.values(), ids=ROWS)


def samplers(params: list[Sampling]) -> list[Sampler]:
    return [Sampler(dataclasses.replace(p, seed=7), PROMPT, index) for index, p in enumerate(params)]


def random_logits(n_rows: int, seed: int) -> torch.Tensor:
    """A peaked distribution, with a few logits that are the same or -inf."""
    x = 3 * torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed))
    x[:, 100:110], x[:, 200] = x[:, :1], -torch.inf
    return x


def draw(masses: torch.Tensor, uniforms: torch.Tensor) -> int:
    """The kernel's choice by its definition: bit by bit, the highest first."""
    token, below, above = 0, 0.0, float(masses[-1])
    for bit, number in zip(reversed(range(len(uniforms))), uniforms.tolist(), strict=True):
        middle = float(masses[min(token + (1 << bit), V) - 1])
        if above > middle and number * (above - below) >= middle - below:
            token, below = token + (1 << bit), middle
        else:
            above = middle
    return token


def choose(rows: RowSampling, logits: torch.Tensor) -> torch.Tensor:
    x = rows.penalize(logits) if rows.kind.penalties else logits
    tokens = x.argmax(-1)
    if rows.kind.draws:
        masses = rows.cumulative_masses(x)
        for row in (rows.params[0, :, 0] > 0).nonzero()[:, 0].tolist():
            tokens[row] = draw(masses[row], rows.uniforms[row])
    return tokens


@each_batch
def test_the_tokens_are_those_of_the_samplers(params):
    """Of twelve steps; the last row is not in use. What penalties count is counted on the device alone."""
    expected, given = samplers(params), samplers(params)
    rows = RowSampling(SamplingKind.of(given, False), len(params) + 1, V, torch.device("cpu"))
    rows.load(given)
    for step in range(12):
        logits = random_logits(len(params) + 1, step)
        rows.load_uniforms(given, ahead=step)
        tokens = choose(rows, logits)
        assert tokens[:-1].tolist() == sample(logits[:-1], expected)
        if rows.kind.penalties:
            rows.count(tokens)


def test_penalties_are_those_of_the_samplers():
    """Of tokens counted before the rows were loaded and after; ids beyond the vocabulary count nowhere."""
    params = ROWS["penalties"]
    given = [Sampler(p, [*PROMPT, V + 3], index) for index, p in enumerate(params)]
    for sampler in given:
        for token in [9, 9, 5]:
            sampler.record(token)
    rows = RowSampling(SamplingKind.of(given, False), len(params), V, torch.device("cpu"))
    rows.load(given)
    rows.count(torch.full((len(params),), 9))
    for sampler in given:
        sampler.record(9)
    logits = random_logits(len(params), 0)
    torch.testing.assert_close(rows.penalize(logits), apply_penalties(logits, given), atol=1e-5, rtol=0)


def test_scores_are_those_of_the_model():
    logits, tokens = random_logits(3, 1), [4, 200, 7]
    rows = RowSampling(SamplingKind(scores=True), 3, V, torch.device("cpu"))
    own, *rest = rows.scores(logits, torch.tensor(tokens)).tolist()
    for row, expected in enumerate(token_scores(logits, tokens, [20, 20, 20])):
        assert expected is not None and own[row] == pytest.approx(expected.logprob)
        values = [column[row] for column in rest]
        assert values[:20] == pytest.approx([value for _, value in expected.top])
        assert [logits[row, int(i)] for i in values[20:]] == [logits[row, i] for i, _ in expected.top]


@each_batch
def test_nothing_is_read_by_the_host(params):
    """Tensors without values pass through: no shape and no branch depends on them, as a CUDA graph needs it."""
    given = samplers(params)
    kind = SamplingKind.of(given, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = RowSampling(kind, len(params), V, torch.device("cpu"))
        logits = torch.empty(len(params), V)
        x = rows.penalize(logits) if kind.penalties else logits
        assert rows.cumulative_masses(x).shape == (len(params), V)
        tokens = x.argmax(-1)
        if kind.penalties:
            rows.count(tokens)
        assert rows.scores(logits, tokens).shape == (41, len(params))


@dataclasses.dataclass(frozen=True)
class NewSampling(Sampling):
    top_a: float = 0.0


def test_a_parameter_that_is_not_known_there_is_left_to_the_host():
    assert not any(sampler.needs_host for params in ROWS.values() for sampler in samplers(params))
    assert Sampler(NewSampling(top_a=0.2)).needs_host and not Sampler(NewSampling()).needs_host
    assert Sampler(Sampling(no_repeat_ngram_size=2)).needs_host
    short = Sampler(Sampling(), min_tokens=1, stop_ids={3})
    assert short.needs_host
    short.record(5)
    assert not short.needs_host


def test_random_numbers_that_were_peeked_are_given_later():
    (peeked,), (plain,) = samplers([Sampling()]), samplers([Sampling()])
    ahead = [peeked.peek_uniforms(10, n) for n in (1, 0, 2)]
    given = [plain.uniforms(10) for _ in range(4)]
    assert ahead == [given[1], given[0], given[2]]
    assert [peeked.uniforms(10) for _ in range(4)] == given
