"""Beam search against an exhaustive search, transformers' own, and the paper's formula for diverse groups."""

from __future__ import annotations

import dataclasses
import random
from itertools import product

import pytest
import torch

import heedful
from heedful.generate.beam import Hypothesis, beam_search
from heedful.models.base import Batch, GenerativeModel
from heedful.models.llama import Llama, LlamaConfig
from heedful.models.seq2seq import Seq2Seq, Seq2SeqConfig
from heedful.models.transformer import Transformer, TransformerConfig
from support.beams import prompts_of, reference_beams, softened
from support.case import randomize
from support.families import CASES

N_VOCAB, LENGTH, END = 5, 4, 2
case_of = {case.name: case for case in CASES}


def tiny(kind: str) -> GenerativeModel:
    """A model of five tokens whose next ones are far from equally likely."""
    torch.manual_seed(0)
    if kind == "decoder":
        model = Llama.create(LlamaConfig(vocab_size=N_VOCAB, d_model=8, n_layers=1, n_heads=2, d_ff=16))
    elif kind == "encoder-decoder":
        settings = dict(d_model=8, n_layers=1, n_heads=2, d_ff=16, dropout=0.0)
        model = Transformer.create(TransformerConfig(vocab_size=9, target_vocab_size=N_VOCAB, shared=False, **settings))
    else:
        settings = dict(attention="dot", d_model=8, vocab_size=9, target_vocab_size=N_VOCAB)
        model = Seq2Seq.create(Seq2SeqConfig("gru", **settings))
    randomize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4
    return model


def some(kind: str) -> Batch:
    """Two inputs of unequal length."""
    ids, lengths = torch.tensor([[1, 3, 4, 0], [4, 1, 0, 0]]), torch.tensor([4, 2])
    return Batch(ids, lengths) if kind == "decoder" else Batch(source=ids, source_lengths=lengths)


def alone(batch: Batch, i: int) -> Batch:
    """One row without padding."""
    cut = lambda x, n: None if x is None else x[i : i + 1, : None if n is None else n[i]]  # noqa: E731
    return Batch(cut(batch.tokens, batch.lengths), source=cut(batch.source, batch.source_lengths))


@torch.no_grad()
def logprob_of(model: GenerativeModel, row: Batch, said: tuple[int, ...]) -> float:
    """The model's own word on an answer, without a state."""
    prompt = row.tokens[0].tolist() if row.tokens is not None else [model.start_id]
    tokens = torch.tensor([[*prompt, *said]])
    logprobs = model(dataclasses.replace(row, tokens=tokens)).logits[0].log_softmax(-1)
    return sum(logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(said))


def everything() -> list[tuple[int, ...]]:
    """All there is to say: what ends with END and not before, and what is cut off at LENGTH."""
    others = [t for t in range(N_VOCAB) if t != END]
    ended = [(*said, END) for n in range(LENGTH) for said in product(others, repeat=n)]
    return ended + list(product(others, repeat=LENGTH))


def whole(found: Hypothesis) -> tuple[int, ...]:
    return found.tokens if found.end is None else (*found.tokens, found.end)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "recurrent"])
def test_a_beam_as_wide_as_the_space_finds_everything_in_order(kind):
    model, batch = tiny(kind), some(kind)
    rows = [{said: logprob_of(model, alone(batch, i), said) for said in everything()} for i in range(2)]
    assert rows[0] != rows[1]
    for penalty in (0.0, 1.0, -0.5, 2.0):
        found = beam_search(model, batch, beams=400, n=400, max_tokens=LENGTH, length_penalty=penalty, eos={END})
        for row, hypotheses in zip(rows, found, strict=True):
            assert {whole(h) for h in hypotheses} == set(row)
            scores = {said: logprob / len(said) ** penalty for said, logprob in row.items()}
            assert [h.score for h in hypotheses] == pytest.approx(sorted(scores.values())[::-1], abs=1e-4)
            for h in hypotheses:
                assert h.logprob == pytest.approx(row[whole(h)], abs=1e-4)
                assert h.score == pytest.approx(scores[whole(h)], abs=1e-4)
                assert h.finish_reason == ("length" if len(h.tokens) == LENGTH else "stop")


