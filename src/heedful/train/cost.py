"""The cost of training: parameters, FLOPs, memory, and settings that make a step fit into memory.

Works for every family without knowing any: a step is run on fake tensors (memory_tracker.py).

FLOPs are the model's, as papers count them: a product of (m, k) and (k, n) is 2mkn, backward is twice forward, causal
attention counts as full attention, and recomputation by kernels or activation checkpointing does not count. For
GPT-2 that is 6 N + 12 L T d per token (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B).

Memory is that of one process at the peak of a step, by what it is used for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from heedful.kernels.accelerate import accelerate, restore
from heedful.models.base import Batch, Model
from heedful.nn.embed import Embedding
from heedful.nn.lora import NF4
from heedful.nn.position import Learned
from heedful.nn.stack import Stack
from heedful.train import optimizers
from heedful.train.memory_tracker import MemoryTracker, tensors_of
from heedful.train.objectives import Loss, Objective
from heedful.train.recipe import Recipe

MARGIN = 1.2  # a process takes more than it allocates: 4 to 23 % were measured on a CPU
PROBE_SECONDS = 0.2


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a tied one counts once."""

    total: int
    trainable: int
    embedding: int  # of `total`: lookup tables, one of which may be tied to the head


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one batch."""

    forward: int
    training: int  # forward and backward


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by use at the peak of a step."""

    weights: int
    gradients: int  # that exist at the peak
    optimizer: int
    average: int  # the EMA of the weights
    activations: int  # saved for backward, and temporary
    logits: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by the name of their use."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer's state, and bytes by kind at the peak of its step."""

    state: int
    peak: Mapping[str, int]


@dataclass(frozen=True)
class FittingChanges:
    """Changes to a recipe that make it fit, by setting ("train.accumulate"), and the memory it then takes."""

    changes: Mapping[str, Any]
    memory: MemoryUse

    def as_options(self) -> str:
        """The changes as command-line options."""
        values = {k: str(v).lower() if isinstance(v, bool) else v for k, v in self.changes.items()}
        return " ".join(f"--set {name}={value}" for name, value in values.items())


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Total, trainable and embedding parameters of a model; 4-bit weights count as weights."""
    every = list(model.parameters())  # each tied parameter once
    in_four_bits = sum(m.n_weights for m in model.modules() if isinstance(m, NF4))
    tables = {m.weight for m in model.modules() if isinstance(m, Embedding | Learned | nn.Embedding)}
    return ParameterCounts(
        total=sum(p.numel() for p in every) + in_four_bits,
        trainable=sum(p.numel() for p in every if p.requires_grad),
        embedding=sum(p.numel() for p in tables),
    )


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def count_flops(model: Model, objective: Objective, batch: Batch) -> Flops:
    """FLOPs of a batch, forward alone and with backward. The model may be on any device, "meta" too."""
    # Fused kernels recompute or are not counted; papers count the unfused operators.
    with MemoryTracker.for_model("cpu", model) as tracker, sdpa_kernel(SDPBackend.MATH), mkldnn.flags(enabled=False):
        fake_model, fake_objective = restore(tracker.fake_copy(model).train()), tracker.fake_copy(objective)
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward, torch.no_grad():
            fake_objective(fake_model, tracker.fake_batch(batch))
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as training:
            fake_objective(fake_model, tracker.fake_batch(batch)).sum.backward()
    return Flops(forward.get_total_flops(), training.get_total_flops())


def _product(base: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    return 2 * math.prod(a) * b[-1]


# In-place products that torch's counter leaves out: base += a @ b, of matrices and of batches of them.
IN_PLACE = {torch.ops.aten.addmm_: _product, torch.ops.aten.baddbmm_: _product}


@functools.cache
def peak_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device, measured for 0.2 s: an upper bound for training."""
    kind = torch.device(device).type
    n = 8192 if kind == "cuda" else 1024
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    finish: Callable[[], None] = torch.get_device_module(kind).synchronize
    torch.mm(a, b)
    finish()
    began, best = time.perf_counter(), math.inf
    while time.perf_counter() - began < PROBE_SECONDS:
        start = time.perf_counter()
        torch.mm(a, b)
        finish()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def utilisation(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """Model FLOPs utilisation (Chowdhery et al. 2022): the model's FLOP/s as a share of the peak rate."""
    return flops_per_token * tokens_per_second / peak


# --- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(
    model: Model,
    objective: Objective,
    batch: Batch,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    optimizer_memory: OptimizerMemory | None = None,
) -> MemoryUse:
    """Peak memory of a step of the recipe with micro-batches like `batch`; without torch.compile, in one process.

    `optimizer_memory` is the result of `measure_optimizer`, if the caller has it already."""
    settings = recipe.train
    optimizer_memory = optimizer_memory or measure_optimizer(model, recipe, device=device)
    with MemoryTracker.for_model(_traced_device(device), model) as tracker:
        fake_model, fake_objective = tracker.fake_copy(model).train(), tracker.fake_copy(objective)
        fake_batch = tracker.fake_batch(batch)
        accelerate(fake_model, "training")
        for module in fake_model.modules():
            if isinstance(module, Stack):
                module.recompute = settings.checkpoint_activations
        learning = [p for p in fake_model.parameters() if p.requires_grad]
        tracker.reset()
        if settings.accumulate > 1:  # those of earlier micro-batches
            _give_gradients(tracker, learning)
        mixed = settings.precision == "bfloat16"
        with torch.autocast(tracker.device.type, torch.bfloat16, enabled=mixed):
            loss: Loss = fake_objective(fake_model, fake_batch)
        loss.sum.backward()
    high = max(tracker.peak, optimizer_memory.peak, key=lambda parts: sum(parts.values()))
    return MemoryUse(
        weights=sum(t.nbytes for t in (*tensors_of(model), *tensors_of(objective))),
        gradients=high["gradients"],
        optimizer=optimizer_memory.state,
        average=sum(p.nbytes for p in learning) if settings.ema else 0,
        activations=high["activations"],
        logits=high["logits"],
    )


