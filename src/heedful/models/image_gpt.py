"""Image GPT (Chen et al. 2020): an image as a sequence of colours, learned like text.

`find_clusters` chooses a palette by k-means, `quantize` replaces each pixel by the id of its nearest colour, row by
row, and `to_image` turns the ids back into colours. The decoder is GPT-2's with a norm that does not subtract the mean,
a sigmoid GELU and an untied head; the last token of the vocabulary starts an image and is never predicted. The palette
is not in its weights but beside them, as on the hub: `clusters` of preprocessor_config.json.

    B batch, C channels, N pixels of an image, T positions, K colours, E model width
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel
from heedful.models.config import Config
from heedful.models.hub import HubLayout
from heedful.models.mapping import Fuse, Transpose, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.dtype import widest_float
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.position import Learned
from heedful.nn.stack import Stack
from heedful.nn.state import KeyValueState

MOST_GREYS = 256  # a larger palette without a file of it is one of colours


@dataclass(frozen=True)
class ImageGPTConfig(Config):
    """Image GPT's settings; the defaults are those of iGPT-S."""

    d_model: int = 512
    n_layers: int = 24
    n_heads: int = 8
    d_ff: int | None = None  # 4 x d_model unless given
    vocab_size: int = 513  # the colours and the start token
    max_len: int = 1024  # pixels of an image
    act: str = "quick_gelu"
    norm_eps: float = 1e-5
    dropout: float = 0.1
    embed_dropout: float | None = None  # `dropout` unless given
    attention_dropout: float | None = None  # `dropout` unless given


class ImageGPT(DecoderModel):
    """GPT-2's decoder over the colours of an image's pixels."""

    family = "image_gpt"
    config_class = ImageGPTConfig
    config: ImageGPTConfig
    abilities = ("generate", "stream", "complete_image", "capture")  # no "fill", no "embed": it has no text

    def __init__(self, config: ImageGPTConfig) -> None:
        super().__init__(config)
        c = config
        if c.vocab_size < 2:
            raise ValueError("a vocabulary of one is the start token alone: there must be colours too")
        self.embed = Embedding(c.vocab_size, c.d_model)
        self.position = Learned(c.max_len, c.d_model)
        self.dropout = nn.Dropout(c.dropout if c.embed_dropout is None else c.embed_dropout)
        self.decoder = Stack(
            [self._block(c) for _ in range(c.n_layers)], causal=True, norm=RMSNorm(c.d_model, c.norm_eps)
        )
        self.head = LanguageHead(c.d_model, c.vocab_size - 1)

    @staticmethod
    def _block(c: ImageGPTConfig) -> Block:
        dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
        return PreNormBlock(
            Attention(c.d_model, c.n_heads, dropout=dropout),
            FeedForward(c.d_model, c.d_ff or 4 * c.d_model, c.act),
            Norms(RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps)),
            dropout=c.dropout,
        )

    def hidden(self, batch: Batch, state: KeyValueState | None = None) -> Tensor:
        """The last hidden states (B, T, E): tokens and positions embedded, then the blocks and the last norm."""
        positions = self.positions(batch, state)  # (B or 1, T)
        x = self.dropout(self.embed(batch.ids) + self.position(positions))  # (B, T, E)
        return self.decoder(x, positions, state=state, lengths=batch.lengths, documents=batch.documents)  # (B, T, E)

    @property
    def start_id(self) -> int:
        """The token that starts an image: the last of the vocabulary."""
        return self.config.vocab_size - 1

    @property
    def palette(self) -> Tensor:
        """The colours (K, C) from -1 to 1; levels of grey where the model's files have none, as they are few."""
        n = self.config.vocab_size - 1
        given = self.preprocessor.get("clusters")
        if given is None and n <= MOST_GREYS:
            return torch.linspace(-1, 1, n)[:, None]
        try:
            found = torch.tensor(given, dtype=torch.float32)
        except (TypeError, ValueError):
            found = torch.empty(0)
        if found.ndim != 2 or len(found) != n or not 1 <= found.shape[1] <= 4 or not bool(found.isfinite().all()):
            raise ValueError(f"the palette of {n} colours (clusters in preprocessor_config.json) is not in its files")
        return found

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an image: those in the model's files, else a square."""
        size = self.preprocessor.get("size")
        if isinstance(size, dict) and type(size.get("height")) is int and size["height"] > 0:
            height: int = size["height"]
        else:
            height = math.isqrt(self.config.max_len)
        return height, self.config.max_len // height

    def prompt(self, ids: Tensor) -> Batch:
        """The first pixels (B, N) of images, N may be 0, ready to be continued."""
        first = torch.full((len(ids), 1), self.start_id, dtype=ids.dtype, device=ids.device)
        return Batch(torch.cat([first, ids], dim=1))

    def training_batch(self, ids: Tensor) -> Batch:
        """A training batch of whole images (B, N): tokens are the start token and all pixels but the last, targets
        are the pixels."""
        return Batch(self.prompt(ids[:, :-1]).tokens, targets=ids)

    def features(self, batch: Batch, layer: int) -> Tensor:
        """A vector per image (B, E) for a linear probe: the mean over the pixels of layer `layer`'s input after its
        attention norm (section 2.4); `n_layers` means the last norm's output. The middle layers are the best."""
        norms = [block.get_submodule("attention_norm") for block in self.decoder.blocks]
        norms.append(self.decoder.get_submodule("norm"))
        if not 0 <= layer < len(norms):
            raise ValueError(f"layer {layer}: this model has 0 to {len(norms) - 1}")
        kept: list[Tensor] = []
        hook = norms[layer].register_forward_hook(lambda _module, _inputs, out: kept.append(out))
        try:
            self.hidden(batch)
        finally:
            hook.remove()
        return kept[0].mean(dim=1)

    def init_weights(self) -> None:
        """As in GPT-2, but the head begins at 0."""
        super().init_weights()
        for name, p in self.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layers))
        nn.init.zeros_(self.head.get_parameter("weight"))


