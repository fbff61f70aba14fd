"""Complete an image from its first pixels with image GPT (Chen et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.generate.batch import generate_batch
from heedful.generate.request import Sampling
from heedful.models.image_gpt import ImageGPT


def complete_image(
    model: ImageGPT, begun: Tensor, n: int = 1, *, temperature: float = 1.0, seed: int | None = 0
) -> Tensor:
    """n completions of the first pixels (N,) of an image, N may be 0: whole images as colours (n, max_len)."""
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