def measure_optimizer(model: Model, recipe: Recipe, *, device: torch.device | str = "cpu") -> OptimizerMemory:
    """Memory of the optimizer: its state, and the peak of its second step, when the state exists already."""
    with MemoryTracker.for_model(_traced_device(device), model) as tracker:
        fake_model = tracker.fake_copy(model)
        learning = [p for p in fake_model.parameters() if p.requires_grad]
        optimizer = optimizers.make_optimizer(fake_model, recipe.optimizer)
        peak: dict[str, int] = {}
        for _ in range(2):
            tracker.reset()
            _give_gradients(tracker, learning)
            optimizer.step()
            peak = dict(tracker.peak)
            optimizer.zero_grad(set_to_none=True)
        every = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return OptimizerMemory(sum({id(t): t.nbytes for t in every}.values()), peak)


def _traced_device(device: torch.device | str) -> torch.device:
    """The device to trace on: others than CUDA allocate about as a CPU does."""
    device = torch.device(device)
    return device if device.type == "cuda" else torch.device("cpu")


def _give_gradients(tracker: MemoryTracker, learning: list[Tensor]) -> None:
    """Allocate every parameter's gradient and count it as such."""
    for p in learning:
        p.grad = torch.empty_like(p)
    tracker.relabel("gradients")


# --- what fits -------------------------------------------------------------------------------------------------------


