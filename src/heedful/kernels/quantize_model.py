"""The linear layers of a model's blocks rounded to int4 by GPTQ, with the inputs that a calibration text gives them.

    quantize_blocks(model, batches)      then save(model, folder, quantize="int4"), or accelerate(..., precision="int4")

The blocks of a stack are processed in order, and in a block the layers in the order in which they run: the inputs of
each come from layers that are quantized already, and it compensates for their errors too (kernels/gptq.py). An encoder
comes before its decoder. In memory beside the model: for all batches the activations between two blocks, of the
quantized and of the unquantized model; a copy of one block; the second moments of the layers that share an input.

Experts are given other tokens when the router's inputs change, so theirs are not compared with the unquantized model's.
Layers are left to be rounded to the nearest if their inputs are not whole groups, or if they are experts to which no
token was sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heedful.kernels import options
from heedful.kernels.gptq import gptq
from heedful.kernels.quantize import GROUP, keep_integers
from heedful.models.base import Batch, Model
from heedful.nn.block import Block
from heedful.nn.feedforward import MixtureOfExperts
from heedful.nn.lora import refuse_adapted
from heedful.nn.stack import Stack

Arguments = tuple[Any, ...]  # of a block: x (B, T, E), and what all blocks are given alike


@dataclass
class CalibrationReport:
    """The layers whose rounding errors were compensated, and those that are left to be rounded to the nearest."""

    n_inputs: int = 0  # of a layer, at most
    compensated: list[str] = field(default_factory=list)
    nearest: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = f"{len(self.compensated)} layers were rounded with {self.n_inputs:,} inputs"
        return f"{told}, {len(self.nearest)} to the nearest: {', '.join(self.nearest)}" if self.nearest else told


@torch.no_grad()
def quantize_blocks(model: Model, batches: Sequence[Batch]) -> CalibrationReport:
    """Round the linear layers of a model's blocks to int4 by GPTQ, in place, with the inputs of these batches.

    The parameters become the dequantized numbers and keep the integers (`keep_integers`) for kernels and files.
    """
    refuse_adapted(model, "quantized")
    if not batches:
        raise ValueError("there is no text to calibrate on")
    was_training, names = model.training, {module: name for name, module in model.named_modules()}
    model.eval()
    report = CalibrationReport()
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        given = _arguments_of(stack, model, batches)
        unquantized = list(given)
        for block in stack.blocks:
            assert isinstance(block, Block)
            original = copy.deepcopy(block)
            for layers in _by_input(block, given[0], report, names):
                pairs = zip(given, unquantized, strict=True)
                _quantize(layers, _moments(block, original, layers, pairs), report, names)
            given = [(block(*arguments), *arguments[1:]) for arguments in given]
            unquantized = [(original(*arguments), *arguments[1:]) for arguments in unquantized]
    model.train(was_training)
    if not report.compensated:
        raise ValueError(f"a {model.family} model has no linear layers in blocks that could be calibrated")
    return report


class _Reached(Exception):
    """A forward pass has come to where its inputs are wanted."""


def _arguments_of(stack: Stack, model: Model, batches: Iterable[Batch]) -> list[Arguments]:
    """The arguments of a stack's first block for every batch."""
    found: list[Arguments] = []

    def stop(_: nn.Module, given: Arguments) -> None:
        found.append(given)
        raise _Reached

    hook = stack.blocks[0].register_forward_pre_hook(stop)
    try:
        for batch in batches:
            try:
                model(batch)
            except _Reached:
                pass
    finally:
        hook.remove()
    return found


@contextmanager
def _inputs(layers: Iterable[nn.Module], function: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Within, the function is called with each of the layers and its input whenever it runs."""
    hooks = [layer.register_forward_pre_hook(lambda layer, given: function(layer, given[0])) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_input(
    block: Block, given: Arguments, report: CalibrationReport, names: dict[nn.Module, str]
) -> list[list[nn.Module]]:
    """The linear layers in the order in which they run, those with the same input together, and all experts' at the
    end. Those whose inputs are not whole groups go to the report instead."""
    linear = [m for m in block.modules() if options.is_linear(m)]
    routers = [m.router for m in block.modules() if isinstance(m, MixtureOfExperts)]
    linear = [m for m in linear if m not in routers]
    report.nearest += [names[m] for m in linear if m.in_features % GROUP]  # type: ignore[operator]
    linear = [m for m in linear if m.in_features % GROUP == 0]  # type: ignore[operator]
    experts = [m for m in linear if m in _experts(block)]
    found: list[list[nn.Module]] = []
    last: list[Tensor] = []

    def note(layer: nn.Module, x: Tensor) -> None:
        if not last or x is not last[0]:
            found.append([])
            last[:] = [x]
        found[-1].append(layer)

    with _inputs([m for m in linear if m not in experts], note):
        block(*given)
    return [*found, experts] if experts else found


def _experts(block: Block) -> set[nn.Module]:
    return {m for mixture in block.modules() if isinstance(mixture, MixtureOfExperts) for m in mixture.modules()}


class _Moments:
    """Second moments of a layer's inputs, and of how the unquantized model's deviate from them, summed over batches."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.total = torch.zeros(width, width, device=device)
        self.deviation, self.count = torch.zeros_like(self.total), 0

    def add(self, x: Tensor, original: Tensor | None) -> None:
        x = x.flatten(0, -2).float()
        self.total.addmm_(x.T, x)
        self.count += len(x)
        if original is not None:
            self.deviation.addmm_((original.flatten(0, -2).float() - x).T, x)


def _moments(
    block: Block, original: Block, layers: Sequence[nn.Module], pairs: Iterable[tuple[Arguments, Arguments]]
) -> dict[nn.Module, _Moments]:
    """The moments of the layers' inputs in a block; `pairs` are its arguments and those of the original block."""
    paths = {module: name for name, module in block.named_modules()}
    compared = not any(layer in _experts(block) for layer in layers)
    counterpart = {original.get_submodule(paths[layer]): layer for layer in layers if compared}
    found: dict[nn.Module, _Moments] = {}
    originals: dict[nn.Module, Tensor] = {}
    for given, unquantized in pairs:
        with _inputs(counterpart, lambda layer, x: originals.update({counterpart[layer]: x})):
            if compared:
                original(*unquantized)

        def add(layer: nn.Module, x: Tensor) -> None:
            moments = found.setdefault(layer, _Moments(x.shape[-1], x.device))
            moments.add(x, originals.get(layer))

        with _inputs(layers, add):
            block(*given)
    return found


def _quantize(
    layers: Sequence[nn.Module],
    moments: dict[nn.Module, _Moments],
    report: CalibrationReport,
    names: dict[nn.Module, str],
) -> None:
    for layer in layers:
        if layer not in moments:
            report.nearest.append(names[layer])
            continue
        assert isinstance(layer, nn.Linear)
        quantized = gptq(layer.weight, moments[layer].total, moments[layer].deviation)
        layer.weight.data = quantized.dequantize().to(layer.weight)
        keep_integers(layer.weight, quantized)
        report.compensated.append(names[layer])
        report.n_inputs = max(report.n_inputs, moments[layer].count)
