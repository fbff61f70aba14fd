"""Drawings for a model that was trained on scanned digits: ink bright on black, centred, of one size.

A model asks for it in its preprocessor_config.json, as MNIST was prepared (LeCun et al. 1998, section III.A): the
image's edge is paper, the larger side of the ink is scaled to a share of the image's side, and its centre of mass is
put in the middle. An image of the model's own size whose ink is large and near the middle keeps its place and size:
things that are not digits are rejected more often that way.

    "drawing": {"larger_side": 0.7143}    20 of 28 pixels

    H, W of the drawing, S of the model's image
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.base import Model
from heedful.observe.inputs import scale_images

INK = 0.2  # of the darkest ink: less is paper
BLANK = 0.05  # a drawing without more contrast than this is empty
SMALL = 0.7  # of the size that digits have
MOVED = 1 / 7  # of the image's side: further away from the middle is not centred


def reads_drawings(model: Model) -> bool:
    """Whether the model's files ask for `prepare_drawing`."""
    return isinstance(model.preprocessor.get("drawing"), dict)


def prepare_drawing(model: Model, image: Tensor) -> Tensor:
    """An image (C, H, W), floats from -1 to 1 or uint8, as the model's training data is: (C, S, S) from -1 to 1."""
    settings: dict[str, Any] = model.preprocessor["drawing"]
    size, share = int(model.config.image_size), float(settings.get("larger_side", 0))
    if not 0 < share <= 1:
        raise ValueError(f"preprocessor_config.json: drawing needs a larger_side above 0 and up to 1: {settings}")
    levels = (scale_images(image) + 1) / 2
    ink = ink_of(levels.mean(dim=0))
    if float(ink.max()) <= BLANK:
        return torch.full((image.shape[0], size, size), -1.0)
    rows, columns = inked(ink)
    target = round(share * size)
    if ink.shape != (size, size) or not large_and_central(rows, columns, target, size):
        ink = centred(scaled(ink[rows, columns], target), size)
    return (2 * ink - 1).expand(image.shape[0], size, size).contiguous()


def ink_of(levels: Tensor) -> Tensor:
    """Ink from 0 to 1 (H, W) of levels: what differs from the edge, which is paper."""
    edge = torch.cat([levels[0], levels[-1], levels[1:-1, 0], levels[1:-1, -1]]).median()
    return (edge - levels if edge > 0.5 else levels).clamp(0, 1)


def inked(ink: Tensor) -> tuple[slice, slice]:
    """The rows and the columns from the first to the last that has ink."""
    on = ink > INK * ink.max()
    places = [on.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0)]
    rows, columns = (slice(place[0], place[-1] + 1) for place in places)
    return rows, columns


def large_and_central(rows: slice, columns: slice, target: int, size: int) -> bool:
    """Whether ink in these places of an image of the model's size can stay there."""
    sides = (rows, columns)
    away = max(abs(side.start + side.stop - size) / 2 for side in sides)
    return max(side.stop - side.start for side in sides) >= SMALL * target and away <= MOVED * size


def scaled(box: Tensor, target: int) -> Tensor:
    """The ink with its larger side `target` pixels long, the darkest of it 1."""
    scale = target / max(box.shape)
    shape = [max(1, round(side * scale)) for side in box.shape]
    ink = (box / box.max())[None, None]
    small: Tensor = nn.functional.interpolate(ink, size=shape, mode="bilinear", antialias=True)[0, 0]
    return small.clamp(0, 1)


def centred(ink: Tensor, size: int) -> Tensor:
    """The ink in an empty square, its centre of mass in the middle, as far as it stays inside."""
    out = torch.zeros(size, size)
    first = []
    for axis in (0, 1):
        places = torch.arange(ink.shape[axis]) + 0.5
        middle = float(ink.sum(dim=1 - axis) @ places / ink.sum())
        first.append(min(max(round(size / 2 - middle), 0), size - ink.shape[axis]))
    out[first[0] : first[0] + ink.shape[0], first[1] : first[1] + ink.shape[1]] = ink
    return out
