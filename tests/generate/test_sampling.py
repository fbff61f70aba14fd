"""Choosing tokens: each rule against transformers' processors or its published formula, draws against exact
distributions, and every row as if it were alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import logits_process as theirs

from heedful.generate import sampling
from heedful.generate.request import Sampling
from heedful.generate.sampling import (
    InvalidLogits,
    Sampler,
    apply_penalties,
    filter_logits,
    sample,
    token_scores,
)
from heedful.kernels.sampling import apply_temperature

SETTINGS = {
    "plain": Sampling(seed=3),
    "cold": Sampling(temperature=0.5, seed=3),
    "hot": Sampling(temperature=1.7, seed=3),
    "top-k": Sampling(top_k=20, seed=3),
    "top-p": Sampling(top_p=0.9, seed=3),
    "min-p": Sampling(min_p=0.05, seed=3),
    "typical": Sampling(typical_p=0.8, seed=3),
    "two cuts": Sampling(temperature=1.3, top_p=0.95, typical_p=0.9, seed=3),
    "all cuts": Sampling(temperature=1.3, top_k=60, top_p=0.95, min_p=0.02, typical_p=0.9, seed=3),
    "penalties": Sampling(
        top_p=0.9,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        presence_penalty=-0.7,
        logit_bias={3: 4.0},
        seed=3,
    ),
}


def random_logits(n_rows: int, n_tokens: int, seed: int = 0) -> Tensor:
    """Rows from flat to sharp, in double precision, so that borders do not depend on how sums are rounded."""
    random = torch.Generator().manual_seed(seed)
    sharpness = torch.linspace(0.3, 5, n_rows, dtype=torch.float64)[:, None]
    return torch.randn(n_rows, n_tokens, generator=random, dtype=torch.float64) * sharpness - 20


def reference(logits: Tensor, how: Sampling, text: Tensor | None = None) -> Tensor:
    """What transformers' generate makes of the logits, by the processors that it builds itself, in its order."""
    config = GenerationConfig(
        do_sample=True,
        temperature=how.temperature,
        top_k=how.top_k or 0,
        top_p=how.top_p,
        min_p=how.min_p or None,
        typical_p=how.typical_p,
        repetition_penalty=how.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in how.logit_bias.items()] or None,
    )
    text = torch.zeros(len(logits), 1, dtype=torch.long) if text is None else text
    chain = tiny()._get_logits_processor(config, input_ids_seq_length=1, prefix_allowed_tokens_fn=None)
    return chain(text, logits)


@functools.cache
def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=16, n_layer=1, n_head=2)).eval()


def same(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours > -torch.inf, expected > -torch.inf)
    torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("n_tokens", [5, 300, 4096, 50257])
@pytest.mark.parametrize(
    ("ours", "process"),
    [
        (lambda x: sampling.keep_top_k(x, 1), theirs.TopKLogitsWarper(1)),
        (lambda x: sampling.keep_top_k(x, 40), theirs.TopKLogitsWarper(40)),
        (lambda x: sampling.keep_top_k(x, 3000), theirs.TopKLogitsWarper(3000)),
        (lambda x: sampling.keep_top_p(x, 0.3), theirs.TopPLogitsWarper(0.3)),
        (lambda x: sampling.keep_top_p(x, 0.95), theirs.TopPLogitsWarper(0.95)),
        (lambda x: sampling.keep_min_p(x, 0.1), theirs.MinPLogitsWarper(0.1)),
        (lambda x: sampling.keep_typical(x, 0.2), theirs.TypicalLogitsWarper(0.2)),
        (lambda x: sampling.keep_typical(x, 0.95), theirs.TypicalLogitsWarper(0.95)),
        (lambda x: apply_temperature(x, 0.7), theirs.TemperatureLogitsWarper(0.7)),
    ],
)
def test_each_rule_does_as_transformers_does(ours, process, n_tokens):
    logits = random_logits(6, n_tokens)
    same(ours(logits), process(torch.zeros(6, 1, dtype=torch.long), logits.clone()))
    torch.testing.assert_close(ours(logits[2]), ours(logits)[2])  # a row needs no batch around it


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "penalties"])
@pytest.mark.parametrize("n_tokens", [300, 30_000])
def test_cuts_follow_each_other_as_in_transformers(name, n_tokens):
    logits = random_logits(6, n_tokens, seed=1)
    same(
        filter_logits(apply_temperature(logits, SETTINGS[name].temperature), SETTINGS[name]),
        reference(logits, SETTINGS[name]),
    )


