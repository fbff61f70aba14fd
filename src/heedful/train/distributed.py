"""Many processes, one training, on one machine or several; one process alone is the same code with nothing to do.

    torchrun --nproc-per-node 8 -m heedful train RECIPE

    as it is               every process has the whole model; gradients are added in buckets, while backward still
                           works on the layers before (DDP: Li et al. 2020)
    train.sharded = true   every process has a part of each parameter, its gradient and its optimizer's state; a
                           block is put together while it works (FSDP2: Zhao et al. 2023)

Gradients are added up and never averaged: the trainer divides once, by the targets of all. Only tensors and text go
between processes, no pickles, and a checkpoint is the same files whoever wrote it (`whole`).
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

from heedful.models.base import Batch


class Processes:
    """This process among all that train together; this class is one that is alone.

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
        return Processes(choose_device(device))

    @classmethod
    def start(cls, device: str) -> Processes:
        """What torchrun's environment says, or alone without one; returns when all are there."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone(device)
        from heedful.train.process_group import TorchrunProcesses

        return TorchrunProcesses(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end of training together; with an error, `tell` is told whose it was, and all end."""

    @property
    def main(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    # --- a step ----------------------------------------------------------------------------------------------------

    def wrap(self, task: nn.Module, *, sharded: bool, bfloat16: bool = False) -> nn.Module:
        """Move the task to the device; what to call instead of it so that gradients become those of all processes."""
        return task.to(self.device)

    @contextmanager
    def gradient_sync(self, called: nn.Module, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are shared with the last one alone."""
        yield

    def all_reduce(self, sums: dict[str, Tensor]) -> None:
        """Each of these numbers over all processes, in place; all processes have the same names."""

    def any_process(self, flag: bool) -> bool:
        """Whether any process says so."""
        return flag

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this process's device."""
        if self.device.type == "cpu":
            return batch
        # From pinned memory: other copies would wait for all that the GPU still has to do.
        pinned = self.device.type == "cuda"
        tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        return Batch(
            **{
                name: (t.pin_memory() if pinned else t).to(self.device, non_blocking=True)
                for name, t in tensors.items()
                if t is not None
            }
        )

    # --- the whole model -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """For saving: inside, the main process's model has whole parameters, and so are the tensors it is given
        back; the others are given none. All enter, and all leave together once the main process is done."""
        yield dict(tensors)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """For generating and looking: inside, one process can call the model or parts of it without the others. All
        enter, and each holds the whole model in memory."""
        yield

    # --- waiting and telling ---------------------------------------------------------------------------------------

    def barrier(self, what: str, minutes: float = 30) -> None:
        """Wait until all are here, or say who is not."""

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """For work whose result is kept in files: the main process does it, then one on each other machine (it finds
        the files, if the machines share them), then all others, who find them in any case."""
        yield

    def gather_texts(self, text: str) -> list[str]:
        """What each process says, in their order."""
        return [text]

    def broadcast_text(self, text: str) -> str:
        """The main process's text, on all."""
        return self.gather_texts(text)[0]


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process has a part of it. (Not isinstance: importing DTensor takes time.)"""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """This process's part, in the same memory: enough for what is done to each number by itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on all processes, as they hold `like`: each takes its part."""
    if not is_sharded(like) or value.ndim == 0:
        return value
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    places = like.placements if value.shape == like.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(value.to(like.device), mesh, places, src_data_rank=None)


def choose_device(name: str) -> torch.device:
    """ "auto": a GPU if there is one."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"train.device is {name!r}: it is auto, cpu, cuda or cuda:N") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("train.device is cuda, and this machine has no GPU that PyTorch can use")
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
