"""Complete an image from its first pixels with image GPT (Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from heedful.generate.batch import generate_batch
from heedful.generate.request import Sampling
from heedful.models.image_gpt import ImageGPT, quantize, to_image

CELL = 96  # pixels of a picture that an image fills at least
GAP = 4  # pixels between two images of a picture
MISSING = (0.80, 0.86, 0.94)  # the colour of pixels that are not given


def complete_image(
    model: ImageGPT, begun: Tensor, n: int = 1, *, temperature: float = 1.0, seed: int | None = 0
) -> Tensor:
    """n completions of an image's first rows (C, rows, W), uint8 or -1 to 1: images (n, C, H, W), -1 to 1, in the
    model's palette. Of its first pixels as colour ids (N,), N may be 0: images as colour ids (n, max_len)."""
    if begun.ndim == 3:
        rows = begun.float() * (2 / 255) - 1 if begun.dtype == torch.uint8 else begun
        palette, (height, width) = model.palette, model.image_shape
        if rows.shape[0] != palette.shape[1] or rows.shape[1] >= height or rows.shape[2] != width:
            wanted = f"({palette.shape[1]}, rows, {width}), fewer than {height} rows"
            raise ValueError(f"give the first rows of an image as {wanted}, not {tuple(begun.shape)}")
        ids = complete_image(model, quantize(rows[None], palette)[0], n, temperature=temperature, seed=seed)
        return to_image(ids, palette, height=height)
    n_pixels, n_colours = model.config.max_len, model.config.vocab_size - 1
    if begun.ndim != 1 or len(begun) >= n_pixels:
        raise ValueError(
            f"give the first pixels of an image in one row, fewer than {n_pixels}, not {tuple(begun.shape)}"
        )
    if n < 1 or (len(begun) and not 0 <= int(begun.min()) <= int(begun.max()) < n_colours):
        raise ValueError(f"pixels are colours from 0 to {n_colours - 1}, and n is 1 or more")
    images: list[list[int]] = []
    for i in range(n):
        sampling = Sampling(temperature=temperature, seed=None if seed is None else seed + i)
        batch = model.prompt(begun.long()[None].to(model.device))
        images.append([*begun.tolist(), *generate_batch(model, batch, n_pixels - len(begun), sampling)[0]])
    return torch.tensor(images)


def completion_picture(given: Sequence[Tensor], completions: Sequence[Tensor]) -> Tensor:
    """A picture (H, W, 3) in uint8 with a row for each image: its given rows (C, rows, W), then its completions
    (n, C, H, W), enlarged. All are from -1 to 1."""
    rows = []
    for first, images in zip(given, completions, strict=True):
        height, width = images.shape[2:]
        cut = (torch.tensor(MISSING) * 2 - 1)[:, None, None].repeat(1, height, width)  # (3, H, W)
        cut[:, : first.shape[1]] = first.to(cut).expand(3, -1, -1)
        cells = [cut, *images.to(cut).expand(-1, 3, -1, -1)]
        scale = max(1, CELL // height)
        large = [to_bytes(x).repeat_interleave(scale, 1).repeat_interleave(scale, 2) for x in cells]
        rows.append(_joined(large, dim=2))
    return _joined(rows, dim=1).permute(1, 2, 0)


def to_bytes(images: Tensor) -> Tensor:
    """Images from -1 to 1 as uint8 from 0 to 255."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def save_picture(picture: Tensor, path: Path) -> None:
    """Write a picture (H, W, 3) in uint8 as PNG."""
    from matplotlib.image import imsave

    imsave(path, picture.contiguous().numpy(), format="png")


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Images (3, H, W) side by side, with white between them."""
    shape = list(parts[0].shape)
    shape[dim] = GAP
    white = torch.full(shape, 255, dtype=torch.uint8)
    return torch.cat([x for part in parts for x in (white, part)][1:], dim=dim)
