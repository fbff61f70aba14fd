"""One kind of attention of a model on one text, with some tokens masked, and the weights of its layers.

The page names the kinds: "self" is a model's own attention (the decoder's, in an encoder-decoder), "encoder" the
encoder's in an encoder-decoder, "cross" the decoder's to the encoder. Masked tokens are given by their column. A masked
language model then reads [MASK] there; in any other model no position but the token's own attends to it (a recurrent
encoder has still read it).

    H heads, T rows (queries), S columns (keys), L layers
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from heedful.models.base import Batch, Model
from heedful.models.encoder import EncoderModel
from heedful.models.vit import ViT
from heedful.observe import attention as observed
from heedful.observe.capture import Edit, capture, matching_names
from heedful.observe.inputs import ModelInput
from heedful.observe.names import activation_names
from heedful.serve.playground.inspection import Inspector
from heedful.serve.playground.recompute import capture_layer_inputs, recompute_layer, reduce_layers
from heedful.serve.playground.text import model_input, tokens_by_role
from heedful.serve.playground.wire import MAX_TOKENS, Index, PromptRequest, ShortText

AttentionKind = Literal["self", "cross", "encoder"]
MaskedTokens = Annotated[list[Index], Field(max_length=MAX_TOKENS)]
MAX_CACHED_INPUTS = 128 * 2**20  # bytes of the inputs of all layers; of a larger pass only one layer's are cached


class AttentionRequest(PromptRequest):
    """A text, an encoder-decoder's output (by default its own), the kind of attention, and masked tokens."""

    target: ShortText | None = None
    which: AttentionKind | None = None
    masked: MaskedTokens = Field(default=[])


@dataclass(frozen=True)
class AttentionView:
    """One kind of attention on one text, with some tokens masked."""

    inputs: ModelInput
    which: str  # by the page's name
    kinds: list[str]  # what `which` may be for this model
    kind: observed.Kind  # by the library's name
    layers: list[str]  # names of the weights
    n_heads: int
    rows: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    hidden: list[dict[str, Any]]  # the masked tokens themselves
    edits: dict[str, Edit]  # that mask tokens
    key: Hashable

    @property
    def n_weights(self) -> int:
        """Attention weights of all layers and heads."""
        return len(self.layers) * self.n_heads * len(self.rows) * len(self.columns)

    def input_bytes(self, model: Model) -> int:
        """Bytes of the inputs of all attention layers."""
        each = (len(self.rows) + len(self.columns)) * model.config.d_model
        return len(self.layers) * each * next(model.parameters()).element_size()

    def layer_name(self, layer: int) -> str:
        """The name of a layer's weights; ValueError if there is no such layer."""
        if layer >= len(self.layers):
            raise ValueError(f"there is no layer {layer}: this model has 0 to {len(self.layers) - 1}")
        return self.layers[layer]


def requested_view(inspector: Inspector, body: AttentionRequest) -> AttentionView:
    """The view that a request is about, cached."""
    inspector.loaded.require("capture")
    if isinstance(inspector.model, ViT):
        raise ValueError(f"{inspector.loaded.name} reads images: its attention comes with /api/image/classify")
    kinds = available_kinds(inspector)
    which: AttentionKind = body.which if body.which is not None else "self" if "self" in kinds else next(iter(kinds))
    if which not in kinds:
        raise ValueError(f"{inspector.loaded.name} has no {which} attention: it has {', '.join(kinds)}")
    kind, masked = kinds[which], tuple(sorted(set(body.masked)))
    key = (body.text, body.target, which, masked, body.rendered)
    return inspector.cached(("view", key), lambda: _build_view(inspector, body, which, kind, masked, key))


def available_kinds(inspector: Inspector) -> dict[AttentionKind, observed.Kind]:
    """The kinds of attention that a model has, at least one: the library's names by the page's."""
    kinds = attention_kinds(inspector.model)
    if not kinds:
        raise ValueError(f"{inspector.loaded.name} has no attention to look at")
    return kinds


def attention_kinds(model: Model) -> dict[AttentionKind, observed.Kind]:
    """The library's names of a model's kinds of attention by the page's names."""
    has = observed.attention_kinds(model)
    both = "encoder" in has and "decoder" in has
    return {("cross" if kind == "cross" else "encoder" if both and kind == "encoder" else "self"): kind for kind in has}


def attention_layers(model: Model) -> dict[AttentionKind, int]:
    """The number of layers that have each kind of attention; it needs no weights."""
    names = list(activation_names(model))
    return {
        which: len(matching_names(names, observed.name_pattern(model, kind)))
        for which, kind in attention_kinds(model).items()
    }


