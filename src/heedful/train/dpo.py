"""Direct preference optimization: of two answers to a prompt, the chosen one becomes likelier than the rejected one
(Rafailov et al. 2023).

With r(y) = log π(y) - log π_ref(y), the log-probability of an answer less that under the reference:

    sigmoid   -log σ(β (r(chosen) - r(rejected))); with smoothing ε the pair is taken to be swapped with probability ε
              (conservative DPO, Mitchell 2023)
    ipo       (r(chosen)/n - r(rejected)/m - 1/(2β))², for answers of n and m tokens (Azar et al. 2023; per token, as
              its authors do)

With `sft` the chosen answer is also learned as in fine-tuning, by -log π(chosen)/n times that weight (iterative RPO,
Pang et al. 2024, equation 2): the losses above are content when both answers become less likely, the rejected one more.

    B pairs, T positions
"""

from __future__ import annotations

import torch.nn.functional as F

from heedful.models.base import Batch, Model
from heedful.train.loss import Loss
from heedful.train.policy import choices_as_rows, count_targets, frozen, reference_log_probs, target_log_probs

LOSS_TYPES = ("sigmoid", "ipo")


class DPO:
    """The objective of pairs: tokens and targets (B, 2, T), chosen before rejected, the targets in the answers alone.

    The loss is summed over pairs. Metrics: `accuracy`, the share of pairs whose chosen answer has the higher implicit
    reward β r, ties by half; `margin` between the two; `ranking_accuracy`, the share whose chosen answer is the
    likelier one (Chen et al. 2024), which is known before training too.
    """

    def __init__(
        self,
        reference: Model | None = None,
        *,
        beta: float = 0.1,
        smoothing: float = 0.0,
        sft: float = 0.0,
        loss_type: str = "sigmoid",
    ) -> None:
        """`reference` is the model before training; None: the model with its adapters off."""
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"DPO has no loss {loss_type!r}: {' and '.join(LOSS_TYPES)} are known")
        if not beta > 0:
            raise ValueError(f"beta is {beta:g}: DPO divides by it, and it must be above 0")
        if not 0 <= smoothing < 0.5 or (smoothing and loss_type != "sigmoid"):
            raise ValueError(f"smoothing is {smoothing:g}: it is for the loss sigmoid, and below 0.5")
        self.reference = frozen(reference)
        self.beta, self.smoothing, self.sft, self.loss_type = beta, smoothing, sft, loss_type

    def __call__(self, model: Model, batch: Batch) -> Loss:
        """The summed loss of a batch of pairs."""
        rows = choices_as_rows(batch)
        log_probs = target_log_probs(model, rows).sum(-1).view(-1, 2)  # (B, 2)
        ratios = log_probs - reference_log_probs(model, self.reference, rows).sum(-1).view(-1, 2)
        chosen, rejected = ratios.unbind(1)
        n, m = count_targets(rows.targets).view(-1, 2).unbind(1)  # type: ignore[arg-type]
        if self.loss_type == "ipo":
            losses = (chosen / n - rejected / m - 1 / (2 * self.beta)) ** 2
        else:
            margin = self.beta * (chosen - rejected)
            losses = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        if self.sft:
            losses = losses - self.sft * log_probs[:, 0] / n
        better = (chosen - rejected).detach()
        n_pairs = len(better)
        wins = (better > 0).sum() + 0.5 * (better == 0).sum()
        likelier = (log_probs[:, 0] > log_probs[:, 1]).sum()
        return Loss(
            losses.sum(),
            n_pairs,
            {
                "accuracy": (wins, n_pairs),
                "margin": (self.beta * better.sum(), n_pairs),
                "ranking_accuracy": (likelier, n_pairs),
            },
        )
