"""Complete an image from its first pixels with image GPT (Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
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
    return complete_ids(model, begun[None].repeat(n, 1), temperature=temperature, seed=seed)


def complete_ids(model: ImageGPT, begun: Tensor, *, temperature: float = 1.0, seed: int | None = 0) -> Tensor:
    """The first pixels of images as colour ids (B, N) -> whole images (B, max_len), in one batch; row i has the
    random numbers of seed + i."""
    n_new = model.config.max_len - begun.shape[1]
    prompts = model.prompt(begun.long()).ids.tolist()
    requests = [
        Request(tuple(row), None, n_new, Sampling(temperature=temperature, seed=None if seed is None else seed + i))
        for i, row in enumerate(prompts)
    ]
    engine = Engine(model, max_rows=len(requests), chunk=sum(map(len, prompts)))
    new = [result.choices[0].tokens for result in engine.run(requests)]
    return torch.cat([begun.long().cpu(), torch.tensor(new)], dim=1)


def completion_grid(model: ImageGPT, images: Tensor, n: int = 6, *, seed: int | None = 0) -> np.ndarray:
    """A picture (H, W, 3) uint8 of images (B, N), colour ids: a row for each, first its upper half, then the whole
    image, then n completions of the half."""
    (height, width), palette = model.image_shape, model.palette
    kept = height // 2 * width
    made = complete_ids(model, images[:, :kept].repeat_interleave(n, dim=0), seed=seed).unflatten(0, (len(images), n))
    shown = [
        to_image(torch.cat([own[None].cpu(), new]), palette, height=height)
        for own, new in zip(images, made, strict=True)
    ]
    return completion_picture([own[0, :, : height // 2] for own in shown], shown).contiguous().numpy()


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
