"""Speculative decoding says what plain decoding says: the same ids, or ids of the same distribution."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import heedful
from heedful.generate.draft import DraftModel, PromptLookup
from heedful.generate.request import Sampling
from heedful.generate.speculative import SpeculativeDecoding, Statistics, speculate
from heedful.models.base import Batch
from heedful.models.gpt import GPT, GPTConfig
from support.case import EncoderDecoder, randomize
from support.families import CASES

NAMES = [
    "gpt2",
    "llama3",
    "mistral",
    "phi3-longrope",
    "t5",
    "byt5",
    "seq2seq-gru-bi-dot",
    "seq2seq-lstm-bi-additive",
]
DRAFTERS = ["itself", "another", "lookup"]
SAID = 20


@cache
def answers(name: str):
    """A case's model, another of its kind, a batch of unequal prompts, and what the reference says to each."""
    case = next(c for c in CASES if c.name == name)
    reference, batch = case.reference(), case.batch()
    if isinstance(case, EncoderDecoder):
        batch = Batch(source=batch.source, source_lengths=batch.source_lengths)
    said = case.reference_greedy(reference, case.batch(), SAID)
    return case.ours(reference), case.ours(randomize(case.reference(), seed=7)), batch, said


def drafter(kind: str, model, other):
    if kind == "lookup":
        return PromptLookup(shortest=1)
    return DraftModel(model if kind == "itself" else other)


def add_up(statistics: Statistics, rows: list[list[int]]) -> None:
    assert statistics.tokens == sum(len(row) for row in rows) == statistics.steps + statistics.accepted
    assert 0 <= statistics.accepted <= statistics.proposed
    assert statistics.calls <= statistics.steps <= statistics.calls * len(rows)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_those_of_the_reference(name, kind):
    model, other, batch, expected = answers(name)
    rows, statistics = speculate(model, batch, drafter=drafter(kind, model, other), max_tokens=SAID)
    assert rows == expected
    add_up(statistics, rows)
    if kind == "itself":
        assert statistics.accepted == statistics.proposed > 0
        assert statistics.tokens_per_step >= 4


@pytest.mark.parametrize("name", ["gpt2", "t5", "seq2seq-gru-bi-dot"])
def test_rows_end_at_their_stops_and_the_others_go_on(name):
    model, other, batch, expected = answers(name)
    stops = {max(row, key=row.index) for row in expected[:2]}  # what each says for the first time latest
    for kind in DRAFTERS:
        rows, statistics = speculate(model, batch, drafter=drafter(kind, model, other), max_tokens=SAID, stop_ids=stops)
        assert rows == [list(itertools.takewhile(lambda t: t not in stops, row)) for row in expected]
        assert len({len(row) for row in rows}) > 1
        ended = sum(len(row) < SAID for row in rows)
        assert statistics.tokens == sum(len(row) for row in rows) + ended  # each said its stop


def test_steps_come_as_they_are_said():
    model, _, batch, expected = answers("gpt2")
    steps = SpeculativeDecoding(model, batch, drafter=DraftModel(model), max_tokens=SAID)
    seen = [[], [], []]
    for count, step in enumerate(steps):
        assert steps.statistics.calls == count + 1
        assert all(len(new) >= 1 for new in step)
        seen = [old + new for old, new in zip(seen, step, strict=True)]
    assert seen == expected


def most_likely(model, text: list[int], n: int) -> list[int]:
    """The likeliest token at each of the last n places of a text."""
    return model(torch.tensor([text[:-1]])).logits[0, -n:].argmax(-1).tolist()


def test_a_repetitive_text_is_looked_up():
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    prompt = loaded.tokenizer.encode("BENVOLIO:\nI will not speak to the prince of the world.\n\n" * 2)
    (said,), statistics = speculate(loaded.model, Batch(torch.tensor([prompt])), drafter=PromptLookup(), max_tokens=100)
    assert said == most_likely(loaded.model, prompt + said, 100)
    add_up(statistics, [said])
    assert statistics.tokens_per_step > 2


def test_an_encoders_text_is_looked_up():
    model, _, batch, expected = answers("seq2seq-lstm-bi-additive")
    batch = Batch(source=torch.tensor(expected))  # as if it had to say what it will say
    rows, _ = speculate(model, batch, drafter=PromptLookup(shortest=1), max_tokens=SAID)
    looked, statistics = speculate(model, batch, drafter=PromptLookup(shortest=1, in_source=True), max_tokens=SAID)
    assert looked == rows
    add_up(statistics, looked)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_last_position_is_never_passed(kind):
    model = answers("gpt2")[0]  # 64 positions
    g = torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(3, 61, (2, 60), generator=g), torch.tensor([60, 50]))
    rows, statistics = speculate(model, batch, drafter=drafter(kind, *answers("gpt2")[:2]), max_tokens=SAID)
    assert [len(row) for row in rows] == [5, 15]  # 64 read, one more said
    add_up(statistics, rows)
    for i, row in enumerate(rows):
        text = batch.tokens[i, : batch.lengths[i]].tolist() + row
        assert row == most_likely(model, text, len(row))


def test_a_drafter_may_have_fewer_positions():
    model, _, batch, expected = answers("gpt2")
    small = tiny(3, max_len=18, vocab_size=61)
    rows, statistics = speculate(model, batch, drafter=DraftModel(small), max_tokens=SAID)
    assert rows == expected
    assert 0 < statistics.proposed


def tiny(seed: int, vocab_size: int = 4, max_len: int = 8) -> GPT:
    config = GPTConfig(vocab_size=vocab_size, max_len=max_len, d_model=16, n_layers=1, n_heads=2)
    return randomize(GPT.create(config), seed)