def _build_view(
    inspector: Inspector,
    body: AttentionRequest,
    which: str,
    kind: observed.Kind,
    masked: tuple[int, ...],
    key: Hashable,
) -> AttentionView:
    model = inspector.model
    inputs = model_input(inspector, body.text, MAX_TOKENS, body.target, rendered=body.rendered)
    source, own, _ = tokens_by_role(inspector, inputs)
    of_source = bool(source) and kind != "decoder"
    count = len(source if of_source else own)
    if masked and masked[-1] >= count:
        raise ValueError(f"there is no token {masked[-1]} to mask: there are 0 to {count - 1}")
    hidden = [(source if of_source else own)[i] for i in masked]
    edits: dict[str, Edit] = {}
    mask_id = None if inspector.tokenizer is None else inspector.tokenizer.mask_id
    if masked and isinstance(model, EncoderModel) and mask_id is not None:
        inputs = replace_with_mask(inputs, masked, mask_id)
    elif masked:
        edits = masking_edits(inspector, masked, kind, count)
        if of_source:  # the generated target may be another
            with capture(model, edit=edits):
                inputs = model_input(inspector, body.text, MAX_TOKENS, body.target, masked, body.rendered)
    source, own, generated = tokens_by_role(inspector, inputs)
    columns = source if of_source else own
    rows = (generated or own) if kind == "cross" else columns
    layers = matching_names(list(activation_names(model)), observed.name_pattern(model, kind))
    n_heads = int(activation_names(model)[layers[0]][1])
    return AttentionView(
        inputs, which, list(available_kinds(inspector)), kind, layers, n_heads, rows, columns, hidden, edits, key
    )


def replace_with_mask(inputs: ModelInput, masked: tuple[int, ...], mask_id: int) -> ModelInput:
    """The same input with [MASK] in some places."""
    ids = [mask_id if i in masked else id for i, id in enumerate(inputs.ids)]
    batch = Batch(torch.tensor([ids], device=inputs.batch.ids.device), segments=inputs.batch.segments)
    return dataclasses.replace(inputs, batch=batch, ids=ids)


def masking_edits(inspector: Inspector, masked: tuple[int, ...], kind: observed.Kind, count: int) -> dict[str, Edit]:
    """Edits of the scores after which no position attends to these tokens, but each of them to itself."""
    if kind == "cross" and len(masked) == count:
        raise ValueError("every token of the source is masked: leave one to look at")
    patterns = {"decoder.*.self.scores": True}
    if kind != "decoder":  # wherever the source is attended to
        patterns = {"encoder.*.self.scores": True, "decoder.*.cross.scores": False}
    if "cross" not in observed.attention_kinds(inspector.model):
        patterns = {f"{kind}.*.self.scores": True}
    known = list(activation_names(inspector.model))
    return {
        pattern: _mask_columns(masked, keep_own)
        for pattern, keep_own in patterns.items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in known)
    }


def _mask_columns(columns: tuple[int, ...], keep_own: bool) -> Edit:
    """An edit that sets these columns of scores (B, H, T, S) to -inf; `keep_own`: except where a token meets itself."""

    def edit(x: Tensor) -> Tensor:
        made, first = x.clone(), x.shape[-1] - x.shape[-2]  # the position of row 0, where keys are cached
        present = [c for c in columns if c < x.shape[-1]]
        made[..., present] = -torch.inf
        for c in present:
            if keep_own and c >= first:
                made[..., c - first, c] = x[..., c - first, c]
        return made

    return edit


# --- the weights of its layers ----------------------------------------------------------------------------------------


def layer_weights(inspector: Inspector, view: AttentionView, layer: int) -> Tensor:
    """The attention weights of a layer (H, T, S), cached."""
    return inspector.cached(
        ("weights", view.key, layer), lambda: layer_activations(inspector, view, layer, "weights")[0]
    )


def layer_activations(inspector: Inspector, view: AttentionView, layer: int, *parts: str) -> list[Tensor]:
    """A layer's queries, keys, scores or weights. The model runs once for all layers of a text."""
    name = view.layer_name(layer)
    cache_all = view.input_bytes(inspector.model) <= MAX_CACHED_INPUTS
    key = ("layer inputs", view.key, None if cache_all else layer)
    layers = view.layers if cache_all else [name]
    with capture(inspector.model, edit=view.edits):
        inputs = inspector.cached(key, lambda: capture_layer_inputs(inspector.model, view.inputs.batch, layers))
        return recompute_layer(inspector.model, inputs, name, parts)


def reduce_all_layers(inspector: Inspector, view: AttentionView, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` of the weights of each layer (H, T, S), stacked: (L, ...)."""
    if len(view.layers) == 1:  # a recurrent decoder computes its weights step by step
        return reduce(layer_activations(inspector, view, 0, "weights")[0])[None]
    edits, found = reduce_layers(reduce, view.layers)
    with capture(inspector.model, edit=view.edits), capture(inspector.model, edit=edits):
        capture_layer_inputs(inspector.model, view.inputs.batch, [])
    return torch.stack([found[name] for name in view.layers])


def generated_text(inspector: Inspector, inputs: ModelInput) -> str | None:
    """The text that an encoder-decoder generated; None for other models."""
    if inputs.batch.source is None:
        return None
    if inspector.tokenizer is None:
        return " ".join(map(str, inputs.target_ids))
    return inspector.tokenizer.target.decode(inputs.target_ids)
