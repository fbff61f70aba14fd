"""Parameter-efficient fine-tuning: LoRA and QLoRA adapters, the head alone, or parameters chosen by patterns.

    none     everything
    lora     low-rank adapters on the linear layers that `targets` names (Hu et al. 2021; nn/lora.py); what
             `trainable` names, a new head for example, is trained in full
    qlora    the same, with the adapted weights in 4 bits (Dettmers et al. 2023)
    head     the head on the last hidden states only
    freeze   only what `trainable` names

A pattern is a shell pattern for the name of a parameter or module, for the end of it, or for a containing module:
"attention.query", "feedforward.*", "decoder.blocks.11", "*norm*". Without targets every linear layer of the blocks is
adapted, which the QLoRA paper found to be what full fine-tuning's quality takes (section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from heedful.kernels.accelerate import packed_precision
from heedful.models.base import Model
from heedful.nn.block import Block
from heedful.nn.feedforward import MixtureOfExperts
from heedful.nn.lora import LoRALinear, adapted, merge, replace_module
from heedful.train.recipe import AdapterSettings
from heedful.weights.save_adapter import adapter_contents

__all__ = ["LoRALinear", "adapt", "adapted", "merge"]


def adapt(model: Model, settings: AdapterSettings) -> list[str]:
    """Add adapters or freeze parameters in place; returns the names of adapted layers, or of trainable parameters.

    New weights are drawn from torch's default generator: seed it before.
    """
    if (precision := packed_precision(model)) is not None:
        raise ValueError(f"the weights are packed as {precision} and cannot learn: load the model anew")
    if adapted(model):
        raise ValueError("the model has adapters already: merge them first, or go on training those")
    match settings.kind:
        case "none":
            return [name for name, p in model.named_parameters() if p.requires_grad]
        case "lora" | "qlora":
            return _add_lora(model, settings)
        case "head":
            return _only(model, _head(model))
        case "freeze":
            if not settings.trainable:
                raise ValueError("freezing all of the model leaves nothing to learn: name what `trainable` is")
            return _only(model, match_patterns(settings.trainable, _parameters(model), "parameter"))
    raise ValueError(f"no adapter is called {settings.kind!r}: none, lora, qlora, head and freeze are")


def _add_lora(model: Model, settings: AdapterSettings) -> list[str]:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    names = match_patterns(settings.targets, linear, "linear layer") if settings.targets else default_targets(model)
    if not linear:
        raise ValueError(f"this {model.family} model has no linear layers to adapt: freeze a part of it instead")
    if not names:
        raise ValueError(
            f"a {model.family} model has no blocks whose layers are adapted: name `targets` among {_some(linear)}"
        )
    free = match_patterns(settings.trainable, _parameters(model), "parameter")
    both = [n for n in free if n.rpartition(".")[0] in names]
    if both:
        raise ValueError(f"{_some(both)} cannot both be adapted and learn in full: take it from one of the two")
    _only(model, free)
    for name in names:
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        layer = LoRALinear(base, settings.rank, settings.alpha, settings.dropout, quantized=settings.kind == "qlora")
        replace_module(model, name, layer.train(base.training))
    adapter_contents(model)  # raises now, and not after training, if the adapter could not be saved
    return names


def default_targets(model: nn.Module) -> list[str]:
    """The names of all linear layers of the blocks except routers."""
    routers = {m.router for m in model.modules() if isinstance(m, MixtureOfExperts)}
    inside = {m for block in model.modules() if isinstance(block, Block) for m in block.modules()}
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m in inside and m not in routers]


def match_patterns(patterns: Sequence[str], names: Iterable[str], what: str) -> list[str]:
    """The names that some pattern matches, in their order; a pattern that matches none is an error."""
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        some = [name for name in names if _matches(pattern, name)]
        if not some:
            raise ValueError(f"no {what} is called {pattern!r}: there are {_some(names)}")
        found.update(some)
    return [name for name in names if name in found]


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name, the end of it, or a module that contains it."""
    parts = name.split(".")
    inside = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return any(fnmatchcase(part, pattern) or fnmatchcase(part, f"*.{pattern}") for part in inside)


def _head(model: Model) -> list[str]:
    names = [name for name in _parameters(model) if name.startswith("head.")]
    tied = {id(p) for name, p in model.named_parameters() if not name.startswith("head.")}
    if any(id(p) in tied for p in getattr(model, "head", nn.Identity()).parameters()):
        raise ValueError(
            f"the head of this {model.family} model is its table of embeddings too, so it cannot learn alone: "
            'use "freeze", with what shall learn in `trainable`'
        )
    if not names:
        raise ValueError(f"this {model.family} model has no head")
    return names


def _parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _only(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Make only these parameters trainable."""
    chosen = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return list(names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
