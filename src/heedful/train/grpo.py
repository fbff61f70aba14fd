"""Group relative policy optimization: completions that a rule rewards become likelier (DeepSeekMath, Shao et al. 2024,
section 4.1; Dr. GRPO, Liu et al. 2025).

Of each prompt the model samples a group of completions (`heedful.train.rollouts`). The advantage of a completion is its
reward less the group's mean, divided by the group's standard deviation; there is no critic. Of a token with the
probability ratio ρ = π/π_old and the advantage A, with the KL divergence from the model before training estimated as in
the paper (equation 4), times ρ, which makes its gradient unbiased (DeepSeek-V3.2, 2025):

    loss    -min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) + β ρ (π_ref/π - log π_ref/π - 1)

    grpo       the mean over a completion's tokens, then over completions
    dr_grpo    the sum over a completion's tokens by the longest length there is, and advantages that are not divided by
               the standard deviation: neither long completions nor prompts of one opinion weigh more

A step samples once and updates the weights `updates` times (the paper's μ, 1 in its experiments: then ρ is 1 and
nothing is clipped).

    B prompts, G completions of each, T positions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.models.base import Batch, Model
from heedful.train.loss import Loss
from heedful.train.policy import choices_as_rows, count_targets, frozen, reference_log_probs, target_log_probs

GRPO_LOSS_TYPES = ("grpo", "dr_grpo")
SMALLEST_DEVIATION = 1e-4  # is added to the standard deviation of rewards, as in TRL


class GRPO:
    """The objective of prompts: `prepare` makes a batch of completions (B, G, T) with rewards (B, G) of one of prompts.

    The loss is summed over completions. In evaluation there is one completion of each prompt, and the loss is 1 less
    its reward. Metrics: the mean `reward`, the mean `length` in tokens, `kl` per token if there is a reference.
    """

    def __init__(
        self,
        rollouts: Callable[[Model, Batch], Batch],
        reference: Model | None = None,
        *,
        kl: float = 0.0,
        clip: float = 0.2,
        updates: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 64,
        loss_type: str = "grpo",
    ) -> None:
        """`kl` weighs the divergence from the `reference`, the model before training (None: the model with its adapters
        off); with 0 there is none. `temperature` and `max_tokens` are those of `rollouts`."""
        if loss_type not in GRPO_LOSS_TYPES:
            raise ValueError(f"GRPO has no loss {loss_type!r}: {' and '.join(GRPO_LOSS_TYPES)} are known")
        self.rollouts, self.reference = rollouts, frozen(reference)
        self.kl, self.clip, self.updates = kl, clip, updates
        self.temperature, self.max_tokens, self.loss_type = temperature, max_tokens, loss_type

    def prepare(self, model: Model, batch: Batch) -> Batch:
        """Completions of a batch of prompts by the weights as they are, with their rewards."""
        made = self.rollouts(model, batch)
        if self.updates == 1 or not model.training:
            return made
        with torch.no_grad():
            old = target_log_probs(model, choices_as_rows(made), temperature=self.temperature)
        return dataclasses.replace(made, log_probs=old.view_as(made.ids))

    def __call__(self, model: Model, batch: Batch) -> Loss:
        """The summed loss of a batch of completions."""
        assert batch.rewards is not None, "a batch of prompts is prepared first"
        rewards = batch.rewards  # (B, G)
        n = rewards.numel()
        rows = choices_as_rows(batch)
        assert rows.targets is not None
        lengths = count_targets(rows.targets)  # (B·G,)
        metrics: dict[str, tuple[Tensor, Tensor | int]] = {"reward": (rewards.sum(), n), "length": (lengths.sum(), n)}
        if not model.training:
            return Loss((1 - rewards).sum(), n, metrics)
        log_probs = target_log_probs(model, rows, temperature=self.temperature)  # (B·G, T)
        old = log_probs.detach() if batch.log_probs is None else batch.log_probs.flatten(0, 1)
        ratio, a = torch.exp(log_probs - old), group_advantages(rewards, self.loss_type).view(-1, 1)
        losses = -torch.minimum(ratio * a, ratio.clamp(1 - self.clip, 1 + self.clip) * a)
        if self.kl:
            theirs = reference_log_probs(model, self.reference, rows, temperature=self.temperature)
            divergence = torch.exp(theirs - log_probs) - (theirs - log_probs) - 1  # 0 where there is no target
            metrics["kl"] = (divergence.detach().sum(), lengths.sum())
            losses = losses + self.kl * ratio * divergence
        by = lengths.clamp(min=1) if self.loss_type == "grpo" else self.max_tokens
        return Loss(((losses * (rows.targets != IGNORED)).sum(-1) / by).sum(), n, metrics)


def group_advantages(rewards: Tensor, loss_type: str = "grpo") -> Tensor:
    """How much better each completion (B, G) is than the mean of its group, in standard deviations."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred if loss_type == "dr_grpo" else centred / (rewards.std(dim=1, keepdim=True) + SMALLEST_DEVIATION)