def test_bias_and_repetition_penalty_come_first_as_in_transformers():
    logits = random_logits(4, 300, seed=2).float() + 20  # of either sign
    text = torch.randint(300, (4, 50), generator=torch.Generator().manual_seed(0))
    how = Sampling(repetition_penalty=1.3, logit_bias={7: 5.0, int(text[0, 0]): -2.5}, temperature=0.8, top_p=0.9)
    samplers = [Sampler(how, row[:20]) for row in text.tolist()]
    for sampler, row in zip(samplers, text.tolist(), strict=True):
        for token in row[20:]:  # asked or said is all the same to this penalty
            sampler.record(token)
    before = logits.clone()
    same(
        filter_logits(apply_temperature(apply_penalties(logits, samplers), how.temperature), how),
        reference(logits, how, text),
    )
    assert torch.equal(logits, before)  # the caller's are not touched


def test_frequency_and_presence_penalties_count_what_was_said():
    logits = random_logits(2, 50).float()
    hows = [Sampling(frequency_penalty=0.4, presence_penalty=1.1), Sampling(frequency_penalty=-2.0)]
    samplers = [Sampler(how, prompt=[1, 2, 3, 3]) for how in hows]
    for token in [3, 9, 9, 9, 20]:
        for sampler in samplers:
            sampler.record(token)
    expected = logits.clone()
    for row, how in enumerate(hows):  # mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        for token, count in {3: 1, 9: 3, 20: 1}.items():
            expected[row, token] -= count * how.frequency_penalty + float(count > 0) * how.presence_penalty
    torch.testing.assert_close(apply_penalties(logits, samplers), expected)


def test_no_stop_token_before_the_minimum_as_in_transformers():
    logits, ends = random_logits(2, 50).float(), [3, 7, 600]  # 600: read, never generated
    samplers = [Sampler(Sampling(temperature=0), min_tokens=2, stop_ids=ends), Sampler(Sampling(temperature=0))]
    process = theirs.MinNewTokensLengthLogitsProcessor(4, 2, ends[:2], device="cpu")
    for n_new in range(4):
        expected = process(torch.zeros(1, 4 + n_new, dtype=torch.long), logits[:1].clone())
        assert torch.equal(apply_penalties(logits, samplers), torch.cat([expected, logits[1:]]))
        sample(logits, samplers)
    assert sample(torch.eye(8)[3:4], [Sampler(Sampling(temperature=0), min_tokens=1, stop_ids=[3])]) != [3]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated_as_in_transformers(size):
    logits, tokens = random_logits(1, 12).float(), [i * i * 7 % 11 for i in range(60)]
    sampler = Sampler(Sampling(no_repeat_ngram_size=size), tokens[:20])
    process = theirs.NoRepeatNGramLogitsProcessor(size)
    for n in range(20, 60):
        expected = process(torch.tensor([tokens[:n]]), logits.clone())
        assert torch.equal(apply_penalties(logits, [sampler]), expected)
        sampler.record(tokens[n])