def ends_of(model: GenerativeModel, batch: Batch) -> list[int]:
    """Two tokens that the model likes to say: made to end answers, they end some of them early."""
    found = beam_search(model, batch, beams=6, n=6, max_tokens=8)
    said = [token for row in found for h in row for token in h.tokens[2:]]
    return sorted(set(said), key=lambda t: -said.count(t))[1:3]


@pytest.mark.parametrize(("name", "scale", "seed"), [("gpt2", 0.5, 0), ("t5", 0.7, 1), ("marian", 0.3, 3)])
def test_the_same_answers_and_scores_as_transformers(name, scale, seed):
    case = case_of[name]
    reference, batch = softened(case, scale), prompts_of(case)
    model, ends = case.ours(reference), random.Random(seed).sample(range(1, 61), 10)
    seen: dict[bool | str, list[tuple[int, ...]]] = {True: [], False: [], "never": []}
    for (beams, n, penalty, least), early in product(
        [(4, 4, 1.0, 0), (5, 3, 0.0, 0), (3, 3, 2.0, 0), (3, 2, -1.0, 0), (4, 4, 0.6, 4)], seen
    ):
        theirs = reference_beams(
            case, reference, batch, num_beams=beams, num_return_sequences=n, length_penalty=penalty,
            early_stopping=early, max_new_tokens=12, eos_token_id=ends, min_new_tokens=least or None,
        )  # fmt: skip
        ours = beam_search(
            model, batch, beams=beams, n=n, length_penalty=penalty, early_stopping=early, max_tokens=12,
            eos=ends, min_tokens=least,
        )  # fmt: skip
        for mine, hers in zip(ours, theirs, strict=True):
            assert [whole(h) for h in mine] == [said for said, _ in hers], (beams, penalty, early)
            assert [h.score for h in mine] == pytest.approx([score for _, score in hers], rel=1e-6, abs=1e-5)
            seen[early] += [whole(h) for h in mine]
    assert len({len(said) for said in seen[False]}) > 4
    assert seen[True] != seen[False], "when to stop is to make a difference in this test"


