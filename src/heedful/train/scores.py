"""How a task does on data: means of sums, over batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heedful.data.dataset import Dataset, Draw
from heedful.data.loader import validation_batches
from heedful.models.base import Batch
from heedful.train.distributed import Processes
from heedful.train.loss import Loss


@dataclass
class Scores:
    """A mean loss and the means of its metrics."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def evaluate(task: nn.Module, data: Dataset, *, batch_size: int, n_batches: int = 0, processes: Processes) -> Scores:
    """The mean loss of a task over data; `n_batches` 0 is all of it, else so many, spread over it."""
    was_training = task.training
    task.eval()
    sums: dict[str, Tensor] = {}
    share = {"seed": 0, "rank": processes.rank, "world": processes.world}
    mine = validation_batches(data, batch_size=batch_size, n_batches=n_batches, **share)
    total = -(-len(data) // batch_size)
    for _ in range(-(-min(n_batches or total, total) // processes.world)):
        # All processes call the task equally often, for they may need each other in it; what is too much counts 0.
        batch = next(mine, None)
        loss = task(processes.move(batch or data.batch([Draw(0, 0)], seed=0)))
        add(sums, loss, counts=batch is not None)
    processes.sum(sums)
    task.train(was_training)
    return means(sums)


def add(sums: dict[str, Tensor], loss: Loss, *, counts: bool = True) -> None:
    """Sums and counts of a loss and its metrics, as float64 on its device."""
    found = {"loss": loss.sum, "targets": loss.n_targets}
    for name, (total, count) in loss.metrics.items():
        found |= {f"{name}.sum": total, f"{name}.count": count}
    for name, value in found.items():
        number = torch.as_tensor(value, device=loss.sum.device).detach().double() * counts
        sums[name] = sums[name] + number if name in sums else number


def fetch(numbers: Mapping[str, Tensor]) -> Callable[[], dict[str, float]]:
    """Numbers as floats, later. A GPU sends them as soon as it has them: who reads them then does not wait for what it
    was given to do since."""
    if next(iter(numbers.values())).device.type != "cuda":
        return lambda: {name: float(number) for name, number in numbers.items()}
    found = torch.stack([number.double() for number in numbers.values()])
    here = torch.empty(len(found), dtype=found.dtype, pin_memory=True)
    here.copy_(found, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> dict[str, float]:
        arrived.synchronize()
        return dict(zip(numbers, here.tolist(), strict=True))

    return read


def means(sums: Mapping[str, Tensor | float]) -> Scores:
    def mean(total: str, count: str) -> float:
        return float(sums[total]) / max(float(sums[count]), 1)

    names = [name.removesuffix(".sum") for name in sums if name.endswith(".sum")]
    return Scores(mean("loss", "targets"), {n: mean(f"{n}.sum", f"{n}.count") for n in names})


def n_tokens(batch: Batch) -> int:
    """How much a batch makes a model read: tokens, or images where there are none."""
    read = [x.numel() for x in (batch.tokens, batch.source) if x is not None]
    return sum(read) if read else 0 if batch.images is None else len(batch.images)
