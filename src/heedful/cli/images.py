"""Image files as the input of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.models.base import Model

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def load_image(model: Model, path: Path) -> Tensor:
    """A file's pixels (C, H, W) from -1 to 1 in the model's size; grey where it has one channel. Of a model that was
    trained on scanned digits, as those are (heedful.tasks.drawing)."""
    import torch

    from heedful.data.images import decode_image
    from heedful.models.image_gpt import ImageGPT
    from heedful.tasks.drawing import prepare_drawing, reads_drawings

    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if isinstance(model, ImageGPT):
        (size, width), channels = model.image_shape, model.palette.shape[1]
        if size != width:
            raise ValueError(f"this model's images are {size} x {width}: those of files are read as squares")
    else:
        size, channels = model.config.image_size, model.config.n_channels
    drawn = reads_drawings(model)
    pixels = torch.from_numpy(decode_image(path, None if drawn else size).copy()).permute(2, 0, 1).float() / 127.5 - 1
    pixels = pixels.mean(dim=0, keepdim=True) if channels == 1 else pixels
    return prepare_drawing(model, pixels) if drawn else pixels
