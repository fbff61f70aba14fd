"""What a training step computes on its device: losses, gradients, clipping, the optimizer, averaged weights.

On a GPU, the step of a small model is hundreds of kernels that take longer to launch than to run. `GraphedUpdate`
records them once as a CUDA graph, which is launched as a whole. What changes from step to step stands in tensors then:
the batches, the learning rates and the weight of the EMA; random numbers follow the generator's seed, as without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from heedful.models.base import Batch
from heedful.nn.position import RelativeBias
from heedful.train import optimizers
from heedful.train.distributed import Processes
from heedful.train.loss import Loss, add_loss
from heedful.train.recipe import TrainSettings

PLAIN_STEPS = 3  # before the capture: they compile, allocate the optimizer's state, and choose kernels


class Update:
    """A step: forward and backward of every micro-batch, all-reduce, clip, update, move the averaged weights."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        optimizer: optimizers.Optimizer,
        ema: optimizers.EMA | None,
        processes: Processes,
        clip: float,
    ) -> None:
        self.module, self.parameters, self.optimizer, self.ema = module, parameters, optimizer, ema
        self.processes, self.clip = processes, clip
        if processes.device.type == "cuda" and any(isinstance(part, RelativeBias) for part in module.modules()):
            torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention fails with a bias of some shapes

    def __call__(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Update the weights; returns the sums of losses, metrics and targets, and the "norm" of the gradient."""
        return self.compute(map(self.processes.to_device, batches), len(batches))

    def compute(self, batches: Iterable[Batch], n: int) -> dict[str, Tensor]:
        """The same for n micro-batches that are on the device."""
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            with self.processes.gradient_sync(self.module, i + 1 == n):
                loss: Loss = self.module(batch)
                loss.sum.backward()
            add_loss(sums, loss)
        self.processes.all_reduce(sums)
        norm = optimizers.average_and_clip(self.parameters, sums["targets"], self.clip)
        optimizers.step_if_finite(self.optimizer, norm)
        if self.ema is not None:
            self.ema.move()
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "norm": norm.detach()}


class GraphedUpdate:
    """An update as one CUDA graph. Steps with batches of other shapes are computed without it, and so are all of them
    if it cannot be captured: then `report` says why."""

    def __init__(self, update: Update, report: Callable[[str], None]) -> None:
        self.update, self.report = update, report
        self.stream = torch.cuda.Stream(update.processes.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.n_plain = 0
        self.failed = False
        self.inputs: list[Batch] = []
        self.sums: dict[str, Tensor] = {}

    def __call__(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """As `Update`; the tensors returned are overwritten by the next step."""
        if self.n_plain < PLAIN_STEPS:
            self.n_plain += 1
            return self._warm_up(batches)
        if self.graph is None and not self.failed:
            self._capture(batches)
        if self.graph is None or list(map(_shapes, batches)) != list(map(_shapes, self.inputs)):
            return self.update(batches)
        for place, batch in zip(self.inputs, batches, strict=True):
            for name, tensor in _tensors(batch).items():
                _tensors(place)[name].copy_(tensor.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.sums

    def _warm_up(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """A plain step on the stream of the capture: autograd remembers the stream of each parameter's gradient."""
        current = torch.cuda.current_stream(self.update.processes.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = self.update(batches)
        current.wait_stream(self.stream)
        return found

    def _capture(self, batches: Sequence[Batch]) -> None:
        """Record a step without making it."""
        update, device = self.update, self.update.processes.device
        self.inputs = list(map(update.processes.to_device, batches))
        optimizers.use_tensors(update.optimizer, update.ema, device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.sums = update.compute(self.inputs, len(self.inputs))
        except RuntimeError as problem:
            self.failed = True
            update.optimizer.zero_grad(set_to_none=True)
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            self.report(f"a step could not be captured as a CUDA graph ({reason[:200]}): going on without it")
        else:
            self.graph = graph


def graphed_if_wanted(update: Update, settings: TrainSettings, report: Callable[[str], None]) -> Update | GraphedUpdate:
    """The update as a CUDA graph if the recipe says so and it is on one GPU, else as it is."""
    one_gpu = update.processes.device.type == "cuda" and update.processes.world_size == 1
    return GraphedUpdate(update, report) if settings.cuda_graph and one_gpu else update


def _tensors(batch: Batch) -> dict[str, Tensor]:
    found = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _shapes(batch: Batch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(batch).items()}
