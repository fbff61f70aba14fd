"""Attention weights, rollout, alignment, entropy, and the importance of heads by ablation.

T target, S source, H heads, L layers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from heedful.models.base import Batch, Model
from heedful.observe.capture import Edit, capture, matching_names
from heedful.observe.inputs import ModelInput
from heedful.observe.interventions import mean_ablation, zero_ablation
from heedful.observe.names import activation_names, stack_names

Kind = Literal["encoder", "decoder", "cross"]
ABLATIONS: dict[str, Callable[[list[int]], Edit]] = {"zero": zero_ablation, "mean": mean_ablation}


def attention_kinds(model: Model) -> list[Kind]:
    """The kinds of attention that a model has: self-attention of its encoder or decoder, and cross-attention."""
    known, found = list(activation_names(model)), list[Kind]()
    for stack_name in stack_names(model):
        if any(name.startswith(f"{stack_name}.") and name.endswith(".self.weights") for name in known):
            found.append(stack_name)  # type: ignore[arg-type]
    return [*found, *(["cross"] if any(name.endswith(".cross.weights") for name in known) else [])]  # type: ignore[list-item]


def name_pattern(model: Model, kind: Kind | None = None, what: str = "weights") -> str:
    """The pattern of the activation names of one kind of attention, by default the last of `attention_kinds`."""
    has = attention_kinds(model)
    if not has:
        raise ValueError(f"a {model.family} model of this kind has no attention to look at")
    kind = kind or has[-1]
    if kind not in has:
        raise ValueError(f"this model has no {kind} attention: it has {', '.join(has)}")
    return f"decoder.*.cross.{what}" if kind == "cross" else f"{kind}.*.self.{what}"


@torch.no_grad()
def attention_weights(
    model: Model, inputs: ModelInput, kind: Kind | None = None, layer: int | None = None
) -> dict[str, Tensor]:
    """The attention weights (H, T, S) of every layer or one, by activation name."""
    which = name_pattern(model, kind)
    found = matching_names(list(activation_names(model)), which)
    if layer is not None:
        found = [found[_checked_index(layer, len(found))]]
    with capture(model, found) as acts:
        model(inputs.batch)
    return {name: acts[name][0].float().cpu() for name in found}


def axis_labels(inputs: ModelInput, name: str) -> tuple[list[str], list[str]]:
    """The tokens of the rows (queries) and the columns (keys) of attention weights with this activation name."""
    stack_name = name.split(".")[0]
    if ".cross." in name:
        return inputs.targets or inputs.tokens, inputs.source
    return inputs.labels(stack_name), inputs.labels(stack_name)


def rollout(weights: Tensor, *, residual: float = 0.5) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020, section 3): the share of each input (column) in each position (row).

    Weights (L, H, T, T) -> (L, T, T), after each layer: the mean over heads, plus the identity for the `residual`
    connection, multiplied over the layers. Rows sum to 1.
    """
    if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
        raise ValueError(f"rollout takes the self-attention (layers, heads, T, T), not {tuple(weights.shape)}")
    step = (1 - residual) * weights.mean(dim=1) + residual * torch.eye(weights.shape[-1]).to(weights)
    step = step / step.sum(dim=-1, keepdim=True)
    so_far, found = torch.eye(weights.shape[-1]).to(weights), []
    for layer in step:
        so_far = layer @ so_far
        found.append(so_far)
    return torch.stack(found)


def attention_rollout(model: Model, inputs: ModelInput, stack_name: str | None = None) -> Tensor:
    """`rollout` of the self-attention over an input, (L, T, T)."""
    has = [kind for kind in attention_kinds(model) if kind != "cross"]
    if not has:
        raise ValueError(f"a {model.family} model has no self-attention to roll out")
    kind = stack_name or has[-1]
    return rollout(torch.stack(list(attention_weights(model, inputs, kind).values())))  # type: ignore[arg-type]


def alignment(model: Model, inputs: ModelInput, layer: int | None = None, head: int | None = None) -> Tensor:
    """The alignment of target and source, (T, S): cross-attention weights, the mean over heads and layers unless one is
    chosen.

    Row t has the weights with which target t was predicted; of a recurrent model, those of Bahdanau et al. 2015.
    """
    if "cross" not in attention_kinds(model):
        raise ValueError(
            f"a {model.family} model of this kind looks at no source: only encoder-decoders with attention do"
        )
    found = torch.stack(list(attention_weights(model, inputs, "cross", layer).values()))  # (L, H, T, S)
    if head is not None:
        return found[:, _checked_index(head, found.shape[1], "head")].mean(dim=0)
    return found.mean(dim=(0, 1))


@torch.no_grad()
def head_importance(
    model: Model, batch: Batch, kind: Kind | None = None, *, ablation: Literal["zero", "mean"] = "zero"
) -> Tensor:
    """Head importance by ablation, (L, H): how far the output distribution moves without each head.

    The mean over positions of KL(with || without) in nats, from one forward pass per head (Michel et al. 2019 take the
    loss). The head's output is replaced by zero, or by its mean over positions.
    """
    places = matching_names(list(activation_names(model)), name_pattern(model, kind, "heads"))
    if ablation not in ABLATIONS:
        raise ValueError(f"ablation is {ablation!r}: zero and mean are known")
    n_heads = int(activation_names(model)[places[0]][1])
    scores = torch.zeros(len(places), n_heads)
    with capture(model, edit={place: lambda x: x for place in places}):  # the same arithmetic on both sides
        whole = _log_probabilities(model, batch)
    for layer, place in enumerate(places):
        for head in range(n_heads):
            same: dict[str, Edit] = {other: lambda x: x for other in places if other != place}
            with capture(model, edit={**same, place: ABLATIONS[ablation]([head])}):
                without = _log_probabilities(model, batch)
            scores[layer, head] = (whole.exp() * (whole - without)).nansum(dim=-1).mean().clamp(min=0)
    return scores


def _log_probabilities(model: Model, batch: Batch) -> Tensor:
    logits = model(batch).logits
    if logits is None:
        raise ValueError("this model has no head: nothing tells how far its output moves")
    flat = logits.float().log_softmax(dim=-1).flatten(0, -2)
    lengths = batch.lengths
    if lengths is not None and logits.ndim == 3:
        flat = flat[(torch.arange(logits.shape[1], device=lengths.device) < lengths[:, None]).flatten()]
    return flat


def attention_entropy(weights: Tensor) -> Tensor:
    """The entropy of attention weights in bits, (..., T, S) -> (...), the mean over queries; 0: all on one key."""
    bits = -(weights * weights.clamp(min=1e-30).log2()).sum(dim=-1)
    return bits.mean(dim=-1)


def _checked_index(index: int, count: int, what: str = "layer") -> int:
    if not -count <= index < count:
        raise ValueError(f"there is no {what} {index}: this model has 0 to {count - 1}")
    return index % count
