"""Handwritten digits as people draw them, and drawings that are no digits: data for a digit reader that may ship.

    python benchmarks/zoo_data/digits.py --mnist MNIST --out DATA               (then recipe vit-digits)
    python benchmarks/zoo_data/digits.py --mnist MNIST --measure MODEL [--fashion FASHION-MNIST]

Writes digits/train-images-idx3-ubyte.gz and its labels: MNIST's 60,000 training images (LeCun, Cortes and Burges,
CC BY-SA 3.0), as they are and once more thicker, thinner, moved, turned, resized or dark on light, and 20,000 drawings
with the label 10, "not a digit": nothing at all, noise, lines, scribbles, filled shapes with a texture, digits whose
parts are shuffled, two digits on top of each other. --measure prints how many of MNIST's test images are right, as they
are and changed, and how many blanks and pictures of clothes (Fashion-MNIST, which is not trained on) are rejected.
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIZE, NOT_A_DIGIT, N_OTHERS = 28, 10, 20_000


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes: images (N, H, W) or labels (N,)."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


def write_idx(path: Path, values: Tensor) -> None:
    header = bytes([0, 0, 8, values.dim()]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + values.numpy().tobytes(), 1, mtime=0))


def warped(x: Tensor, draw: torch.Generator, turn: float, scale: tuple[float, float], move: float) -> Tensor:
    """Images (N, H, W) turned by up to so many radians, resized, and moved by up to so many pixels."""
    n = len(x)
    angle = (torch.rand(n, generator=draw) * 2 - 1) * turn
    size = scale[0] + torch.rand(n, 2, generator=draw) * (scale[1] - scale[0])
    shift = (torch.rand(n, 2, generator=draw) * 2 - 1) * (2 * move / SIZE)
    cos, sin = angle.cos(), angle.sin()
    rows = [torch.stack([cos / size[:, 0], -sin / size[:, 0], shift[:, 0]], 1),
            torch.stack([sin / size[:, 1], cos / size[:, 1], shift[:, 1]], 1)]  # fmt: skip
    grid = F.affine_grid(torch.stack(rows, 1), [n, 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


def thicker(x: Tensor) -> Tensor:
    """Every pixel as bright as the brightest of it and its four neighbours."""
    across = F.max_pool2d(x[:, None], (1, 3), 1, (0, 1))
    return torch.maximum(across, F.max_pool2d(x[:, None], (3, 1), 1, (1, 0)))[:, 0]


def thinner(x: Tensor) -> Tensor:
    """The image at twice its size with two pixels of every border taken off, halved again."""
    large = F.interpolate(x[:, None], scale_factor=2, mode="bilinear", align_corners=False)
    return F.avg_pool2d(-F.max_pool2d(-large, 3, 1, 1), 2)[:, 0]


def varied(x: Tensor, draw: torch.Generator) -> Tensor:
    """Digits (N, H, W) as other people draw them."""
    way = torch.rand(len(x), generator=draw)[:, None, None]
    x = torch.where(way < 0.3, thicker(x), torch.where(way < 0.6, thinner(x), x))
    x = torch.where((way > 0.2) & (way < 0.3), thicker(x), x)
    x = warped(x, draw, 0.3, (0.6, 1.25), 4)
    contrast = 0.5 + 0.5 * torch.rand(len(x), 1, 1, generator=draw)
    x = (x * (1.2 * contrast)).clamp(0, 1)
    inverted = torch.rand(len(x), 1, 1, generator=draw) < 0.35
    return torch.where(inverted, 1 - x, x)


def others(digits: Tensor, n: int, draw: torch.Generator) -> Tensor:
    """Images (n, H, W) that are no digits, from 0 to 1."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw)

    part = n // 8
    axis = torch.arange(SIZE) + 0.5
    down, right = axis[:, None], axis[None, :]
    blank = uniform(part, 1, 1) * torch.ones(SIZE, SIZE) + 0.1 * uniform(part, 1, 1) * torch.randn(
        part, SIZE, SIZE, generator=draw
    )
    smooth = F.interpolate(uniform(part, 1, 5, 5), (SIZE, SIZE), mode="bicubic")[:, 0]
    noise = torch.where(uniform(part, 1, 1) < 0.5, smooth, uniform(part, SIZE, SIZE))
    lines = torch.zeros(2 * part, SIZE, SIZE)
    for strokes in range(5):  # straight ones across the image; more of them in the second half
        angle, offset = uniform(2 * part, 1, 1) * math.pi, (uniform(2 * part, 1, 1) - 0.5) * 20
        far = (angle.cos() * (down - 14) + angle.sin() * (right - 14) - offset).abs()
        drawn = (1.8 - far).clamp(0, 1) * (uniform(2 * part, 1, 1) < (0.35 if strokes > 2 else 0.9))
        lines = torch.maximum(lines, drawn)
    lines[:part] *= (((down - 14) ** 2 + (right - 14) ** 2) < 130).float()
    shapes = torch.zeros(2 * part, SIZE, SIZE)
    for _ in range(4):  # filled rectangles and ellipses on top of each other
        top, left = 4 + 14 * uniform(2 * part, 1, 1), 4 + 14 * uniform(2 * part, 1, 1)
        tall, wide = 3 + 9 * uniform(2 * part, 1, 1), 2 + 7 * uniform(2 * part, 1, 1)
        box = ((down - top).abs() < tall) & ((right - left).abs() < wide)
        round_ = ((down - top) / tall) ** 2 + ((right - left) / wide) ** 2 < 1
        inside = torch.where(uniform(2 * part, 1, 1) < 0.6, box, round_)
        shapes = torch.where(inside, 0.3 + 0.7 * uniform(2 * part, 1, 1), shapes)
    texture = F.interpolate(uniform(2 * part, 1, 9, 9), (SIZE, SIZE), mode="bilinear")[:, 0]
    shapes *= 1 - texture * uniform(2 * part, 1, 1)
    half = torch.where(uniform(2 * part, 1, 1) < 0.5, shapes, torch.maximum(shapes, shapes.flip(2)))

    def some(k: int) -> Tensor:
        return digits[torch.randint(len(digits), (k,), generator=draw)]

    quarters = some(part).view(part, 2, 14, 2, 14)
    shuffled = quarters.flip(1).flip(3).reshape(part, SIZE, SIZE)
    left = n - 7 * part
    both = torch.maximum(some(left).roll(-5, 2), some(left).roll(5, 2).flip(1))
    made = torch.cat([blank, noise, lines, half, shuffled, both]).clamp(0, 1)
    inverted = uniform(len(made), 1, 1) < 0.3
    return torch.where(inverted, 1 - made, made)


