"""What a training costs: parameters, floating-point operations, memory and what fits in it. For every family, knowing
none: all of it is found by going through a step on tensors that have a shape and no memory (`rehearsal`).

FLOPs are those of the model, as papers count them: a product of (m, k) and (k, n) is 2mkn, backward is twice forward,
attention is counted whole though a causal one needs half, and what a kernel or a checkpoint computes again is not
counted. For GPT-2 that is 6 N + 12 L T d per token (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B).

Memory is that of one process at the highest point of a step, part by part.
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

from heedful.kernels.cpu.block_op import rehearsed
from heedful.models.base import Batch, Model
from heedful.nn.embed import Embedding
from heedful.nn.lora import NF4
from heedful.nn.position import Learned
from heedful.nn.stack import Stack
from heedful.train import optim
from heedful.train.objectives import Loss, Objective
from heedful.train.recipe import Recipe
from heedful.train.rehearsal import Rehearsal, tensors_of

MARGIN = 1.2  # a process takes more than it asks for: 4 to 23 % were seen on a CPU
PROBE_SECONDS = 0.2


@dataclass(frozen=True)
class Parameters:
    total: int
    trainable: int
    embedding: int  # of `total`: tables in which a row is looked up; a head may share one


@dataclass(frozen=True)
class Flops:
    """Of one batch."""

    forward: int
    training: int  # forward and backward


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for, at the moment of a step when they are most."""

    weights: int
    gradients: int  # that are there at that moment
    optimizer: int
    average: int  # the running mean of the weights
    activations: int  # what forward keeps for backward, and what is needed on the way
    logits: int

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Stepping:
    """What an optimizer takes: bytes that it keeps, and by kind what is in use at the peak of its step."""

    state: int
    peak: Mapping[str, int]


@dataclass(frozen=True)
class Fit:
    """Settings that fit: changes to a recipe by their names ("train.accumulate"), and the memory it then takes."""

    changes: Mapping[str, Any]
    memory: Memory

    def as_options(self) -> str:
        """As one types them."""
        values = {k: str(v).lower() if isinstance(v, bool) else v for k, v in self.changes.items()}
        return " ".join(f"--set {name}={value}" for name, value in values.items())


def count_parameters(model: nn.Module) -> Parameters:
    every = list(model.parameters())  # a tied one comes once
    in_four_bits = sum(m.n_weights for m in model.modules() if isinstance(m, NF4))
    tables = {m.weight for m in model.modules() if isinstance(m, Embedding | Learned | nn.Embedding)}
    return Parameters(
        total=sum(p.numel() for p in every) + in_four_bits,
        trainable=sum(p.numel() for p in every if p.requires_grad),
        embedding=sum(p.numel() for p in tables),
    )


# --- operations ------------------------------------------------------------------------------------------------------


def count_flops(model: Model, objective: Objective, batch: Batch) -> Flops:
    """What `batch` costs, forward alone and with backward. The model may be anywhere, on the device "meta" too."""
    # Fused kernels compute some of it again, or are not counted: the plain definitions are what papers count.
    with Rehearsal.on("cpu", model) as rehearsal, sdpa_kernel(SDPBackend.MATH), mkldnn.flags(enabled=False):
        ghost, aim = rehearsal.ghost(model).train(), rehearsal.ghost(objective)
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward, torch.no_grad():
            aim(ghost, rehearsal.batch(batch))
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as training:
            aim(ghost, rehearsal.batch(batch)).sum.backward()
    return Flops(forward.get_total_flops(), training.get_total_flops())


