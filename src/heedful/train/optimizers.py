"""Optimizers and learning-rate schedules by name, gradient clipping, and averaged weights (EMA).

    adamw      Loshchilov & Hutter 2019                    torch's, fused on a GPU; on a CPU kernels/cpu/adamw.py
    muon       Jordan et al. 2024; Liu et al. 2025         torch's, for the matrices of the blocks; AdamW for the rest
    adafactor  Shazeer & Stern 2018                        torch's
    lion       Chen et al. 2023, algorithm 2               ours
    sgd        with Nesterov momentum, unless that is 0    torch's

Weight decay applies to matrices, not to biases and norm weights (as in GPT-2 and nanoGPT). Optimizer state is saved by
parameter names, so a checkpoint needs no pickle and no parameter order.

A schedule gives a factor on each parameter group's own learning rate:

    warm-up       (s + 1) / w up to 1                          the beginning of every schedule
    constant      1
    linear        1 -> final                                   BERT (Devlin et al. 2019, appendix A.2)
    cosine        final + (1 - final) (1 + cos πt) / 2         Loshchilov & Hutter 2017, equation 5
    wsd           1, then linear to final over the last        MiniCPM (Hu et al. 2024); linear decay as in
                  `decay` share of the steps                   Hägele et al. 2024
    inverse_sqrt  √(w / (s + 1))                               Vaswani et al. 2017, equation 3, scaled to a peak of 1

s is the step about to be taken, counted from 0; w the warm-up steps; t runs from 0 at s = w to 1 at s = n, the end of
training. The last step, s = n - 1, still learns when final is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heedful.kernels.cpu.adamw import AdamW, scale_, total_norm
from heedful.nn.block import Block
from heedful.nn.feedforward import MixtureOfExperts
from heedful.train.distributed import local_shard, shard_like
from heedful.train.muon import BatchedMuon
from heedful.train.recipe import OptimizerSettings, ScheduleSettings
from heedful.weights.load import is_sharded

FUSED = ("cpu", "cuda")  # devices with fused optimizers in every torch version we support
N_STEPS = "n_steps"  # a key among parameter names, which have dots
Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """Lion: updates by the sign of an interpolation between momentum and gradient; one state value per weight."""

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the gradients are there before the step"
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if not learning:
                continue
            for p in learning:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            weights = [local_shard(p) for p in learning]
            gradients = [local_shard(p.grad) for p in learning]
            momenta = [local_shard(self.state[p]["momentum"]) for p in learning]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class CombinedOptimizer:
    """Several optimizers with disjoint parameters as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Groups:
        """The parameter groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all parameters."""
        return {p: state for one in self.optimizers for p, state in one.state.items()}

    def step(self) -> None:
        """A step of every optimizer."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of all optimizers by their number."""
        return {str(i): one.state_dict() for i, one in enumerate(self.optimizers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for i, one in enumerate(self.optimizers):
            one.load_state_dict(state[str(i)])


Optimizer = torch.optim.Optimizer | CombinedOptimizer


def torch_optimizers(optimizer: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The torch optimizers of an optimizer: those it combines, or itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    """The optimizer of a model's trainable parameters."""
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not learning:
        raise ValueError("no parameter of the model learns: give `trainable` in [adapter] patterns that match some")
    optimizer = _make(model, learning, settings)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _make(model: nn.Module, learning: dict[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
    s = settings
    betas = (s.betas[0], s.betas[1])
    groups = _groups(learning.values(), s.weight_decay)
    fast: dict[str, Any] = (
        {"fused": True} if all(p.device.type in FUSED for p in learning.values()) else {"foreach": True}
    )
    plain = {"foreach": True} if any(map(is_sharded, learning.values())) else fast  # fused SGD does not take DTensors
    match s.name:
        case "adamw":
            return AdamW(groups, s.lr, betas, s.eps, **fast)
        case "muon":
            matrices = block_matrices(model)
            if not matrices:
                raise ValueError(
                    "muon is for the matrices of Transformer blocks, and none of them learns here: use adamw"
                )
            rest = _groups([p for p in learning.values() if p not in matrices], s.weight_decay)
            batched = all(p.is_cuda and not is_sharded(p) for p in matrices)
            kind = BatchedMuon if batched else torch.optim.Muon
            muon = kind(list(matrices), s.muon_lr, s.weight_decay, s.momentum, adjust_lr_fn=s.adjust_lr)
            if not rest:
                return CombinedOptimizer(muon)
            return CombinedOptimizer(muon, AdamW(rest, s.lr, betas, s.eps, **fast))
        case "adafactor":
            if any(map(is_sharded, learning.values())):
                raise ValueError(
                    "adafactor cannot work on parts of parameters: set train.sharded to false, or use adamw"
                )
            return torch.optim.Adafactor(groups, s.lr)
        case "lion":
            return Lion(groups, s.lr, betas)
        case "sgd":
            return torch.optim.SGD(groups, s.lr, s.momentum, nesterov=s.momentum > 0, **plain)
    raise ValueError(f"no optimizer is called {s.name!r}: adamw, muon, adafactor, lion and sgd are")


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Parameter groups: matrices with weight decay, everything else without."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def block_matrices(model: nn.Module) -> dict[nn.Parameter, None]:
    """The trainable matrices of the blocks, which Muon is for; not a router's, which is a classifier like the head."""
    found: dict[nn.Parameter, None] = {}
    routers = {m.router.weight for m in model.modules() if isinstance(m, MixtureOfExperts)}
    for block in model.modules():
        if isinstance(block, Block):
            every = [p for p in block.parameters() if p.ndim == 2 and p.requires_grad and p not in routers]
            found.update(dict.fromkeys(every))
    return found


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Every group's own learning rate times the schedule's factor."""
    for group in optimizer.param_groups:
        lr = group["initial_lr"] * factor
        group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr


def use_tensors(optimizer: Optimizer, ema: EMA | None, device: torch.device) -> None:
    """Put what changes from step to step into tensors on the device, for a CUDA graph of the step: learning rates, and
    the EMA's weight."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        if "capturable" in group:
            group["capturable"] = True
    if ema is not None:
        ema.weight = torch.tensor(float(ema.weight), device=device)


def lr_factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """The schedule's factor on the learning rate for step `step` of `steps`, counted from 0."""
    name, warmup = settings.name, settings.warmup
    if name == "inverse_sqrt":
        peak = max(warmup, 1)
        return min((step + 1) / peak, math.sqrt(peak / (step + 1)))
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    begin = max(warmup, (1 - settings.decay) * steps) if name == "wsd" else warmup
    progress = min(max((step - begin) / max(steps - begin, 1), 0.0), 1.0)
    if name == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    else:
        assert name in ("linear", "wsd"), f"no schedule is called {name}"
    return 1 - (1 - settings.final) * progress


def average_and_clip(parameters: Iterable[nn.Parameter], n_targets: Tensor | float, clip: float) -> Tensor:
    """Divide summed gradients by `n_targets`, and clip their norm to `clip` (0: no clipping), in place.

    Returns the norm before clipping, on the parameters' device: nothing synchronizes.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient: the loss does not depend on the trainable parameters")
    total = total_norm(gradients)
    if hasattr(total, "full_tensor"):  # of DTensors: over all processes
        total = total.full_tensor()
    # A float stays a float: copying it to a GPU would synchronize.
    share: Tensor | float
    if isinstance(n_targets, Tensor):
        share = 1 / torch.where(n_targets > 0, n_targets, 1)
    else:
        share = 1 / n_targets if n_targets > 0 else 1.0
    norm = total * share
    # As in torch's clip_grad_norm_. With a NaN norm the gradients become NaN, and the step is skipped.
    scale = share * (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else share
    scale_(gradients, scale)
    return norm


def step_if_finite(optimizer: Optimizer, norm: Tensor) -> None:
    """An optimizer step, skipped if the gradient norm is not finite. Fused CUDA optimizers and BatchedMuon check that
    on the GPU (`found_inf`), without synchronizing; for others it is checked here."""
    every = torch_optimizers(optimizer)
    fused = all(isinstance(one, BatchedMuon) or all(g.get("fused") for g in one.param_groups) for one in every)
    if norm.device.type == "cuda" and fused and not is_sharded(norm):
        found_inf = (~torch.isfinite(norm)).float()
        for one in every:
            one.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif math.isfinite(float(norm)):
        optimizer.step()


class EMA:
    """An exponential moving average of the trainable weights: mean += (1 - decay) (weight - mean) after every step.

    The decay is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's moving averages, so that a short training
    does not average in its initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.n_steps = decay, 0
        self.weight: float | Tensor = 1.0  # of the current weights in the next update
        self.weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.means = {n: p.detach().clone() for n, p in self.weights.items()}

    def update(self) -> None:
        """Move the averages towards the current weights, after a step."""
        self.count_step()
        self.move()

    def count_step(self) -> None:
        """Set how far the averages move in the next step."""
        self.n_steps += 1
        weight = 1 - min(self.decay, (1 + self.n_steps) / (10 + self.n_steps))
        self.weight = self.weight.fill_(weight) if isinstance(self.weight, Tensor) else weight

    @torch.no_grad()
    def move(self) -> None:
        """Move the averages as far as `count_step` has set."""
        means: list[Tensor] = list(self.means.values())
        weights: list[Tensor] = list(self.weights.values())
        if isinstance(self.weight, float):
            torch._foreach_lerp_(means, weights, self.weight)
        else:
            differences = torch._foreach_sub(weights, means)
            torch._foreach_mul_(differences, self.weight)
            torch._foreach_add_(means, differences)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages, one parameter at a time."""
        for name, weight in self.weights.items():
            mean = self.means[name]
            kept = weight.clone()  # no second copy of the whole model
            weight.copy_(mean)
            mean.copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name, not copied, and the number of updates."""
        return {**self.means, N_STEPS: torch.tensor(self.n_steps)}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        given, wanted = set(saved), {*self.means, N_STEPS}
        if given != wanted:
            missing, extra = sorted(wanted - given)[:5], sorted(given - wanted)[:5]
            raise ValueError(f"the averaged weights (EMA) are of another model: missing {missing}, extra {extra}")
        for name, mean in self.means.items():
            mean.copy_(shard_like(saved[name], mean))
        self.n_steps = int(saved[N_STEPS])


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state: tensors by "key/parameter", not copied, and its kind as plain data."""
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None:  # SGD without momentum
                continue
            assert isinstance(value, Tensor), f"the state {key} of {names[parameter]} is no tensor"
            found[f"{key}/{names[parameter]}"] = value.detach()
    return found, {"optimizer": _kind(optimizer)}


def load_optimizer_state(
    optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Load what `optimizer_state` returned into an optimizer of the same model; its hyperparameters are kept."""
    if about.get("optimizer") != _kind(optimizer):
        raise ValueError(
            f"the checkpoint is of {about.get('optimizer')}, the recipe asks for {_kind(optimizer)}: "
            "resume with the optimizer it began with"
        )
    parameters = dict(model.named_parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    states: dict[Tensor, dict[str, Tensor]] = {}
    for label, value in saved.items():
        key, _, name = label.partition("/")
        if name not in parameters or parameters[name] not in held:
            raise ValueError(f"the checkpoint has the state of {name!r}, which does not learn in this model")
        states.setdefault(parameters[name], {})[key] = shard_like(value.clone(), parameters[name])
    for one in torch_optimizers(optimizer):
        packed = one.state_dict()
        order = [p for group in one.param_groups for p in group["params"]]
        packed["state"] = {i: states[p] for i, p in enumerate(order) if p in states}
        one.load_state_dict(packed)


def _kind(optimizer: Optimizer) -> str:
    return "+".join(type(one).__name__.lower() for one in torch_optimizers(optimizer))
