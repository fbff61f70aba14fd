"""Decoding: sampling keeps what it promises, text comes in whole characters."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.generate.batch import generate_batch
from heedful.generate.detokenizer import stream_pieces
from heedful.generate.request import Sampling
from heedful.generate.sampling import Sampler, keep_top_k, keep_top_p, sample
from heedful.models.base import Batch
from heedful.text import byte_tokens

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def kept(logits: torch.Tensor) -> list[bool]:
    return torch.isfinite(logits)[0].tolist()


def test_top_k_keeps_the_k_most_likely():
    assert kept(keep_top_k(LOGITS[:, [3, 1, 0, 2]], 2)) == [False, True, True, False]
    assert kept(keep_top_k(LOGITS, 100)) == [True] * 4


@pytest.mark.parametrize(("p", "n"), [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(p, n):
    assert kept(keep_top_p(LOGITS, p)) == [True] * n + [False] * (4 - n)
    assert sum(kept(keep_top_p(LOGITS.flip(-1), p))) == n


def test_samples_follow_the_distribution():
    samplers = [Sampler(Sampling(seed=0), index=i) for i in range(400)]
    drawn = [token for _ in range(100) for token in sample(LOGITS.expand(400, 4), samplers)]
    seen = torch.bincount(torch.tensor(drawn), minlength=4).double()
    expected = 40_000 * LOGITS[0].double().exp()
    assert ((seen - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


def test_temperature_zero_is_greedy():
    assert sample(LOGITS, [Sampler(Sampling(temperature=0))]) == [0]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_pieces_never_split_a_character():
    tokenizer = byte_tokens()
    text = "naïve 日本語 👩‍👩‍👧 end"
    parts = list(stream_pieces(tokenizer.encode(text), tokenizer))
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    broken = tokenizer.encode(text)[:-5] + tokenizer.encode("日")[:2]  # ends inside a character
    assert "".join(stream_pieces(broken, tokenizer)) == tokenizer.decode(broken)


def test_a_row_ends_at_its_stop_and_the_others_go_on():
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    prompts = [loaded.tokenizer.encode(t) for t in ("ROMEO:\n", "First Citizen:\nBefore we ")]
    tokens = torch.tensor([p + [0] * (30 - len(p)) for p in prompts])
    batch = Batch(tokens, torch.tensor([len(p) for p in prompts]))
    free = generate_batch(loaded.model, batch, 12, Sampling(temperature=0))
    stop = free[0][4]
    stopped = generate_batch(loaded.model, batch, 12, Sampling(temperature=0), stop={stop})
    for row, all_of_it in zip(stopped, free, strict=True):
        end = all_of_it.index(stop) if stop in all_of_it else len(all_of_it)
        assert row == all_of_it[:end]


def test_generation_ends_at_the_last_position():
    loaded = heedful.load("shakespeare")
    prompt = Batch(torch.tensor([loaded.tokenizer.encode("O" * 250)]))
    assert len(generate_batch(loaded.model, prompt, 50, Sampling(seed=1))[0]) == 7  # 250 + 6 read, one more said


def test_loaded_models_speak_text():
    loaded = heedful.load("shakespeare")
    text = loaded.generate("ROMEO:", max_tokens=20, temperature=0.8, seed=1)
    assert len(text) == 20
    assert "".join(loaded.stream("ROMEO:", max_tokens=20, temperature=0.8, seed=1)) == text
    with pytest.raises(ValueError, match="GPT and cannot translate"):
        loaded.translate("Hallo")
