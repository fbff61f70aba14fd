"""The logit lens, hidden states by layer, features made of them, and nearest tokens.

B batch, T positions, E width, L layers, K best tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, Model
from heedful.models.heads import MaskedHead
from heedful.nn.embed import nearest
from heedful.nn.head import LanguageHead
from heedful.nn.stack import Stack
from heedful.observe.capture import capture, matching_names
from heedful.observe.names import activation_names, stack_names

# What BERT's authors tried as features (Devlin et al. 2019, table 7); "first" is what enters the first layer.
FEATURES = ("first", "last", "second_to_last", "sum_last_four", "concat_last_four", "sum_all")
MIN_LAYERS = {"second_to_last": 1, "sum_all": 1, "sum_last_four": 4, "concat_last_four": 4}  # layers


@dataclass(frozen=True)
class Lens:
    """The likeliest tokens after every layer; row 0 is the input of the first layer, the last row the output."""

    layers: list[str]
    ids: Tensor  # (L, T, K), best first
    probabilities: Tensor  # (L, T, K)
    final: Tensor  # (L, T): the probability after each layer of the token that is likeliest at the output
    entropy: Tensor  # (L, T), in bits


@torch.no_grad()
def logit_lens(model: Model, batch: Batch, k: int = 5) -> Lens:
    """The logit lens (nostalgebraist 2020): final norm and head on the residual stream of row 0 after each layer."""
    stack, head = getattr(model, stack_names(model)[-1], None), getattr(model, "head", None)
    if not isinstance(stack, Stack) or not isinstance(head, LanguageHead | MaskedHead):
        raise ValueError(f"the logit lens needs blocks and a head over a vocabulary; this {model.family} has not both")
    places = _residual_stream(model)
    with capture(model, [*places, "logits"]) as acts:
        model(batch)
    norm = stack.norm if stack.norm is not None else nn.Identity()
    last = acts["logits"][0].float()  # (T, V)
    best = last.argmax(dim=-1, keepdim=True)
    ids, chances, final, spread = [], [], [], []
    for place in places:
        logits = last if place == places[-1] else head(norm(acts[place][0])).float()
        chance = logits.softmax(dim=-1)
        top = chance.topk(min(k, chance.shape[-1]), dim=-1)
        ids.append(top.indices)
        chances.append(top.values)
        final.append(chance.gather(-1, best)[:, 0])
        spread.append(-(chance * chance.clamp(min=1e-30).log2()).sum(dim=-1))
    layers = ["in", *(str(i) for i in range(len(places) - 1))]
    stacked = [torch.stack(x).cpu() for x in (ids, chances, final, spread)]
    return Lens(layers, *stacked)


def _residual_stream(model: Model, stack_name: str | None = None) -> list[str]:
    """The activation names of the residual stream: before the first layer, and after each."""
    stack_name = stack_name or stack_names(model)[-1]
    known = list(activation_names(model))
    if not any(name.endswith(".after") and name.startswith(stack_name) for name in known):
        raise ValueError(f"a {model.family} model has no layers: nothing changes its embeddings")
    after = matching_names(known, f"{stack_name}.*.after")
    first = f"{stack_name}.0.before"
    return [first if first in known else f"{stack_name}.embeddings", *after]


@torch.no_grad()
def hidden_states(model: Model, batch: Batch, stack_name: str | None = None) -> Tensor:
    """The hidden states by layer (L + 1, B, T, E): the input of the first layer, then the output of each."""
    places = _residual_stream(model, stack_name or stack_names(model)[0])
    with capture(model, places) as acts:
        model(batch)
    found = [acts[place] for place in places]
    if len({x.shape for x in found}) > 1:  # a recurrent model's embeddings are not as wide as its state
        found = found[1:]
    return torch.stack(found).float()


def features(model: Model, batch: Batch, which: str = "last") -> Tensor:
    """A feature vector for each token (B, T, E), or (B, T, 4 E) of "concat_last_four"; see `combine_layers`."""
    return combine_layers(hidden_states(model, batch), which)


def combine_layers(layers: Tensor, which: str) -> Tensor:
    """One of FEATURES, or the output of a layer by its number, from hidden states by layer (L + 1, ..., E)."""
    n_layers = len(layers) - 1
    if which.isdecimal():
        if int(which) >= n_layers:
            raise ValueError(f"there is no layer {which}: this model has 0 to {n_layers - 1}")
        return layers[int(which) + 1]
    if which not in FEATURES:
        raise ValueError(f"features can be {', '.join(FEATURES)} or the number of a layer, not {which!r}")
    if n_layers < MIN_LAYERS.get(which, 0):
        raise ValueError(f"{which} needs {MIN_LAYERS[which]} layers, and of this model {n_layers} can be seen")
    made = {
        "first": lambda: layers[0],
        "last": lambda: layers[-1],
        "second_to_last": lambda: layers[-2],
        "sum_last_four": lambda: layers[-4:].sum(dim=0),
        "concat_last_four": lambda: torch.cat(list(layers[-4:].flip(0)), dim=-1),
        "sum_all": lambda: layers[1:].sum(dim=0),
    }
    return made[which]()


def embedding_matrix(model: Model, stack_name: str | None = None) -> Tensor:
    """The token embeddings (V, E) of the encoder or decoder, the first of them unless given."""
    own = {"encoder": "source_embed", "decoder": "target_embed"}[stack_name or stack_names(model)[0]]
    table = getattr(model, own, None) or getattr(model, "embed", None)
    weight = getattr(table, "weight", None)
    if not isinstance(table, nn.Module) or weight is None:
        raise ValueError(f"a {model.family} model has no embeddings of tokens")
    return table(torch.arange(len(weight), device=model.device)).detach().float()


def nearest_tokens(
    model: Model, vector: Tensor, k: int = 10, *, stack_name: str | None = None
) -> list[tuple[int, float]]:
    """The tokens with the highest cosine similarity to a vector (E,), and the similarities, best first."""
    rows = embedding_matrix(model, stack_name)
    if vector.shape != rows.shape[1:]:
        raise ValueError(f"a vector of {tuple(vector.shape)}, and the embeddings have {rows.shape[1]} dimensions")
    ids, cosines = nearest(rows, vector.to(rows), min(k, len(rows)))
    return list(zip(ids.tolist(), cosines.tolist(), strict=True))