def to_bytes(x: Tensor) -> Tensor:
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def write(mnist: Path, out: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    images, labels = (read_idx(mnist / f"train-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    digits = images.float() / 255
    made = others(digits, N_OTHERS, draw)
    x = torch.cat([images, to_bytes(varied(digits, draw)), to_bytes(made)])
    y = torch.cat([labels, labels, torch.full((len(made),), NOT_A_DIGIT, dtype=torch.uint8)])
    order = torch.randperm(len(x), generator=draw)
    folder = out / "digits"
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder / "train-images-idx3-ubyte.gz", x[order])
    write_idx(folder / "train-labels-idx1-ubyte.gz", y[order])
    print(f"{len(x)} images, {len(made)} of them no digits")


@torch.no_grad()
def measure(name: str, mnist: Path, fashion: Path | None) -> None:
    import heedful

    model = heedful.load(name).model.eval()
    device = next(model.parameters()).device

    def labels_of(x: Tensor) -> Tensor:
        rows = (to_bytes(x).float() * (2 / 255) - 1)[:, None].split(500)
        return torch.cat([model(heedful.models.base.Batch(images=r.to(device))).logits.argmax(1).cpu() for r in rows])

    draw = torch.Generator().manual_seed(1)
    images, truth = (read_idx(mnist / f"t10k-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
    x, truth = images.float() / 255, truth.long()
    changed = {
        "as they are": x, "thicker": thicker(x), "thinner": thinner(x), "dark on light": 1 - x,
        "moved by up to 4 pixels": warped(x, draw, 0, (1, 1), 4),
        "turned by up to 15 degrees": warped(x, draw, 0.26, (1, 1), 0),
        "at 70 % of the size": warped(x, draw, 0, (0.7, 0.7), 2),
    }  # fmt: skip
    for what, test in changed.items():
        print(f"{what}: {(labels_of(test) == truth).float().mean():.2%} right", flush=True)
    for what, level in ("black", 0.0), ("white", 1.0), ("grey", 0.5):
        label = labels_of(torch.full((1, SIZE, SIZE), level))[0]
        print(f"{what}: {'rejected' if label == NOT_A_DIGIT else 'taken for a digit'}")
    if fashion:
        clothes = read_idx(fashion / "t10k-images-idx3-ubyte.gz").float() / 255
        print(f"Fashion-MNIST: {(labels_of(clothes) == NOT_A_DIGIT).float().mean():.2%} rejected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", metavar="MODEL")
    parser.add_argument("--fashion", type=Path)
    options = parser.parse_args()
    if options.out:
        write(options.mnist, options.out)
    if options.measure:
        measure(options.measure, options.mnist, options.fashion)


if __name__ == "__main__":
    main()
