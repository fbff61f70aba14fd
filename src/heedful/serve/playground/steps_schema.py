"""Response models of /api/steps and /api/steps/weights. What the family does not have is null.

T tokens, E width, H heads, D head size, R rotated part of D, F hidden width, V vocabulary, X experts
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heedful.serve.playground.wire import FloatArray, PlaygroundModel, Token


class LayerSteps(PlaygroundModel):
    """The activations of one block, in order: (T, E) unless said otherwise."""

    residual_style: Literal["pre", "post", "parallel"]
    input: FloatArray
    normed: FloatArray | None
    q_raw: FloatArray = Field(description="(H, T, D): the projection, before norm and rotation")
    k_raw: FloatArray = Field(description="(H, T, D)")
    q_normed: FloatArray | None
    k_normed: FloatArray | None
    q: FloatArray = Field(description="(H, T, D)")
    k: FloatArray = Field(description="(H, T, D)")
    v: FloatArray = Field(description="(H, T, D)")
    scores: FloatArray = Field(description="(H, T, T)")
    scale: float
    scaled: FloatArray = Field(description="(H, T, T)")
    softcap: float | None
    masked: FloatArray = Field(description="(H, T, T)")
    weights: FloatArray = Field(description="(H, T, T)")
    heads_out: FloatArray = Field(description="(H, T, D)")
    concatenated: FloatArray
    attention_out: FloatArray
    attention_after: FloatArray | None = Field(description="The output of attention, normed before the sum")
    summed: FloatArray | None = Field(description="Of a post-norm block, what it norms")
    residual: FloatArray | None
    normed2: FloatArray | None
    hidden: FloatArray | None = Field(description="(T, F): the input of the activation")
    gated: FloatArray | None = Field(description="(T, F): what the activation is multiplied by")
    activated: FloatArray | None = Field(description="(T, F)")
    shares: FloatArray | None = Field(description="(T, X): the weight of each expert")
    answers: FloatArray | None = Field(description="(X, T, E): the output of each expert")
    feedforward_out: FloatArray
    feedforward_after: FloatArray | None
    summed2: FloatArray | None
    output: FloatArray


class WordMerges(PlaygroundModel):
    """A word, and its pieces at first and after each merge of byte pair encoding."""

    word: str
    steps: list[list[str]]


class RotaryAngles(PlaygroundModel):
    """The rotary embedding of each position."""

    cos: FloatArray = Field(description="(T, R/2)")
    sin: FloatArray = Field(description="(T, R/2)")
    layout: Literal["halves", "interleaved"]


class StepsResponse(PlaygroundModel):
    """Every activation of a forward pass."""

    tokens: list[Token]
    merges: list[WordMerges] | None
    embeddings: FloatArray
    positions: FloatArray | None
    rotation: RotaryAngles | None
    layers: list[LayerSteps]
    final: FloatArray
    logits: list[float] = Field(description="Of the last position")
    vocabulary: list[Token]


class LinearParameters(PlaygroundModel):
    """A linear map."""

    weight: FloatArray = Field(description="(outputs, inputs)")
    bias: FloatArray | None


class HeadParameters(LinearParameters):
    """The language-model head."""

    scale: float | None
    softcap: float | None


class NormParameters(PlaygroundModel):
    """A layer norm, or an RMS norm."""

    kind: Literal["layer", "rms"]
    gain: FloatArray | None
    shift: FloatArray | None
    eps: float


class LayerParameters(PlaygroundModel):
    """The parameters of one block."""

    attention_norm: NormParameters | None
    query: LinearParameters
    key: LinearParameters
    value: LinearParameters
    query_norm: NormParameters | None
    key_norm: NormParameters | None
    output: LinearParameters
    attention_after: NormParameters | None
    feedforward_norm: NormParameters | None
    act: str | None
    gate: LinearParameters | None
    up: LinearParameters | None
    down: LinearParameters | None
    router: LinearParameters | None
    feedforward_after: NormParameters | None


class ParametersResponse(PlaygroundModel):
    """All learned parameters of a small decoder."""

    embedding: FloatArray = Field(description="(V, E)")
    embedding_scale: float | None
    positions: FloatArray | None
    layers: list[LayerParameters]
    norm: NormParameters | None
    head: HeadParameters
