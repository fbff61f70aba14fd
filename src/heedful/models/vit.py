"""The Vision Transformer (Dosovitskiy et al. 2021, section 3): an image is a sequence of patches.

Each patch is flattened and projected, a learned [CLS] goes before them, learned positions are added, and a pre-norm
encoder follows, whose output at [CLS] is classified. For images of another size than the model was trained with, the
learned positions are interpolated to their grid (section 3.2); the reference does so only if told to
(`interpolate_pos_encoding`).

    B batch, C channels, P patch size, N patches, E model width, L labels
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, Model, Output
from heedful.models.config import PAIRS, HeadConfig
from heedful.models.heads import HEADS, HeadParts, SequenceHead
from heedful.models.hub import HeadLayout
from heedful.models.mapping import Reshape, WeightMap, rule
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Norms, PreNormBlock
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import FirstPosition, Pooler
from heedful.nn.stack import Stack, position_ids


@dataclass(frozen=True)
class ViTConfig(HeadConfig):
    """The Vision Transformer's settings; the defaults are those of ViT-B/16."""

    head: str = "classify"
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_ff: int = 3072
    image_size: int | tuple[int, int] = 224  # height and width of the images it was trained with
    patch_size: int | tuple[int, int] = 16
    n_channels: int = 3
    bias: bool = True  # of queries, keys and values
    act: str = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0

    heads: ClassVar[Sequence[str]] = ("encoder", "pooler", "classify")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(size % patch for size, patch in zip(self.image, self.patch, strict=True)):
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of an image."""
        return _pair(self.image_size)

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return _pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


class ViT(Model):
    """Patches embedded, [CLS] and positions, encoder blocks, a last norm, the head on [CLS]."""

    family = "vit"
    config_class = ViTConfig
    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.patch = nn.Linear(c.n_channels * math.prod(c.patch), c.d_model)
        self.cls = nn.Parameter(torch.zeros(c.d_model))
        self.position = nn.Parameter(torch.zeros(1 + math.prod(c.grid), c.d_model))
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = Stack(
            [self._block(c) for _ in range(c.n_layers)],
            causal=False,
            norm=nn.LayerNorm(c.d_model, c.norm_eps),
        )
        pooler = Pooler(c.d_model) if c.head == "pooler" else FirstPosition()
        self.head = HEADS[c.head](HeadParts(c.d_model, c.n_labels, pooler=pooler))
        self.abilities = (*([self.head.ability] if self.head.ability else []), "capture")

    @staticmethod
    def _block(c: ViTConfig) -> Block:
        return PreNormBlock(
            Attention(c.d_model, c.n_heads, bias=c.bias, output_bias=True, dropout=c.attention_dropout),
            FeedForward(c.d_model, c.d_ff, c.act),
            Norms(nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps)),
            dropout=c.dropout,
        )

    def hidden(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> the last hidden states (B, 1 + N, E), [CLS] first."""
        height, width = self.config.patch
        patches = cut_patches(images.to(self.patch.weight.dtype), (height, width))  # (B, N, C·P·P)
        x = self.patch(patches)  # (B, N, E)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1)  # (B, 1 + N, E)
        x = self.dropout(x + self.positions(images.shape[2] // height, images.shape[3] // width))  # (B, 1 + N, E)
        return self.encoder(x, position_ids(0, x.shape[1], x.device))  # (B, 1 + N, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Images (B, C, height, width) -> hidden states (B, 1 + N, E) and logits (B, L)."""
        images = batch if isinstance(batch, Tensor) else batch.images
        if images is None:
            raise ValueError("a vision model reads images, and the batch has none")
        if images.ndim != 4 or images.shape[1] != self.config.n_channels:
            raise ValueError(
                f"images must be (batch, {self.config.n_channels} channels, height, width), not {tuple(images.shape)}"
            )
        return self.head.output(self.hidden(images))

    def positions(self, rows: int, columns: int) -> Tensor:
        """Position vectors of [CLS] and the patches (1 + rows·columns, E), interpolated for a grid of another size."""
        if (rows, columns) == self.config.grid:
            return self.position
        trained = self.position[1:].T.view(1, -1, *self.config.grid)  # (1, E, rows, columns)
        resized = nn.functional.interpolate(trained, (rows, columns), mode="bicubic")
        return torch.cat([self.position[:1], resized[0].flatten(1).T])  # (1 + rows·columns, E)

    def init_weights(self) -> None:
        """As in the authors' code: matrices of the encoder after Glorot & Bengio (2010), positions N(0, 0.02), [CLS] 0,
        and a head of zeros (section 3.2)."""
        super().init_weights()
        for p in self.encoder.parameters():
            if p.ndim == 2:
                nn.init.xavier_uniform_(p)
        nn.init.normal_(self.patch.weight, std=1 / math.sqrt(self.patch.in_features))
        nn.init.normal_(self.position, std=0.02)
        nn.init.zeros_(self.cls)
        if isinstance(self.head, SequenceHead):
            nn.init.zeros_(self.head.classifier.weight)


def cut_patches(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """(B, C, height, width) -> (B, N, C·P·P): patches row by row from the top left, each channel by channel."""
    (batch, channels, height, width), (rows, columns) = images.shape, patch
    if height % rows or width % columns:
        raise ValueError(
            f"an image of {height} x {width} does not divide into patches of {rows} x {columns}: resize it"
        )
    x = images.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


# --- the hub's names -------------------------------------------------------------------------------------------------


class ViTLayout(HeadLayout):
    """`vit` on the hub."""

    names: Mapping[str, str] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "n_channels": "num_channels",
        "bias": "qkv_bias",
        "act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    fixed: Mapping[str, Any] = {"model_type": "vit", "pooler_act": "tanh"}
    heads: Mapping[str, str] = {"ViTModel": "pooler", "ViTForImageClassification": "classify"}

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, head and labels; a pooler of another width is refused."""
        if hub.get("pooler_output_size") not in (None, hub.get("hidden_size", ViTConfig.d_model)):
            raise ValueError("a vit with a pooler_output_size other than its hidden_size is not supported")
        read = super().read(hub)
        sizes = {name: tuple(read[name]) for name in PAIRS if isinstance(read.get(name), list | tuple)}
        return read | {name: size[0] if len(set(size)) == 1 else size for name, size in sizes.items()}

    def preprocessor(self, config: ViTConfig) -> dict[str, Any]:
        """How files become images here: resized (bicubic), and scaled from 0..255 to -1..1."""
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": config.n_channels == 3,
            "do_resize": True,
            "size": {"height": config.image_size, "width": config.image_size},
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * config.n_channels,
            "image_std": [0.5] * config.n_channels,
        }

    def weight_map(self, model: ViT) -> WeightMap:
        """The patch projection is a convolution there; positions and [CLS] have a batch dimension."""
        c = model.config
        base = "vit." if c.head == "classify" else ""
        patches = base + "embeddings.patch_embeddings.projection"
        ours, theirs = "encoder.blocks.{}.", base + "encoder.layer.{}."
        rules = [
            rule("cls", base + "embeddings.cls_token", Reshape(1, 1, c.d_model), tensor=True),
            rule("position", base + "embeddings.position_embeddings", Reshape(1, -1, c.d_model), tensor=True),
            rule(
                "patch.weight",
                patches + ".weight",
                Reshape(c.d_model, c.n_channels, *c.patch),
                tensor=True,
            ),
            rule("patch.bias", patches + ".bias", tensor=True),
            rule(ours + "attention_norm", theirs + "layernorm_before"),
            rule(ours + "attention.query", theirs + "attention.attention.query"),
            rule(ours + "attention.key", theirs + "attention.attention.key"),
            rule(ours + "attention.value", theirs + "attention.attention.value"),
            rule(ours + "attention.output", theirs + "attention.output.dense"),
            rule(ours + "feedforward_norm", theirs + "layernorm_after"),
            rule(ours + "feedforward.up", theirs + "intermediate.dense"),
            rule(ours + "feedforward.down", theirs + "output.dense"),
            rule("encoder.norm", base + "layernorm"),
            rule("head.pooler.dense", base + "pooler.dense"),
            rule("head.classifier", "classifier"),
        ]
        # The reference's modules have newer names than the files it reads and writes.
        renamed = {
            r"\blayers\.(\d+)\.attention\.q_proj\.": r"encoder.layer.\1.attention.attention.query.",
            r"\blayers\.(\d+)\.attention\.k_proj\.": r"encoder.layer.\1.attention.attention.key.",
            r"\blayers\.(\d+)\.attention\.v_proj\.": r"encoder.layer.\1.attention.attention.value.",
            r"\blayers\.(\d+)\.attention\.o_proj\.": r"encoder.layer.\1.attention.output.dense.",
            r"\blayers\.(\d+)\.mlp\.fc1\.": r"encoder.layer.\1.intermediate.dense.",
            r"\blayers\.(\d+)\.mlp\.fc2\.": r"encoder.layer.\1.output.dense.",
            r"\blayers\.(\d+)\.": r"encoder.layer.\1.",
        }
        spare = {"classify": r"pooler\.", "pooler": r"^classifier\.", "encoder": r"^classifier\.|pooler\."}
        return WeightMap(rules, "vit.", [spare[c.head]], renamed)


ViTConfig.hub = ViTLayout(ViTConfig)
