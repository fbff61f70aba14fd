"""Drawings for a model that was trained on scanned digits: ink bright on black, upright, centred, of one height.

A model asks for it in its preprocessor_config.json, as MNIST and the UCI digits were prepared (LeCun et al. 1998,
section III.A): the polarity is that of the image's edge, the slant is taken out, the ink is scaled to a height, its
strokes are made as wide as those of the training data, and its centre of mass is put in the middle.

    "drawing": {"height": 1.0, "stroke": 0.15}    both as shares of the image's side

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
CONTRAST = 1.15  # strokes become greyer when they are scaled down


def reads_drawings(model: Model) -> bool:
    """Whether the model's files ask for `prepare_drawing`."""
    return isinstance(model.preprocessor.get("drawing"), dict)


def prepare_drawing(model: Model, image: Tensor) -> Tensor:
    """An image (C, H, W), floats from -1 to 1 or uint8, as the model's training data is: (C, S, S) from -1 to 1.

    One of the model's own size whose ink has the right height is as it should be: at most its polarity changes.
    """
    settings: dict[str, Any] = model.preprocessor["drawing"]
    size = int(model.config.image_size)
    height, stroke = (float(settings.get(name, 0)) for name in ("height", "stroke"))
    if not (0 < height <= 1 and 0 <= stroke < 0.5):
        raise ValueError(f"preprocessor_config.json: drawing needs a height up to 1 and a stroke below 0.5: {settings}")
    levels = (scale_images(image) + 1) / 2
    ink = ink_of(levels.mean(dim=0))
    if float(ink.max()) <= BLANK:
        return torch.full((image.shape[0], size, size), -1.0)
    target = round(height * size)
    box = crop(ink)
    if ink.shape != (size, size) or abs(len(box) - target) > 1:
        ink = centred(scaled(box, target, size, stroke), size)
    return (2 * ink - 1).expand(image.shape[0], size, size).contiguous()


def ink_of(levels: Tensor) -> Tensor:
    """Ink from 0 to 1 (H, W) of levels: what differs from the edge, which is paper."""
    edge = torch.cat([levels[0], levels[-1], levels[1:-1, 0], levels[1:-1, -1]]).median()
    return (edge - levels if edge > 0.5 else levels).clamp(0, 1)


def crop(ink: Tensor) -> Tensor:
    """The part that has ink."""
    on = ink > INK * ink.max()
    rows, columns = on.any(dim=1).nonzero()[:, 0], on.any(dim=0).nonzero()[:, 0]
    return ink[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]


def scaled(box: Tensor, target: int, size: int, stroke: float) -> Tensor:
    """The ink upright, `target` high, with strokes of a share `stroke` of its height."""
    ink = box / box.max()
    if min(ink.shape) > size:  # on a coarser grid there is neither slant nor width to see
        ink = thickened(crop(upright(ink)), stroke)
    width = min(size, max(1, round(ink.shape[1] * target / ink.shape[0])))
    how: dict[str, Any] = {"mode": "bilinear", "antialias": True}
    small: Tensor = nn.functional.interpolate(ink[None, None], size=(target, width), **how)[0, 0]
    return (small * CONTRAST).clamp(max=1)


def upright(ink: Tensor) -> Tensor:
    """The rows shifted so that the ink's moments have no slant."""
    rows, columns = torch.arange(ink.shape[0]).float(), torch.arange(ink.shape[1]).float()
    y = rows - (ink.sum(dim=1) @ rows) / ink.sum()
    x = columns - (ink.sum(dim=0) @ columns) / ink.sum()
    slant = float((y @ ink @ x / (y**2 @ ink.sum(dim=1)).clamp(min=1e-6)).clamp(-1, 1))
    pad = int(abs(slant) * len(ink)) + 1
    shifts = [round(-slant * float(at)) for at in y]
    wide = nn.functional.pad(ink, (pad, pad))
    return torch.stack([row.roll(shift) for row, shift in zip(wide, shifts, strict=True)])


def thickened(ink: Tensor, stroke: float) -> Tensor:
    """The ink with strokes at least a share of its height wide: their width is about twice area / outline."""
    on = nn.functional.pad(ink > 0.5, (1, 1, 1, 1))
    outline = (on[1:] != on[:-1]).sum() + (on[:, 1:] != on[:, :-1]).sum()
    width = 2.4 * float(on.sum()) / max(1, int(outline))  # the outline of a slanted edge is counted in steps
    more = int((stroke * max(ink.shape) - width) / 2)
    if more <= 0:
        return ink
    padded = nn.functional.pad(ink, (more,) * 4)[None, None]
    return nn.functional.max_pool2d(padded, 2 * more + 1, stride=1, padding=more)[0, 0]


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