def find_fitting_changes(
    model: Model,
    objective: Objective,
    batch: Batch,
    recipe: Recipe,
    limit: float,
    *,
    device: torch.device | str = "cpu",
    world_size: int = 1,
) -> list[FittingChanges]:
    """Up to two sets of changes with which a step fits into `limit` bytes, the mildest first; [] if nothing helps.

    First gradient accumulation alone, in the largest micro-batches that fit; then with activation checkpointing; then
    with bfloat16; then with both; then with shorter examples. `batch` is any batch of the training: its rows are
    repeated or cut as needed.
    """
    ways: list[dict[str, Any]] = [{}]
    if not recipe.train.checkpoint_activations:
        ways.append({"train.checkpoint_activations": True})
    if recipe.train.precision != "bfloat16":
        ways += [way | {"train.precision": "bfloat16"} for way in ways]
    shorter = max(1, recipe.data.length // 2)
    ways.append(ways[-1] | {"data.length": shorter})
    optimizer_memory = measure_optimizer(model, recipe, device=device)
    if (optimizer_memory.state + sum(t.nbytes for t in tensors_of(model))) * MARGIN > limit:
        return []  # weights and optimizer state alone do not fit
    most = max(1, recipe.train.batch_size // world_size)

    def attempt(way: Mapping[str, Any], parts: int) -> FittingChanges | None:
        changes = dict(way) if parts == recipe.train.accumulate else {**way, "train.accumulate": parts}
        some = truncate_rows(batch, shorter) if "data.length" in way else batch
        some = take_rows(some, math.ceil(recipe.train.batch_size / world_size / parts))
        memory = measure_memory(
            model, objective, some, with_settings(recipe, changes), device=device, optimizer_memory=optimizer_memory
        )
        return FittingChanges(changes, memory) if memory.total * MARGIN <= limit else None

    found = (_fewest_parts(partial(attempt, way), recipe.train.accumulate, most) for way in ways)
    return list(islice((fit for fit in found if fit is not None), 2))


def _fewest_parts(attempt: Callable[[int], FittingChanges | None], now: int, most: int) -> FittingChanges | None:
    """The fit with the fewest micro-batches, found by bisection over doublings of `now`; None if no number fits."""
    choices = [now]
    while choices[-1] < most:
        choices.append(min(choices[-1] * 2, most))
    best = attempt(choices[-1])
    low, high = 0, len(choices) - 1  # choices[high] fits
    while best is not None and low < high:
        middle = (low + high) // 2
        fit = attempt(choices[middle])
        if fit is None:
            low = middle + 1
        else:
            best, high = fit, middle
    return best


def with_settings(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of the recipe with some settings, named "table.key", changed."""
    for name, value in changes.items():
        table, _, key = name.partition(".")
        new = dataclasses.replace(getattr(recipe, table), **{key: value})
        recipe = dataclasses.replace(recipe, **{table: new})
    return recipe


def take_rows(batch: Batch, n: int) -> Batch:
    """The first n rows of a batch, repeated if it has fewer."""

    def rows(tensor: Tensor) -> Tensor:
        times = math.ceil(n / len(tensor))
        return tensor.repeat(times, *[1] * (tensor.ndim - 1))[:n]

    return _each(batch, rows)


def truncate_rows(batch: Batch, n: int) -> Batch:
    """The first n positions of every row."""
    sequences = {"tokens", "source", "segments", "documents"}
    width = None if batch.tokens is None else batch.tokens.shape
    cut = {
        name: tensor[..., :n]
        for name in (*sequences, "targets", "log_probs")
        if (tensor := getattr(batch, name)) is not None and (name in sequences or tensor.shape == width)
    }
    lengths = {
        name: tensor.clamp(max=n)
        for name in ("lengths", "source_lengths")
        if (tensor := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **cut, **lengths)


def n_elements(batch: Batch) -> int:
    """The number of elements of all tensors of a batch."""
    every = (getattr(batch, f.name) for f in dataclasses.fields(batch))
    return sum(t.numel() for t in every if t is not None)


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: None if t is None else change(t) for name, t in tensors.items()})


def free_memory(device: torch.device | str) -> int | None:
    """Bytes this process can use on the device, what it uses already included; None where that is unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type not in ("cpu", "mps"):
        return None
    limits = [torch.mps.recommended_max_memory()] if device.type == "mps" else []  # a part of the machine's memory
    with suppress(OSError, ValueError, KeyError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="utf-8").split())
        limits.append(free + (resident - shared) * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text(encoding="utf-8")))
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