def _product(base: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    return 2 * math.prod(a) * b[-1]


# What torch's counter leaves out: base += a @ b, of matrices and of batches of them.
IN_PLACE = {torch.ops.aten.addmm_: _product, torch.ops.aten.baddbmm_: _product}


@functools.cache
def peak_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here and now: the most a training can reach. Takes 0.2 s once."""
    kind = torch.device(device).type
    n = 8192 if kind == "cuda" else 1024
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    finish: Callable[[], None] = torch.cuda.synchronize if kind == "cuda" else lambda: None
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
    """The share of the peak rate that trains the model (Chowdhery et al. 2022: model FLOPs utilisation)."""
    return flops_per_token * tokens_per_second / peak


# --- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(
    model: Model,
    objective: Objective,
    batch: Batch,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    stepping: Stepping | None = None,
) -> Memory:
    """Of a step of the recipe whose parts (`accumulate`) are like `batch`; without torch.compile, in one process.

    `stepping` is what `measure_optimizer` says, where that is known already."""
    settings = recipe.train
    stepping = stepping or measure_optimizer(model, recipe, device=device)
    with Rehearsal.on(_stage(device), model) as rehearsal, rehearsed():
        ghost, aim, some = rehearsal.ghost(model).train(), rehearsal.ghost(objective), rehearsal.batch(batch)
        for module in ghost.modules():
            if isinstance(module, Stack):
                module.recompute = settings.checkpoint_activations
        learning = [p for p in ghost.parameters() if p.requires_grad]
        rehearsal.forget()
        if settings.accumulate > 1:  # the parts before have left theirs
            _give_gradients(rehearsal, learning)
        mixed = settings.precision == "bfloat16"
        with torch.autocast(rehearsal.device.type, torch.bfloat16, enabled=mixed):
            loss: Loss = aim(ghost, some)
        loss.sum.backward()
    high = max(rehearsal.peak, stepping.peak, key=lambda parts: sum(parts.values()))
    return Memory(
        weights=sum(t.nbytes for t in (*tensors_of(model), *tensors_of(objective))),
        gradients=high["gradients"],
        optimizer=stepping.state,
        average=sum(p.nbytes for p in learning) if settings.ema else 0,
        activations=high["activations"],
        logits=high["logits"],
    )


def measure_optimizer(model: Model, recipe: Recipe, *, device: torch.device | str = "cpu") -> Stepping:
    """The bytes that the optimizer keeps, and the peak of its second step, when they are there already."""
    with Rehearsal.on(_stage(device), model) as rehearsal:
        ghost = rehearsal.ghost(model)
        learning = [p for p in ghost.parameters() if p.requires_grad]
        optimizer = optim.make(ghost, recipe.optimizer)
        peak: dict[str, int] = {}
        for _ in range(2):
            rehearsal.forget()
            _give_gradients(rehearsal, learning)
            optimizer.step()
            peak = dict(rehearsal.peak)
            optimizer.zero_grad(set_to_none=True)
        every = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return Stepping(sum({id(t): t.nbytes for t in every}.values()), peak)


def _stage(device: torch.device | str) -> torch.device:
    """Where to rehearse: other devices than these two allocate about as a CPU does."""
    device = torch.device(device)
    return device if device.type == "cuda" else torch.device("cpu")


def _give_gradients(rehearsal: Rehearsal, learning: list[Tensor]) -> None:
    for p in learning:
        p.grad = torch.empty_like(p)
    rehearsal.name("gradients")


# --- what fits -------------------------------------------------------------------------------------------------------


def find_fit(
    model: Model,
    objective: Objective,
    batch: Batch,
    recipe: Recipe,
    limit: float,
    *,
    device: torch.device | str = "cpu",
    world: int = 1,
) -> list[Fit]:
    """Changes with which a step fits into `limit` bytes, the mildest first, two at most; [] if nothing helps.

    First the same result in smaller parts, as large as they can be; then computing activations again; then bfloat16;
    then both, then shorter examples. `batch` is any batch of the training: its rows are repeated or cut as needed.
    """
    ways: list[dict[str, Any]] = [{}]
    if not recipe.train.checkpoint_activations:
        ways.append({"train.checkpoint_activations": True})
    if recipe.train.precision != "bfloat16":
        ways += [way | {"train.precision": "bfloat16"} for way in reversed(ways)]
    shorter = max(1, recipe.data.length // 2)
    ways.append(ways[-1] | {"data.length": shorter})
    stepping = measure_optimizer(model, recipe, device=device)
    if (stepping.state + sum(t.nbytes for t in tensors_of(model))) * MARGIN > limit:
        return []  # these stay, whatever a step is cut into
    most = max(1, recipe.train.batch_size // world)

    def attempt(way: Mapping[str, Any], parts: int) -> Fit | None:
        changes = dict(way) if parts == recipe.train.accumulate else {**way, "train.accumulate": parts}
        some = cut_rows(batch, shorter) if "data.length" in way else batch
        some = take_rows(some, math.ceil(recipe.train.batch_size / world / parts))
        memory = measure_memory(model, objective, some, changed(recipe, changes), device=device, stepping=stepping)
        return Fit(changes, memory) if memory.total * MARGIN <= limit else None

    found = (_fewest_parts(partial(attempt, way), recipe.train.accumulate, most) for way in ways)
    return list(islice((fit for fit in found if fit is not None), 2))


def _fewest_parts(attempt: Callable[[int], Fit | None], now: int, most: int) -> Fit | None:
    """The fit with the fewest parts of a step, twice as many each time; None if one example alone does not fit."""
    choices = [now]
    while choices[-1] < most:
        choices.append(min(choices[-1] * 2, most))
    best = attempt(choices[-1])
    low, high = 0, len(choices) - 1  # what `high` numbers fits
    while best is not None and low < high:
        middle = (low + high) // 2
        fit = attempt(choices[middle])
        if fit is None:
            low = middle + 1
        else:
            best, high = fit, middle
    return best


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
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


def cut_rows(batch: Batch, n: int) -> Batch:
    """The first n positions of every row."""
    sequences = {"tokens", "source", "segments", "documents"}
    width = None if batch.tokens is None else batch.tokens.shape
    cut = {
        name: tensor[:, :n]
        for name in (*sequences, "targets")
        if (tensor := getattr(batch, name)) is not None and (name in sequences or tensor.shape == width)
    }
    lengths = {
        name: tensor.clamp(max=n)
        for name in ("lengths", "source_lengths")
        if (tensor := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **cut, **lengths)


def n_numbers(batch: Batch) -> int:
    """How much there is in a batch."""
    every = (getattr(batch, f.name) for f in dataclasses.fields(batch))
    return sum(t.numel() for t in every if t is not None)


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: None if t is None else change(t) for name, t in tensors.items()})


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that this process can use on the device, with what it uses by now; None where nobody tells."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type != "cpu":
        return None
    limits = []
    with suppress(OSError, ValueError, KeyError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        limits.append(free + (resident - shared) * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # a container's
        with suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text()))
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
