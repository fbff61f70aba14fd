"""Data augmentation of images, a batch at a time on the training device.

    shift    random translation by up to so many pixels, padded with black: a random crop of the padded image (He et al.
             2016, section 4.2)
    flip     half of the images are mirrored
    augment  so many operations in a row, each drawn at random, with a random strength: TrivialAugment (Müller & Hutter
             2021) is one of the 14 operations of RandAugment (Cubuk et al. 2020) at a strength from 0 to 1
    erase    with this probability a rectangle becomes noise (random erasing; Zhong et al. 2020)
    mixup    the weighted mean of two images and of their labels (Zhang et al. 2018), the weight from Beta(a, a)
    cutmix   a rectangle of another image, and as much of its label (Yun et al. 2019); with both, each image gets either

Random numbers are those of torch's default generators, which a trainer seeds with every step: a resumed run draws what
an uninterrupted one does. Every operation is computed for all images, and each image keeps the one that was drawn:
indexing would synchronize with the GPU. Geometry is bilinear, where the papers take the nearest pixel.

    B batch, C channels, H height, W width, L labels
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "colour", "contrast",
    "sharpness", "posterize", "solarize", "auto_contrast", "equalize",
)  # fmt: skip
# At strength 1, as in RandAugment on 32 x 32 pixels: 10 of 32 pixels, 30 degrees, 4 of 8 bits.
SHEAR, TRANSLATE, ROTATE, ENHANCE, BITS = 0.3, 10 / 32, math.pi / 6, 0.9, 4
ERASED = (0.02, 1 / 3)  # share of the image
ASPECT = 0.3  # of an erased rectangle: from this to its inverse
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's greys


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images of a training batch; by default nothing but scaling to -1 to 1."""

    shift: int = 0
    flip: bool = False
    augment: int = 0
    strength: float = 1.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W), or floats from -1 to 1 -> augmented ones from -1 to 1, without the mixing."""
        if self == SCALING:
            return scale_pixels(images)
        x = (scale_pixels(images) + 1) / 2
        if self.flip:
            x = torch.where(_chance(x, 0.5), x.flip(3), x)
        if self.shift:
            x = random_shift(x, self.shift)
        for _ in range(self.augment):
            drawn = torch.randint(len(OPERATIONS), (len(x),), device=x.device)
            sign = torch.randint(2, (len(x),), device=x.device) * 2 - 1
            x = apply_operations(x, drawn, torch.rand(len(x), device=x.device) * self.strength, sign)
        if self.erase:
            x = torch.where(_chance(x, self.erase) & _erased(x), torch.rand_like(x), x)
        return x * 2 - 1

    def mix(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) mixed with their neighbours in the batch, which is shuffled, and the share (B, 1) of each
        that is its own."""
        kept = self._kept(images)  # (B, 1, H, W), for each pixel
        return kept * images + (1 - kept) * images.roll(1, 0), kept.mean(dim=(2, 3))

    @property
    def mixes(self) -> bool:
        """Whether images and labels are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def _kept(self, images: Tensor) -> Tensor:
        n, _, height, width = images.shape
        whole = torch.ones(n, 1, height, width, device=images.device)
        if not self.cutmix:
            return whole * _beta(self.mixup, images)
        cut = (1 - _beta(self.cutmix, images)).sqrt()  # of each side; the rectangle may reach over the border
        box = ~_rectangles(images, cut, cut, _uniform(images), _uniform(images)) * whole
        return torch.where(_chance(images, 0.5), box, whole * _beta(self.mixup, images)) if self.mixup else box


SCALING = Augmentation()


def scale_pixels(images: Tensor) -> Tensor:
    """uint8 pixels as floats from -1 to 1 (mean and std 1/2, as for ViT's checkpoints); floats as they are."""
    return images if images.is_floating_point() else images.float() * (2 / 255) - 1


def mix_labels(labels: Tensor, share: Tensor, n_labels: int) -> Tensor:
    """The labels (B,) of mixed images as probabilities (B, L)."""
    own = F.one_hot(labels, n_labels).to(share.dtype)
    return share * own + (1 - share) * own.roll(1, 0)


def random_shift(x: Tensor, most: int) -> Tensor:
    """Images (B, C, H, W) from 0 to 1, moved by up to so many pixels along each axis, padded with black."""
    n, _, height, width = x.shape
    down, right = torch.randint(0, 2 * most + 1, (2, n, 1), device=x.device)
    rows = torch.arange(height, device=x.device) + down  # (B, H)
    columns = torch.arange(width, device=x.device) + right  # (B, W)
    wide = F.pad(x, (most,) * 4).permute(0, 2, 3, 1)
    image = torch.arange(n, device=x.device)[:, None, None]
    return wide[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def apply_operations(x: Tensor, drawn: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """To each of the images (B, C, H, W) from 0 to 1 its operation (B,), a number in OPERATIONS, of a strength (B,)
    from 0 to 1 in a direction (B,), 1 or -1."""

    def chosen(*names: str) -> Tensor:
        return sum((drawn == OPERATIONS.index(name)) for name in names).bool()[:, None, None, None]  # type: ignore[union-attr]

    signed = strength * sign
    x = torch.where(chosen(*OPERATIONS[1:6]), warp(x, drawn, signed), x)
    enhanced = torch.zeros_like(x)  # brightness: between black and the image
    enhanced = torch.where(chosen("colour"), greys(x), enhanced)
    enhanced = torch.where(chosen("contrast"), greys(x).mean(dim=(1, 2, 3), keepdim=True), enhanced)
    enhanced = torch.where(chosen("sharpness"), smooth_pixels(x), enhanced)
    factor = (1 + ENHANCE * signed)[:, None, None, None]
    blend = (enhanced + factor * (x - enhanced)).clamp(0, 1)
    bits = 2 ** (strength * BITS).round()[:, None, None, None]
    strength = strength[:, None, None, None]
    x = torch.where(chosen(*OPERATIONS[6:10]), blend, x)
    x = torch.where(chosen("posterize"), ((x * 255).round() / bits).floor() * bits / 255, x)
    x = torch.where(chosen("solarize") & (x >= 1 - strength), 1 - x, x)
    x = torch.where(chosen("auto_contrast"), auto_contrast(x), x)
    return torch.where(chosen("equalize"), equalize(x), x)


def warp(x: Tensor, drawn: Tensor, strength: Tensor) -> Tensor:
    """Shear, translation or rotation about the middle of each image, bilinear, with black around it."""

    def amount(name: str, most: float) -> Tensor:
        return torch.where(drawn == OPERATIONS.index(name), strength * most, 0.0)[:, None, None]  # (B, 1, 1)

    height, width = x.shape[2:]
    down, right = (torch.arange(n, device=x.device) + 0.5 - n / 2 for n in (height, width))  # pixels from the middle
    down, right = down[None, :, None], right[None, None, :]
    angle = amount("rotate", ROTATE)
    across = angle.cos() * right - angle.sin() * down + amount("shear_x", SHEAR) * down
    along = angle.sin() * right + angle.cos() * down + amount("shear_y", SHEAR) * right
    across = across + amount("translate_x", TRANSLATE * width)
    along = along + amount("translate_y", TRANSLATE * height)
    grid = torch.stack([across * 2 / width, along * 2 / height], dim=-1)  # (B, H, W, 2)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def greys(x: Tensor) -> Tensor:
    """The luma (B, 1, H, W) of images; the mean over channels unless they are three."""
    if x.shape[1] != len(LUMA):
        return x.mean(dim=1, keepdim=True)
    red, green, blue = x.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def smooth_pixels(x: Tensor) -> Tensor:
    """Each pixel as the mean of its 3 x 3 neighbourhood, in which it counts five times; the border is as it was."""
    if min(x.shape[2:]) < 3:
        return x
    inner = (F.avg_pool2d(x, 3, stride=1) * 9 + 4 * x[:, :, 1:-1, 1:-1]) / 13
    return torch.cat(
        [x[:, :, :1], torch.cat([x[:, :, 1:-1, :1], inner, x[:, :, 1:-1, -1:]], dim=3), x[:, :, -1:]], dim=2
    )


def auto_contrast(x: Tensor) -> Tensor:
    """Each channel stretched from 0 to 1."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-6), x)


def equalize(x: Tensor) -> Tensor:
    """Each channel with an even histogram, as Pillow's ImageOps.equalize."""
    levels = (x * 255).round().long().flatten(2)  # (B, C, H·W)
    counts = torch.zeros(*levels.shape[:2], 256, device=x.device)
    counts = counts.scatter_add(2, levels, torch.ones_like(levels, dtype=counts.dtype))
    step = ((counts.sum(dim=2) - counts.gather(2, levels.amax(dim=2, keepdim=True))[..., 0]) / 255).floor()[..., None]
    table = ((counts.cumsum(dim=2) - counts + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(max=255) / 255
    return torch.where(step[..., None] > 0, table.gather(2, levels).view_as(x), x)


def _erased(x: Tensor) -> Tensor:
    """A random rectangle inside each image, (B, 1, H, W)."""
    area = ERASED[0] + (ERASED[1] - ERASED[0]) * _uniform(x)
    aspect = torch.exp(math.log(ASPECT) * (2 * _uniform(x) - 1)).sqrt()
    tall, wide = (area.sqrt() * aspect).clamp(max=1), (area.sqrt() / aspect).clamp(max=1)
    return _rectangles(x, tall, wide, tall / 2 + (1 - tall) * _uniform(x), wide / 2 + (1 - wide) * _uniform(x))


def _rectangles(x: Tensor, tall: Tensor, wide: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Where the pixels are in a rectangle, (B, 1, H, W); its sides and its middle (B, 1, 1, 1) are shares of the
    image's."""
    rows, columns = ((torch.arange(n, device=x.device) + 0.5) / n for n in x.shape[2:])
    return ((rows[:, None] - down).abs() < tall / 2) & ((columns - right).abs() < wide / 2)


def _uniform(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, 1, 1, device=x.device)


def _chance(x: Tensor, probability: float) -> Tensor:
    return _uniform(x) < probability


def _beta(a: float, x: Tensor) -> Tensor:
    """Beta(a, a) for each image, drawn on the CPU: a small copy, which does not synchronize."""
    return torch.distributions.Beta(a, a).sample((len(x), 1, 1, 1)).to(x.device, non_blocking=True)
