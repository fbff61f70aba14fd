"""Complete an image from its first pixels with image GPT (Chen et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.generate.batch import generate_batch
from heedful.generate.request import Sampling
from heedful.models.image_gpt import ImageGPT, quantize, to_image


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
