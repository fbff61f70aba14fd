"""Training in one process or several, on one machine or several, behind one interface.

    torchrun --nproc-per-node 8 -m heedful train RECIPE

    default                DDP: every process has the whole model; gradients are all-reduced in buckets during
                           backward (Li et al. 2020)
    train.sharded = true   FSDP2: every process has a shard of each parameter, gradient and optimizer state; a block
                           is gathered while it computes (Zhao et al. 2023)

Gradients are summed, never averaged: the trainer divides once, by the number of targets of all processes. Processes
exchange tensors and text, no pickles, and a checkpoint has the same files however many wrote it (`gathered`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from heedful.kernels.device import choose_device
from heedful.models.base import Batch
from heedful.weights.load import is_sharded


class Processes:
    """This process among all that train together; this base class is a single process (process_group.py: several).

    `with Processes.start(device) as processes:` is around everything that a training does.
    """

    rank: int = 0
    world_size: int = 1
    signal_repeat_seconds: float = 0.0  # torchrun forwards a signal that the terminal has sent to all processes too

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    @classmethod
    def alone(cls, device: str) -> Processes:
        """A single process on this device."""
        return Processes(choose_device(device))

    @classmethod
    def start(cls, device: str) -> Processes:
        """The processes of torchrun's environment, or a single one without it; returns when all have joined."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone(device)
        from heedful.train.process_group import TorchrunProcesses

        return TorchrunProcesses(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the process group; after an error, `report` says which process failed, and all end."""

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints (rank 0)."""
        return self.rank == 0

    # --- a step ----------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module, *, sharded: bool, bfloat16: bool = False) -> nn.Module:
        """Move the module to the device; returns the module to call so that gradients are summed over processes."""
        return module.to(self.device)

    @contextmanager
    def gradient_sync(self, called: nn.Module, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are all-reduced with the last one only."""
        yield

    def all_reduce(self, sums: dict[str, Tensor]) -> None:
        """Sum each number over all processes, in place; all processes have the same names."""

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this process's device."""
        if self.device.type == "cpu":
            return batch
        # From pinned memory: other copies would synchronize with the GPU. Elsewhere the source may be freed too early.
        pinned = self.device.type == "cuda"
        tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        return Batch(
            **{
                name: (t.pin_memory() if pinned else t).to(self.device, non_blocking=pinned)
                for name, t in tensors.items()
                if t is not None
            }
        )

    # --- the whole model -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """For saving: inside, the main process has the model's full parameters and is given the full tensors; the
        others are given none. All processes enter, and leave together once the main process is done."""
        yield dict(tensors)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """For generation: inside, one process can call the model or parts of it without the others. All processes
        enter, and each holds the full model in memory."""
        yield

    # --- waiting and telling ---------------------------------------------------------------------------------------

    def barrier(self, what: str, minutes: float = 30) -> None:
        """Wait for all processes; `what` they wait for is named if one does not come."""

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """For work that is cached in files: the main process does it, then one process on each other machine (which
        finds the files if the machines share them), then all others."""
        yield

    def gather_texts(self, text: str) -> list[str]:
        """Every process's text, by rank."""
        return [text]

    def broadcast_text(self, text: str) -> str:
        """The main process's text, in all processes."""
        return self.gather_texts(text)[0]


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, for elementwise work in place."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, the same in all processes, in the way `like` is sharded."""
    if not is_sharded(like) or value.ndim == 0:
        return value
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    places = like.placements if value.shape == like.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(value.to(like.device), mesh, places, src_data_rank=None)
