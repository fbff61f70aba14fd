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
an uninterrupted one does. They are drawn first, all at once; what is made of them is one function of tensors, which
torch.compile fuses on a GPU. Every operation is computed for all images, and each image keeps the one that was drawn:
indexing would synchronize with the GPU. Geometry is bilinear, where the papers take the nearest pixel.

    B batch, C channels, H height, W width, L labels
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Dirichlet

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
        if not (self.shift or self.flip or self.augment or self.erase):
            return scale_pixels(images)
        draws = _uniform(images, 8 + 3 * self.augment)
        noise = torch.rand(images.shape, device=images.device) if self.erase else None
        return compiled_augment(self, images, draws, noise)

    def mix(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) mixed with their neighbours in the batch, which is shuffled, and the share (B, 1) of each
        that is its own."""
        return compiled_mix(images, _uniform(images, 3), _beta(self.mixup, images), _beta(self.cutmix, images))

    @property
    def mixes(self) -> bool:
        """Whether images and labels are mixed."""
        return self.mixup > 0 or self.cutmix > 0


SCALING = Augmentation()


def augment_images(settings: Augmentation, images: Tensor, draws: Tensor, noise: Tensor | None) -> Tensor:
    """The images (B, C, H, W), augmented as draws from 0 to 1 say, (8 + 3 for each operation, B, 1, 1, 1); erased
    rectangles are of noise (B, C, H, W)."""
    x = (scale_pixels(images) + 1) / 2
    mirrored, down, right, erased, area, aspect, top, left = draws[:8]
    if settings.shift or settings.flip:
        down, right = ((place * (2 * settings.shift + 1)).long() for place in (down, right))
        x = crop_padded(x, settings.shift, down, right, mirrored < 0.5 * settings.flip)
    for i in range(settings.augment):
        drawn, strength, sign = draws[8 + 3 * i : 11 + 3 * i]
        drawn, sign = (drawn * len(OPERATIONS)).long(), (sign * 2).floor() * 2 - 1
        x = apply_operations(x, drawn, strength * settings.strength, sign)
    if noise is not None:
        x = torch.where((erased < settings.erase) & _inner_rectangles(x, area, aspect, top, left), noise, x)
    return x * 2 - 1


def mix_images(images: Tensor, draws: Tensor, mixup: Tensor | None, cutmix: Tensor | None) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) mixed with their neighbours by the weights of mixup or cutmix (B, 1, 1, 1), by either where
    both are given, and the share (B, 1) of each that is its own; draws (3, B, 1, 1, 1)."""
    either, down, right = draws
    kept = mixup
    if cutmix is not None:
        cut = (1 - cutmix).sqrt()  # of each side; the rectangle may reach over the border
        box = (~_rectangles(images, cut, cut, down, right)).to(images.dtype)
        kept = box if mixup is None else torch.where(either < 0.5, box, mixup)
    assert kept is not None, "neither mixup nor cutmix"
    kept = kept.expand(-1, 1, *images.shape[2:])  # of each pixel
    return kept * images + (1 - kept) * images.roll(1, 0), kept.mean(dim=(2, 3))


# Or the same, compiled (train/torch_compile.py).
compiled_augment: Callable[[Augmentation, Tensor, Tensor, Tensor | None], Tensor] = augment_images
compiled_mix: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]] = mix_images


def scale_pixels(images: Tensor) -> Tensor:
    """uint8 pixels as floats from -1 to 1 (mean and std 1/2, as for ViT's checkpoints); floats as they are."""
    return images if images.is_floating_point() else images.float() * (2 / 255) - 1


def mix_labels(labels: Tensor, share: Tensor, n_labels: int) -> Tensor:
    """The labels (B,) of mixed images as probabilities (B, L)."""
    own = F.one_hot(labels, n_labels).to(share.dtype)
    return share * own + (1 - share) * own.roll(1, 0)


