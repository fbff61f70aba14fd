"""Bits per dimension of images under an image GPT: the mean of -log2 p(pixel | the pixels before it).

A dimension is a pixel in the colours of the model's palette; so models of one palette compare, and log2 of its size is
what guessing evenly costs.

    N pixels of an image
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.data.images import nearest_colours, read_images
from heedful.evaluate.bootstrap import Metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.models.image_gpt import ImageGPT


@dataclass(frozen=True)
class BitsPerDimension(Task):
    """Bits per dimension of images; an item is an image."""

    about: ClassVar[str] = "bits per dimension (pixel) of images under an image GPT"
    reads: ClassVar[str] = "an idx file (MNIST's), an .npz of images, or a folder of them"
    batch_size: ClassVar[int] = 32

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must predict pixels."""
        if not isinstance(loaded.model, ImageGPT):
            raise ValueError(f"bits per dimension are an image GPT's; {loaded.name} is a {loaded.model.family}")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """The images as colours (N,) of the model's palette."""
        model = loaded.model
        assert isinstance(model, ImageGPT), "resolved has checked it"
        height, width = model.image_shape
        size = height if paths[0].is_dir() and height == width else None
        images = read_images(paths[0], size=size, labels=False)
        if images.pixels.shape[1:] != (model.palette.shape[1], height, width):
            told = " x ".join(map(str, images.pixels.shape[1:]))
            raise ValueError(
                f"the model reads images of {model.palette.shape[1]} x {height} x {width} (channels, height, width), "
                f"and those of {paths[0]} have {told}"
            )
        ids = torch.from_numpy(nearest_colours(images, model.palette).astype(np.int64))  # (images, N)
        shown = (hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest() for pixels in images.pixels)
        return [Item(str(i), one, None, digest) for i, (one, digest) in enumerate(zip(ids, shown, strict=True))]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The negative log-likelihood of each image in nats; its score is the bits per dimension."""
        model = loaded.model
        assert isinstance(model, ImageGPT), "resolved has checked it"
        n = len(items[0].input)
        nats = image_log_likelihood(model, torch.stack([item.input for item in items])).neg().tolist()
        return [{"prediction": total, "score": total / n / math.log(2), "dimensions": n} for total in nats]

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """The mean bits per dimension; lower is better."""
        bits = np.array([r["score"] for r in records])
        mean = Metric("bits per dimension", lambda c: (c @ bits) / c.sum(axis=1), "", higher_is_better=False)
        return [mean]

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """How many dimensions were scored."""
        return {"dimensions": sum(r["dimensions"] for r in records)}


@torch.inference_mode()
def image_log_likelihood(model: ImageGPT, ids: Tensor) -> Tensor:
    """log p (B,) of images as colours (B, N), in nats."""
    was_training = model.training
    model.eval()
    batch = model.training_batch(ids.to(model.device))
    logits = model.head(model.hidden(batch, model.scoring_state(len(ids)))).float()  # (B, N, K)
    assert batch.targets is not None
    lost = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none").cpu().double().sum(dim=1)
    model.train(was_training)
    return -lost
