"""Rollouts: completions that the model in training samples of prompts, by the engine, with their rewards.

Seeds are the prompts' own (`heedful.data.prompts`), so that a step samples the same on any number of processes and
micro-batches, up to rounding, and when it is resumed.

    B prompts, G completions of each, T positions
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.data.ragged import pad_ids
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Result, Sampling
from heedful.models.base import Batch, GenerativeModel, Model, row_lengths
from heedful.text import Tokenizer
from heedful.train.objectives import required_targets

MOST_ROWS = 256  # sequences that are sampled at once


class Rollouts:
    """Samples a group of completions of each prompt and rewards them: `reward(completion, answer)`.

    `answers` are those of the prompts by their number. A model in evaluation completes each prompt once, greedily.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: Sequence[str],
        reward: Callable[[str, str], float],
        *,
        stop_ids: Collection[int],
        group: int = 8,
        max_tokens: int = 64,
        temperature: float = 1.0,
    ) -> None:
        """`stop_ids` end a completion; the model learns to generate them."""
        if group < 2:
            raise ValueError(f"a group of {group} has nothing to compare with: it is 2 or more")
        self.tokenizer, self.answers, self.reward = tokenizer, answers, reward
        self.stop_ids, self.group, self.max_tokens = frozenset(stop_ids), group, max_tokens
        self.temperature = temperature

    def __call__(self, model: Model, batch: Batch) -> Batch:
        """Completions of prompts (B, T): tokens and targets (B, G, T), rewards (B, G); on the CPU."""
        n, temperature = (self.group, self.temperature) if model.training else (1, 0.0)
        lengths, numbers = row_lengths(batch.ids, batch.lengths), required_targets(batch).tolist()
        prompts = [ids[:length] for ids, length in zip(batch.ids.tolist(), lengths, strict=True)]
        requests = [
            Request(
                prompt=tuple(prompt),
                max_tokens=self.max_tokens,
                sampling=Sampling(temperature=temperature, seed=seed),
                stop_ids=self.stop_ids,
                n=n,
                include_stop_str_in_output=True,
            )
            for prompt, (_, seed) in zip(prompts, numbers, strict=True)
        ]
        completions = [choice.tokens for result in run_in_evaluation(model, requests) for choice in result.choices]
        answers = [self.answers[number] for number, _ in numbers for _ in range(n)]
        rewards = [self._reward(tokens, answer) for tokens, answer in zip(completions, answers, strict=True)]
        return rollout_batch([p for p in prompts for _ in range(n)], completions, torch.tensor(rewards).view(-1, n))

    def _reward(self, tokens: Sequence[int], answer: str) -> float:
        text = self.tokenizer.decode([token for token in tokens if token not in self.stop_ids])
        return float(self.reward(text, answer))


def run_in_evaluation(model: Model, requests: Sequence[Request]) -> list[Result]:
    """Run requests on a model that is being trained, with the weights as they are and without dropout."""
    if not isinstance(model, GenerativeModel):
        raise ValueError(f"a {type(model).__name__} completes no prompts: GRPO is for a decoder, such as gpt")
    was_training = model.training
    model.eval()
    try:
        return Engine(model, max_rows=MOST_ROWS).run(requests)
    finally:
        model.train(was_training)


def rollout_batch(prompts: Sequence[list[int]], completions: Sequence[list[int]], rewards: Tensor) -> Batch:
    """A batch of B·G prompts, each with a completion; rewards (B, G)."""
    rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, completions, strict=True)]
    following = [[*[IGNORED] * (len(prompt) - 1), *tokens] for prompt, tokens in zip(prompts, completions, strict=True)]
    shape = (*rewards.shape, max(map(len, rows)))
    return Batch(
        pad_ids(rows, 0).view(shape),
        torch.tensor([len(row) for row in rows]).view(rewards.shape),
        targets=pad_ids(following, IGNORED, shape[-1]).view(shape),
        rewards=rewards,
    )