def exact(model: GPT, prompt: list[int], warpers: LogitsProcessorList, n: int) -> torch.Tensor:
    """The probability of every sequence of n tokens, (V^n,), by the reference's processors."""
    vocab = model.config.vocab_size
    every = torch.tensor(list(itertools.product(range(vocab), repeat=n)))
    texts = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], dim=1)
    with torch.no_grad():
        logits = model(texts).logits
    result = torch.ones(len(every), dtype=torch.double)
    for i in range(n):
        warped = warpers(texts[:, : len(prompt) + i], logits[:, len(prompt) - 1 + i])
        result *= warped.double().softmax(-1).gather(1, every[:, i : i + 1])[:, 0]
    return result


def improbability(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """The chi-square test's p; cells of less than five expected are one."""
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert (seen[expected == 0] == 0).all()
    kept = expected > 0
    square = ((seen - expected) ** 2 / expected)[kept].sum()
    return float(torch.special.gammaincc((kept.sum() - 1) / 2, square / 2))


def counted(texts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """OpenAI's penalties of 1.5 per time and 0.5 once, for what was said after the prompt of 4."""
    counts = torch.stack([(texts[:, 4:] == token).sum(1) for token in range(logits.shape[1])], dim=1)
    return logits - 1.5 * counts - 0.5 * (counts > 0)


SETTINGS = {
    "plain": (Sampling(), []),
    "top-p": (Sampling(temperature=0.8, top_p=0.75), [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.75)]),
    "top-k": (Sampling(top_k=3), [TopKLogitsWarper(3)]),
    "repetition": (
        Sampling(repetition_penalty=1.4, min_p=0.1),
        [RepetitionPenaltyLogitsProcessor(1.4), MinPLogitsWarper(0.1)],
    ),
    "counts": (Sampling(frequency_penalty=1.5, presence_penalty=0.5), [counted]),
}
PAIRS = [*itertools.product(["plain", "top-p"], DRAFTERS), *itertools.product(SETTINGS, ["another"])]
PAIRS = [*dict.fromkeys(PAIRS), ("top-k", "lookup"), ("counts", "lookup")]


@pytest.mark.parametrize(("setting", "kind"), PAIRS)
def test_sampled_sequences_follow_the_exact_distribution(setting, kind):
    torch.manual_seed(0)
    how, processors = SETTINGS[setting]
    model, prompt, n = tiny(0), [1, 2, 1, 2], 4
    expected = exact(model, prompt, LogitsProcessorList(processors), n)
    assert abs(expected.sum() - 1) < 1e-5
    batch = Batch(torch.tensor(prompt).expand(800, -1))
    rows, statistics = speculate(model, batch, drafter=drafter(kind, model, tiny(1)), max_tokens=n, sampling=how)
    add_up(statistics, rows)
    if kind == "itself":
        assert statistics.accepted == statistics.proposed > 0
    else:
        assert 0 < statistics.accepted < statistics.proposed
    seen = torch.bincount(torch.tensor(rows) @ 4 ** torch.arange(n - 1, -1, -1), minlength=4**n).double()
    assert improbability(seen, expected * len(rows)) > 0.001


@pytest.mark.parametrize("kind", DRAFTERS)
def test_penalties_count_with_temperature_zero(kind):
    """The likeliest sequences where every token said makes itself less likely."""
    model, prompt = tiny(0), [1, 2, 1, 2]
    how = Sampling(temperature=0, frequency_penalty=1.5, presence_penalty=0.5)
    rows, statistics = speculate(
        model,
        Batch(torch.tensor([prompt])),
        drafter=drafter(kind, model, tiny(1)),
        max_tokens=4,
        sampling=how,
    )
    text = torch.tensor([prompt + rows[0]])
    logits = model(text).logits
    for place in range(4, 8):
        assert counted(text[:, :place], logits[:, place - 1]).argmax() == text[0, place]
    add_up(statistics, rows)
    assert len(set(rows[0])) > 1


def test_a_seed_gives_the_same_text_whatever_is_in_the_batch():
    model, other, batch, _ = answers("gpt2")
    how = Sampling(temperature=1.5, seed=5)
    together, _ = speculate(model, batch, drafter=DraftModel(other), max_tokens=SAID, sampling=how)
    for i, said in enumerate(together):
        alone = Batch(batch.tokens[i : i + 1, : batch.lengths[i]])
        assert speculate(model, alone, drafter=DraftModel(other), max_tokens=SAID, sampling=how)[0] == [said]


def test_what_cannot_be_is_refused():
    model, _, batch, _ = answers("gpt2")
    with pytest.raises(ValueError, match="max_tokens"):
        speculate(model, batch, drafter=PromptLookup(), max_tokens=0)
    with pytest.raises(ValueError, match="the drafter has 4 tokens, the model 61"):
        speculate(model, Batch(torch.ones(1, 3, dtype=torch.long)), drafter=DraftModel(tiny(0)), max_tokens=4)
    with pytest.raises(ValueError, match="the drafter has positions for 8 tokens, and the prompt has 13"):
        speculate(model, batch, drafter=DraftModel(tiny(0)), max_tokens=4)
    with pytest.raises(ValueError, match="endings"):
        PromptLookup(longest=1, shortest=2)
    broken = randomize(tiny(0))
    broken.embed.weight.data[3] = torch.nan
    for how in (Sampling(temperature=0), Sampling()):
        with pytest.raises(ValueError, match="finite"):
            speculate(broken, Batch(torch.tensor([[3]])), drafter=PromptLookup(), max_tokens=4, sampling=how)