def test_a_penalized_row_remembers_what_it_says():
    how = Sampling(temperature=0, frequency_penalty=1.0)
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    sampler = Sampler(how)
    assert [sample(logits, [sampler])[0] for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    prompt_only = Sampler(Sampling(temperature=0, repetition_penalty=2.0), [0, 600])  # 600: read, never said
    assert sample(logits, [prompt_only]) == [1]


def test_equals_at_the_border():
    logits = torch.tensor([[1.0, 2.0, 0.0, 1.0, 1.0]])

    def kept(logits: Tensor) -> list[int]:
        return (logits[0] > -torch.inf).nonzero()[:, 0].tolist()

    assert kept(sampling.keep_top_k(logits, 2)) == [0, 1, 3, 4]  # all that equal the second
    assert kept(sampling.keep_min_p(torch.zeros(1, 4), 1.0)) == [0, 1, 2, 3]
    p = logits.softmax(-1)[0]
    assert kept(sampling.keep_top_p(logits, float(p[1]) + 0.01)) == [0, 1]  # the fewest, lowest id first
    assert kept(sampling.keep_top_p(logits, float(p[1] + p[0]) + 0.01)) == [0, 1, 3]
    assert kept(sampling.keep_top_p(torch.zeros(1, 2**15), 0.5)) == list(range(2**14))
    assert kept(sampling.keep_typical(torch.zeros(1, 2**15), 0.25)) == list(range(2**13))
    assert kept(sampling.keep_top_p(torch.zeros(1, 9), 0.0)) == [0]


@pytest.mark.parametrize("p", [0.2, 0.9, 0.99])
def test_nucleus_with_many_equal_logits_is_that_of_a_stable_sort(p):
    logits = random_logits(5, 20_000).bfloat16().double()
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")
    shares = np.take_along_axis(logits.softmax(-1).numpy(), order, -1)
    n_kept = (shares.cumsum(-1) - shares < p).sum(-1)
    ours = sampling.keep_top_p(logits, p)
    for row in range(5):
        assert (ours[row] > -torch.inf).nonzero()[:, 0].tolist() == sorted(order[row, : n_kept[row]])


def bit_by_bit(probabilities: np.ndarray, numbers: list[float]) -> int:
    """The draw by its definition: halves of what is left, decided by one number each."""
    low, size = 0, 1 << len(numbers)
    for number in numbers:
        size //= 2
        left, right = probabilities[low : low + size].sum(), probabilities[low + size : low + 2 * size].sum()
        low += size if number * (left + right) >= left else 0
    return low


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("n_tokens", [1, 100, 256, 5000, 50257])
def test_the_short_ways_choose_what_the_long_one_chooses(name, n_tokens):
    how, n_rows = SETTINGS[name], 12
    logits = random_logits(n_rows, n_tokens, seed=4).float()
    if n_tokens <= max(how.logit_bias, default=0):
        with pytest.raises(ValueError, match=r"token 3 \(at \d of logit_bias"):
            sample(logits, [Sampler(how)] * n_rows)
        return
    samplers = [Sampler(how, [1, 2], index) for index in range(n_rows)]
    twins = [Sampler(how, [1, 2], index) for index in range(n_rows)]
    for _ in range(3):
        raw = apply_penalties(logits, twins).double()
        left = reference(raw, Sampling(1.0 if how.temperature == 0 else how.temperature, *cuts(how)))
        expected = []
        for row, twin in zip(left.softmax(-1).numpy(), twins, strict=True):
            numbers = twin.uniforms(max(8, (n_tokens - 1).bit_length()))
            expected.append(bit_by_bit(row, numbers))
            twin.record(expected[-1])
        assert sample(logits, samplers) == expected


def cuts(how: Sampling) -> tuple[int | None, float, float, float]:
    return how.top_k, how.top_p, how.min_p, how.typical_p


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "penalties"])
def test_frequencies_follow_the_exact_distribution(name):
    how, n_rows, n_steps = SETTINGS[name], 1500, 6
    logits = random_logits(3, 600, seed=5)[1:2]
    exact = reference(logits, how).softmax(-1)[0]
    samplers = [Sampler(how, index=index) for index in range(n_rows)]  # one seed: the indices make the streams
    drawn = [t for _ in range(n_steps) for t in sample(logits.expand(n_rows, -1), samplers)]
    seen = torch.bincount(torch.tensor(drawn), minlength=600).double()
    assert not seen[exact == 0].any()
    expected = exact * n_rows * n_steps
    rare = expected < 5  # pooled into one cell
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi_square = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor(float((expected > 0).sum() - 1), dtype=torch.float64)
    assert torch.special.gammaincc(freedom / 2, chi_square / 2) > 0.001


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    steps = [random_logits(7, 50257, seed=s).float() * 0.8 for s in range(4)]
    how = SETTINGS[name]

    def alone() -> list[int]:
        sampler = Sampler(how, [5], index=2)
        return [sample(step[3:4], [sampler])[0] for step in steps]

    def among(others: list[Sampling], place: int) -> list[int]:
        samplers = [Sampler(other, [5, 6], index=i) for i, other in enumerate(others)]
        samplers.insert(place, Sampler(how, [5], index=2))
        order = [row for row in range(7) if row != 3]
        order.insert(place, 3)
        return [sample(step[order[: len(samplers)]], samplers)[place] for step in steps]

    expected = alone()
    assert among([how] * 6, 3) == expected
    assert among(list(SETTINGS.values())[:6], 0) == expected
    assert among([*list(SETTINGS.values())[4:9], Sampling(temperature=0)], 6) == expected


def test_streams_differ_by_seed_and_index():
    first = [
        tuple(Sampler(Sampling(seed=seed), index=index).uniforms(4))
        for seed in (0, 1, 2, -1, 2**32, 2**32 + 1, 7 << 32)
        for index in (0, 1, 2, 7)
    ]
    assert len(set(first)) == len(first)
    streams = np.array([Sampler(Sampling(seed=1), index=i).uniforms(1000) for i in range(20)])
    assert np.abs(np.corrcoef(streams) - np.eye(20)).max() < 0.15


def test_without_a_seed_the_global_state_decides():
    logits = torch.zeros(8, 5000)

    def run() -> list[int]:
        return sample(logits, [Sampler(Sampling()) for _ in range(8)])

    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert run() == first
    assert run() != first
    assert len(set(first)) > 1


