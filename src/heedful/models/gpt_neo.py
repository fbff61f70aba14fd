"""GPT-Neo (Black et al. 2021): the replication of GPT-3 that published weights.

GPT-2's decoder in which layers with global and with local attention alternate: a local one sees the last `window`
positions. Scores are not divided by √d_head, and of the attention's projections only the output has a bias.

    B batch, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import DecoderConfig
from heedful.models.hub import HubLayout
from heedful.models.mapping import WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.position import Learned
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState


@dataclass(frozen=True)
class GPTNeoConfig(DecoderConfig):
    """GPT-Neo's settings; the defaults are those of the 1.3B model."""

    d_model: int = 2048
    n_layers: int = 24
    n_heads: int = 16
    d_ff: int | None = None  # 4 x d_model unless given
    vocab_size: int = 50257
    max_len: int = 2048
    pattern: tuple[str, ...] = ("global", "local")  # the layers' attention, repeated up to n_layers
    window: int = 256  # of the local layers
    act: str = "gelu_new"
    norm_eps: float = 1e-5
    tied: bool = True  # the head's matrix is the embedding
    dropout: float = 0.0
    embed_dropout: float | None = None  # `dropout` unless given
    attention_dropout: float | None = None  # `dropout` unless given

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.pattern) - {"global", "local"}
        if unknown or not self.pattern:
            raise ValueError(f"pattern {list(self.pattern)} must be made of 'global' and 'local'")
        if self.n_layers % len(self.pattern):
            raise ValueError(f"{self.n_layers} layers are not a multiple of pattern {list(self.pattern)}")
        if self.window < 1:
            raise ValueError(f"window is {self.window}: a local layer sees at least its own position")


class GPTNeo(DecoderModel):
    """Token and position embeddings, blocks with global and local attention, a last norm, the head."""

    family = "gpt_neo"
    config_class = GPTNeoConfig
    config: GPTNeoConfig

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__(config)
        c = config
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.position = Learned(c.max_len, c.d_model)
        self.dropout = nn.Dropout(c.dropout if c.embed_dropout is None else c.embed_dropout)
        self.decoder = Stack(
            [self._block(c, c.pattern[i % len(c.pattern)]) for i in range(c.n_layers)],
            causal=True,
            norm=nn.LayerNorm(c.d_model, c.norm_eps),
        )
        self.head = self.choose_head(tied=self.embed.weight if c.tied else None)

    @staticmethod
    def _block(c: GPTNeoConfig, kind: str) -> Block:
        attention = Attention(
            c.d_model,
            c.n_heads,
            bias=False,
            output_bias=True,
            scale=1.0,
            window=c.window if kind == "local" else None,
            dropout=c.dropout if c.attention_dropout is None else c.attention_dropout,
        )
        feedforward = FeedForward(c.d_model, c.d_ff or 4 * c.d_model, c.act)
        norms = Norms(nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps))
        return PreNormBlock(attention, feedforward, norms, dropout=c.dropout)

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens and positions embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids) + self.position(positions))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)


# --- the hub's names -------------------------------------------------------------------------------------------------


class GPTNeoLayout(HubLayout):
    """`gpt_neo` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "hidden_size",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_len": "max_position_embeddings",
        "window": "window_size",
        "act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
    }
    dropouts: Mapping[str, str] = {
        "dropout": "resid_dropout",
        "embed_dropout": "embed_dropout",
        "attention_dropout": "attention_dropout",
    }

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """`attention_types` is a list of [kinds, repetitions]; we keep the shortest pattern that repeats."""
        read = super().read(hub)
        if hub.get("attention_types") is not None:
            kinds = [kind for some, times in hub["attention_types"] for kind in some * times]
            n_layers = read.get("n_layers", GPTNeoConfig.n_layers)
            if len(kinds) != n_layers:
                raise ValueError(f"attention_types describes {len(kinds)} layers of {n_layers}")
            read["pattern"] = _shortest_period(kinds)
        return read

    def write(self, config: GPTNeoConfig) -> dict[str, Any]:
        """The settings in `names`, and the pattern as `attention_types`."""
        types = [[list(config.pattern), config.n_layers // len(config.pattern)]]
        return super().write(config) | {"attention_types": types}

    def weight_map(self, model: GPTNeo) -> WeightMap:
        """The names of the tensors; buffers with masks and the tied head are ignored."""
        ours, theirs = "decoder.blocks.{}.", "transformer.h.{}."
        return WeightMap(
            [
                rule("embed", "transformer.wte"),
                rule("position", "transformer.wpe"),
                rule(ours + "attention_norm", theirs + "ln_1"),
                rule(ours + "attention.query", theirs + "attn.attention.q_proj"),
                rule(ours + "attention.key", theirs + "attn.attention.k_proj"),
                rule(ours + "attention.value", theirs + "attn.attention.v_proj"),
                rule(ours + "attention.output", theirs + "attn.attention.out_proj"),
                rule(ours + "feedforward_norm", theirs + "ln_2"),
                rule(ours + "feedforward.up", theirs + "mlp.c_fc"),
                rule(ours + "feedforward.down", theirs + "mlp.c_proj"),
                rule("decoder.norm", "transformer.ln_f"),
                rule("head", "lm_head"),
                rule("head.classifier", "score"),
            ],
            prefix="transformer.",
            ignored=(r"\.attention\.(masked_)?bias$", *([r"^lm_head\.weight$"] if model.config.tied else [])),
        )


def _shortest_period(kinds: list[str]) -> tuple[str, ...]:
    for n in range(1, len(kinds)):
        if len(kinds) % n == 0 and kinds[:n] * (len(kinds) // n) == kinds:
            return tuple(kinds[:n])
    return tuple(kinds)


GPTNeoConfig.hub = GPTNeoLayout(GPTNeoConfig)
