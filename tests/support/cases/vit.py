from dataclasses import dataclass

import torch
from transformers import ViTConfig, ViTForImageClassification

from heedful.models.base import Batch
from heedful.train.objectives import Objective, classification
from support.case import Case

TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=12, patch_size=4,
    num_labels=5, attn_implementation="eager",
)  # fmt: skip


@dataclass
class Images(Case):
    """Images and one label each; `size` other than the trained one has the positions resized."""

    objective: Objective = classification
    generates: bool = False
    size: tuple[int, int] = (12, 12)
    resized: bool = True  # which the reference does for square patches alone

    def batch(self) -> Batch:
        g = torch.Generator().manual_seed(1)
        return Batch(images=torch.randn(3, 3, *self.size, generator=g), targets=torch.tensor([4, 0, 2]))

    def _call(self, reference, batch, **more):
        return reference(pixel_values=batch.images, interpolate_pos_encoding=self.resized, **more)

    def counted(self, batch):
        return torch.ones(len(batch.images), dtype=torch.bool)

    def rows(self, batch):
        return [Batch(images=image[None]) for image in batch.images]


def vit(**changes):
    return lambda: ViTForImageClassification(ViTConfig(**{**TINY, **changes}))


CASES = [
    Images("vit", vit()),
    Images("vit-no-bias", vit(qkv_bias=False)),
    Images("vit-wide-image", vit(), size=(8, 24)),
    Images("vit-not-square", vit(image_size=[12, 10], patch_size=[4, 2]), size=(12, 10), resized=False),
]
