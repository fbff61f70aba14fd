"""Model and objective as one module, and its mean loss and metrics over validation data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from heedful.data.dataset import Dataset, Draw
from heedful.data.loader import validation_batches
from heedful.models.base import Batch, Model
from heedful.train.distributed import Processes
from heedful.train.loss import Loss, Scores, add_loss, mean_scores
from heedful.train.objectives import Objective


class LossModule(nn.Module):
    """Model and objective as one module whose forward returns the loss: what DDP and FSDP2 wrap."""

    def __init__(self, model: Model, objective: Objective, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.device_type = device.type
        self.mixed_precision = precision == "bfloat16"

    def forward(self, batch: Batch) -> Loss:
        """The summed loss of a batch, under bfloat16 autocast if the precision says so."""
        autocast = torch.autocast(self.device_type, torch.bfloat16) if self.mixed_precision else nullcontext()
        with autocast:
            return self.objective(self.model, batch)


@torch.no_grad()
def validate(
    loss_module: nn.Module,
    data: Dataset,
    *,
    batch_size: int,
    n_batches: int = 0,
    processes: Processes,
    prepare: Callable[[list[Batch]], list[Batch]] = list,
) -> Scores:
    """Mean loss and metrics over data, in evaluation mode; `n_batches` spread evenly over it, 0 for all of it."""
    was_training = loss_module.training
    loss_module.eval()
    sums: dict[str, Tensor] = {}
    share = {"seed": 0, "rank": processes.rank, "world_size": processes.world_size}
    mine = validation_batches(data, batch_size=batch_size, n_batches=n_batches, **share)
    total = -(-len(data) // batch_size)
    for _ in range(-(-min(n_batches or total, total) // processes.world_size)):
        # Sharded processes must all call the module equally often; one that has run out of data computes a batch that
        # is not counted.
        batch = next(mine, None)
        (made,) = prepare([batch or data.batch([Draw(0, 0)], seed=0)])
        loss = loss_module(processes.to_device(made))
        add_loss(sums, loss, counts=batch is not None)
    processes.all_reduce(sums)
    loss_module.train(was_training)
    return mean_scores(sums)