def test_noise_in_the_last_bits_hardly_ever_changes_a_choice():
    random = torch.Generator().manual_seed(0)
    zipf = -1.1 * torch.arange(1, 50258).log()[torch.randperm(50257, generator=random)] - 80
    noisy = zipf + 1e-5 * torch.randn(50257, generator=random)  # one unit in the last place is 7.6e-6
    n_rows = 250
    for how in (Sampling(seed=1), Sampling(seed=1, top_k=500)):
        pair = [
            sample(logits.expand(n_rows, -1), [Sampler(how, index=index) for index in range(n_rows)])
            for logits in (zipf, noisy)
        ]
        assert sum(a != b for a, b in zip(*pair, strict=True)) <= 1  # by a single number 4 would change


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-40, 1e-320])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.9}])
def test_near_zero_temperature_is_greedy(temperature, more):
    logits = random_logits(4, 9000).float() * 1e3
    samplers = [Sampler(Sampling(temperature=temperature, seed=0, **more)) for _ in range(4)]
    assert sample(logits, samplers) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", [*SETTINGS, "greedy"])
def test_one_possible_token_is_the_choice(name):
    how = SETTINGS.get(name, Sampling(temperature=0))
    for n_tokens in (4, 255, 256, 257, 8192, 50257):
        for place in {0, n_tokens // 2, n_tokens - 1}:
            logits = torch.full((2, n_tokens), -torch.inf)
            logits[0, place] = -7.0
            logits[1, n_tokens - 1 - place] = 1000.0
            assert sample(logits, [Sampler(how), Sampler(how)]) == [place, n_tokens - 1 - place]


def test_greedy_takes_the_first_of_the_highest():
    for n_tokens in (3, 32, 33, 100, 50257):
        logits = random_logits(40, n_tokens).bfloat16()
        assert sample(logits, [Sampler(Sampling(temperature=0))] * 40) == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("n_tokens", [20, 50257])
def test_impossible_rows_are_named_and_nothing_moves_on(n_tokens):
    logits = random_logits(5, n_tokens).float()
    how = Sampling(seed=1, frequency_penalty=1.0)
    samplers = [Sampler(how) for _ in range(5)]
    for place, wrong in ((0, torch.nan), (-1, torch.nan), (5, torch.inf), (slice(None), -torch.inf)):
        broken = logits.clone()
        broken[1, place] = broken[4, place] = wrong
        with pytest.raises(InvalidLogits, match=r"row 1 .*row 4") as error:
            sample(broken, samplers)
        assert error.value.rows == [1, 4]
    fresh = [Sampler(how) for _ in range(5)]
    assert sample(logits, samplers) == sample(logits, fresh)


def test_extreme_settings():
    logits = random_logits(3, 700).float()
    best = logits.argmax(-1).tolist()
    for how in (Sampling(top_p=0.0, seed=0), Sampling(top_k=1, seed=0), Sampling(min_p=1.0, seed=0)):
        assert sample(logits, [Sampler(how)] * 3) == best
    banned = dict.fromkeys(range(700), -100.0)
    pair = [sample(logits, [Sampler(Sampling(seed=4, logit_bias=bias))] * 3) for bias in (banned, {})]
    assert pair[0] == pair[1]
    forced = Sampling(seed=4, logit_bias={5: 100.0})
    assert sample(logits, [Sampler(forced)] * 3) == [5] * 3
    assert sample(logits[:0], []) == []


def test_scores_are_log_probabilities_of_the_model_itself():
    model = tiny()
    config = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=0.5, top_k=10, pad_token_id=0, eos_token_id=None
    )
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    out = model.generate(prompts, generation_config=config, return_dict_in_generate=True, output_logits=True)
    expected = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    for step, logits in enumerate(out.logits):
        tokens = out.sequences[:, 3 + step].tolist()
        found = token_scores(logits, tokens, [0, None, 4])
        assert found[1] is None and found[0].top == () and found[0].token == tokens[0]
        assert found[0].logprob == pytest.approx(float(expected[0, step]), abs=1e-6)
        assert found[2].logprob == pytest.approx(float(expected[2, step]), abs=1e-6)
        best = torch.log_softmax(logits[2].double(), -1).topk(4)
        assert [token for token, _ in found[2].top] == best.indices.tolist()
        assert [value for _, value in found[2].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert token_scores(logits, tokens, [None] * 3) == [None] * 3
    assert len(token_scores(logits[:1], tokens[:1], [1000])[0].top) == 100