def crop_padded(x: Tensor, padding: int, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """Images (B, C, H, W) padded with black and cut out at rows and columns (B, 1, 1, 1) from 0 to twice the padding,
    mirrored where that is chosen (B, 1, 1, 1)."""
    n, channels, height, width = x.shape
    rows = torch.arange(height, device=x.device)[:, None] + down  # (B, 1, H, 1)
    columns = torch.arange(width, device=x.device)
    columns = torch.where(mirrored, columns.flip(0), columns) + right  # (B, 1, 1, W)
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    return F.pad(x, (padding,) * 4)[image, channel, rows, columns]


def apply_operations(x: Tensor, drawn: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """To each of the images (B, C, H, W) from 0 to 1 its operation (B,), a number in OPERATIONS, of a strength (B,)
    from 0 to 1 in a direction (B,), 1 or -1."""
    drawn, strength, sign = (each.view(-1, 1, 1, 1) for each in (drawn, strength, sign))

    def chosen(first: str, last: str = "") -> Tensor:
        low, high = OPERATIONS.index(first), OPERATIONS.index(last or first)
        return (drawn >= low) & (drawn <= high) if last else drawn == low

    signed = strength * sign
    x = torch.where(chosen("shear_x", "rotate"), warp(x, drawn, signed), x)
    grey = greys(x)  # (B, 1, H, W)
    enhanced = torch.where(chosen("colour"), grey, 0.0)  # brightness: between black and the image
    enhanced = torch.where(chosen("contrast"), grey.mean(dim=(2, 3), keepdim=True), enhanced)
    enhanced = torch.where(chosen("sharpness"), smooth_pixels(x), enhanced)
    blend = (enhanced + (1 + ENHANCE * signed) * (x - enhanced)).clamp(0, 1)
    bits = torch.exp2((strength * BITS).round())
    posterized = ((x * 255).round() / bits).floor() * bits / 255
    solarized = torch.where(x >= 1 - strength, 1 - x, x)
    found = torch.where(chosen("brightness", "sharpness"), blend, x)
    found = torch.where(chosen("posterize"), posterized, found)
    found = torch.where(chosen("solarize"), solarized, found)
    found = torch.where(chosen("auto_contrast"), auto_contrast(x), found)
    return torch.where(chosen("equalize"), equalize(x), found)


def warp(x: Tensor, drawn: Tensor, strength: Tensor) -> Tensor:
    """Shear, translation or rotation (B, 1, 1, 1) about the middle of each image, bilinear, with black around it."""

    def amount(name: str, most: float) -> Tensor:
        return torch.where(drawn == OPERATIONS.index(name), strength * most, 0.0)

    height, width = x.shape[2:]
    down, right = (torch.arange(n, device=x.device) + 0.5 - n / 2 for n in (height, width))  # pixels from the middle
    down = down[:, None]
    angle = amount("rotate", ROTATE)
    across = angle.cos() * right - angle.sin() * down + amount("shear_x", SHEAR) * down
    along = angle.sin() * right + angle.cos() * down + amount("shear_y", SHEAR) * right
    across = across + amount("translate_x", TRANSLATE * width)
    along = along + amount("translate_y", TRANSLATE * height)
    grid = torch.cat([across * (2 / width), along * (2 / height)], dim=1).permute(0, 2, 3, 1)  # (B, H, W, 2)
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
    return x + F.pad((F.avg_pool2d(x, 3, stride=1) - x[:, :, 1:-1, 1:-1]) * (9 / 13), (1,) * 4)


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


def _inner_rectangles(x: Tensor, area: Tensor, aspect: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """A rectangle inside each image, (B, 1, H, W), by four draws from 0 to 1."""
    area = ERASED[0] + (ERASED[1] - ERASED[0]) * area
    aspect = torch.exp(math.log(ASPECT) * (2 * aspect - 1)).sqrt()
    tall, wide = (area.sqrt() * aspect).clamp(max=1), (area.sqrt() / aspect).clamp(max=1)
    return _rectangles(x, tall, wide, tall / 2 + (1 - tall) * top, wide / 2 + (1 - wide) * left)


def _rectangles(x: Tensor, tall: Tensor, wide: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Where the pixels are in a rectangle, (B, 1, H, W); its sides and its middle (B, 1, 1, 1) are shares of the
    image's."""
    rows, columns = ((torch.arange(n, device=x.device) + 0.5) / n for n in x.shape[2:])
    return ((rows[:, None] - down).abs() < tall / 2) & ((columns - right).abs() < wide / 2)


def _uniform(images: Tensor, n: int) -> Tensor:
    """n numbers from 0 to 1 for each image, (n, B, 1, 1, 1)."""
    return torch.rand(n, len(images), 1, 1, 1, device=images.device)


def _beta(a: float, images: Tensor) -> Tensor | None:
    """Beta(a, a) for each image, (B, 1, 1, 1), drawn on its device; None if a is 0."""
    if not a:
        return None
    both = torch.full((len(images), 2), a, device=images.device)
    return Dirichlet(both, validate_args=False).sample()[:, :1, None, None]