def quantize(images: Tensor, clusters: Tensor) -> Tensor:
    """Images (B, C, height, width) -> ids (B, N) of the nearest of the colours (K, C), row by row."""
    if images.ndim != 4 or images.shape[1] != clusters.shape[1]:
        raise ValueError(
            f"images {list(images.shape)} are not (batch, channels, height, width) with the colours' "
            f"{clusters.shape[1]} channels"
        )
    pixels = images.permute(0, 2, 3, 1).reshape(-1, clusters.shape[1])
    return _nearest(pixels, clusters).view(len(images), -1)


def to_image(ids: Tensor, clusters: Tensor, *, height: int | None = None) -> Tensor:
    """Ids (B, N) -> images (B, C, height, width) in the palette's colours; square unless a height is given."""
    n = ids.shape[1]
    height = math.isqrt(n) if height is None else height
    if height < 1 or n % height:
        raise ValueError(f"{n} pixels do not fill an image of height {height}: give its height")
    if ids.min() < 0 or ids.max() >= len(clusters):
        raise ValueError(f"the ids are not all colours of this palette: 0 to {len(clusters) - 1}")
    return clusters[ids].transpose(1, 2).unflatten(2, (height, n // height))


def find_clusters(images: Tensor, n: int = 512, *, n_steps: int = 30, seed: int = 0) -> Tensor:
    """A palette (n, C) for images (B, C, height, width): k-means over their colours, initialized by k-means++ (Arthur &
    Vassilvitskii 2007), on a random subset if they are many. The paper's palette is ImageNet's."""
    pixels = images.permute(0, 2, 3, 1).reshape(-1, images.shape[1]).double()
    colours, counts = pixels.unique(dim=0, return_counts=True)
    if len(colours) < n:
        raise ValueError(f"{n} clusters of only {len(colours)} different colours: ask for fewer")
    generator = torch.Generator(colours.device).manual_seed(seed)
    part = torch.randperm(len(colours), generator=generator, device=colours.device)[: max(n, 65536)]
    colours, weights = colours[part], counts[part].double()
    chosen = [torch.multinomial(weights, 1, generator=generator)]
    distance = torch.full_like(weights, torch.inf)
    for _ in range(n - 1):
        distance = torch.minimum(distance, (colours - colours[chosen[-1]]).square().sum(dim=1))
        chosen.append(torch.multinomial(weights * distance, 1, generator=generator))
    clusters = colours[torch.cat(chosen)]
    for _ in range(n_steps):
        nearest = _nearest(colours, clusters)
        total = weights.new_zeros(n).index_add_(0, nearest, weights)
        sums = torch.zeros_like(clusters).index_add_(0, nearest, colours * weights[:, None])
        moved = torch.where(total[:, None] > 0, sums / total[:, None], clusters)  # an empty cluster stays
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return clusters.float()


def _nearest(pixels: Tensor, clusters: Tensor) -> Tensor:
    """The index of the cluster (K, C) nearest to each pixel (P, C): the minimum of |x - c|² - |x|² = |c|² - 2 x·c."""
    if widest_float(device := pixels.device) != torch.float64:  # in fp32 two dark colours can change places
        return _nearest(pixels.cpu(), clusters.cpu()).to(device)
    pixels, clusters = pixels.double(), clusters.double()
    length = clusters.square().sum(dim=1)
    parts = pixels.split(2048)  # distances that fit into the processor's cache: several times faster
    return torch.cat([torch.addmm(length, part, clusters.T, alpha=-2).min(dim=1).indices for part in parts])


# --- the hub's names -------------------------------------------------------------------------------------------------


class ImageGPTLayout(HubLayout):
    """`imagegpt` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_len": "n_positions",
        "act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    }
    fixed: Mapping[str, Any] = {
        "model_type": "imagegpt",
        "architectures": ["ImageGPTForCausalImageModeling"],
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": False,
    }
    dropouts: Mapping[str, str] = {
        "dropout": "resid_pdrop",
        "embed_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    }

    def weight_map(self, model: ImageGPT) -> WeightMap:
        """One matrix for query, key and value; matrices are (in, out)."""
        ours, theirs = "decoder.blocks.{}.", "transformer.h.{}."
        fused = [ours + f"attention.{part}" for part in ("query", "key", "value")]
        return WeightMap(
            [
                rule("embed", "transformer.wte"),
                rule("position", "transformer.wpe"),
                rule(ours + "attention_norm", theirs + "ln_1"),
                rule(fused, theirs + "attn.c_attn", Fuse(transposed=True)),
                rule(ours + "attention.output", theirs + "attn.c_proj", Transpose()),
                rule(ours + "feedforward_norm", theirs + "ln_2"),
                rule(ours + "feedforward.up", theirs + "mlp.c_fc", Transpose()),
                rule(ours + "feedforward.down", theirs + "mlp.c_proj", Transpose()),
                rule("decoder.norm", "transformer.ln_f"),
                rule("head", "lm_head"),
            ],
            prefix="transformer.",
            ignored=(r"\.attn\.(masked_)?bias$",),
        )


ImageGPTConfig.hub = ImageGPTLayout(ImageGPTConfig)