@pytest.mark.parametrize("name", ["gpt2", "t5", "marian"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated_as_in_transformers(name, size):
    case = case_of[name]
    reference = softened(case, 3.0)
    model, differs = case.ours(reference), False
    for row in case.rows(prompts_of(case)):
        if row.tokens is not None:
            row = dataclasses.replace(row, lengths=torch.tensor([row.tokens.shape[1]]))
        else:
            row = dataclasses.replace(row, source_lengths=torch.tensor([row.source.shape[1]]))
        how = {"beams": 3, "n": 3, "max_tokens": 12}
        (theirs,) = reference_beams(
            case, reference, row, num_beams=3, num_return_sequences=3, max_new_tokens=12, eos_token_id=None,
            no_repeat_ngram_size=size,
        )  # fmt: skip
        (ours,) = beam_search(model, row, **how, no_repeat_ngram_size=size)
        assert [whole(h) for h in ours] == [said for said, _ in theirs]
        differs |= ours != beam_search(model, row, **how)[0]
    assert differs or size == 3, "there is something to repeat in this test"


SPEAKING = ["gpt2", "gpt-neo", "mixtral", "t5", "marian", "seq2seq-gru-bi-dot", "seq2seq-lstm-uni-none"]


@pytest.mark.parametrize("name", SPEAKING)
def test_one_beam_is_greedy(name):
    case = case_of[name]
    reference, batch = case.reference(), prompts_of(case)
    model = case.ours(reference)
    greedy = case.reference_greedy(reference, case.batch(), 8)
    found = beam_search(model, batch, beams=1, max_tokens=8)
    assert [list(row[0].tokens) for row in found] == greedy
    end = greedy[0][3]
    found = beam_search(model, batch, beams=1, max_tokens=8, eos={end}, early_stopping=True)
    for (hypothesis,), said in zip(found, greedy, strict=True):
        cut = said.index(end) if end in said else 8
        assert list(hypothesis.tokens) == said[:cut]
        assert hypothesis.finish_reason == ("stop" if end in said else "length")


class Spy:
    """A model that notes how many rows each call reads."""

    def __init__(self, model: GenerativeModel) -> None:
        self.model, self.context_length, self.check_length = model, model.context_length, model.check_length
        self.started: list[int] = []
        self.stepped: list[int] = []

    def start(self, batch, **more):
        logits, state = self.model.start(batch, **more)
        self.started.append(len(logits))
        return logits, state

    def step(self, tokens, state):
        self.stepped.append(len(tokens))
        return self.model.step(tokens, state)


@pytest.mark.parametrize("name", ["gpt2", "t5", "seq2seq-gru-bi-dot"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_equals_its_rows_alone_and_rows_leave_when_they_are_done(name, groups):
    case = case_of[name]
    model, batch = case.model(), prompts_of(case)
    how = dict(
        beams=4,
        n=3,
        max_tokens=9,
        eos=ends_of(model, batch),
        early_stopping=True,
        groups=groups,
        diversity=0.5,
    )
    spy = Spy(model)
    together = beam_search(spy, batch, **how)
    steps = []
    for i, mine in enumerate(together):
        single = Spy(model)
        (hers,) = beam_search(single, alone(batch, i), **how)
        assert [whole(h) for h in mine] == [whole(h) for h in hers]
        assert [h.logprob for h in mine] == pytest.approx([h.logprob for h in hers], abs=1e-5)
        steps.append(len(single.stepped))
    assert spy.started == [3]  # the prompts and sources are read once, not once for each beam
    assert spy.stepped == [4 * sum(n > t for n in steps) for t in range(max(steps))]


def diverse(model: GenerativeModel, prompt: list[int], n_groups: int, width: int, strength: float, n: int):
    """Vijayakumar et al. 2018, algorithm 1, as it stands there, over plain lists and without a state."""
    groups = [[((), 0.0)] for _ in range(n_groups)]
    for _ in range(n):
        said: list[int] = []
        for g, group in enumerate(groups):
            candidates = []
            for tokens, logprob in group:
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                for token, more in enumerate(logits.log_softmax(-1).tolist()):
                    rank = logprob + more - strength * said.count(token)
                    candidates.append((rank, (*tokens, token), logprob + more))
            groups[g] = [(tokens, logprob) for _, tokens, logprob in sorted(candidates)[::-1][:width]]
            said += [tokens[-1] for tokens, _ in groups[g]]
    return groups


@torch.no_grad()
def test_diverse_groups_follow_the_paper():
    case = case_of["gpt2"]
    model = case.model()
    row = case.rows(case.batch())[1]
    for strength in (0.7, 3.0):
        groups = diverse(model, row.tokens[0].tolist(), 3, 2, strength, 5)
        expected = {tokens: logprob for group in groups for tokens, logprob in group}
        (found,) = beam_search(model, row, beams=6, groups=3, diversity=strength, n=6, max_tokens=5, length_penalty=0.0)
        assert {h.tokens for h in found} == set(expected)
        assert [h.logprob for h in found] == pytest.approx(sorted(expected.values())[::-1], abs=1e-4)


def test_groups_without_diversity_find_the_same():
    case = case_of["gpt2"]
    model, batch = case.model(), prompts_of(case)
    how = dict(max_tokens=6, eos=ends_of(model, batch))
    assert beam_search(model, batch, beams=9, groups=3, n=9, **how) == beam_search(model, batch, beams=3, n=3, **how)


def test_the_last_position_ends_an_answer():
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    prompts = [loaded.tokenizer.encode(text) for text in ("O" * 250, "ROMEO:\n")]
    batch = Batch(torch.tensor([p + [0] * (250 - len(p)) for p in prompts]), torch.tensor([len(p) for p in prompts]))
    found = beam_search(loaded.model, batch, beams=3, max_tokens=12, n=3)
    assert [{len(h.tokens) for h in row} for row in found] == [{7}, {12}]  # 250 + 6 read, one more said
    assert {h.finish_reason for row in found for h in row} == {"length"}


def test_a_trained_model_finds_likelier_text_than_greedy():
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    for prompt in ("ROMEO:\n", "To be, or ", "First Citizen:\nWe are "):
        batch = Batch(torch.tensor([loaded.tokenizer.encode(prompt)]))
        greedy, beam = (beam_search(loaded.model, batch, beams=k, max_tokens=24)[0][0] for k in (1, 4))
        assert beam.logprob >= greedy.logprob - 1e-4
        assert beam.logprob == pytest.approx(logprob_of(loaded.model, batch, beam.tokens), abs=1e-3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"beams": 0}, "beams"),
        ({"beams": 2, "n": 3}, "n is 3"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"beams": 4, "groups": 3}, "equal groups"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        beam_search(tiny("decoder"), some("decoder"), **{"beams": 2, "max_tokens": 4, **wrong})
