"""Image data: for classification (`LabelledImages`, for ViT) or as pixel sequences (`PixelSequences`, for image GPT).

    read_images("mnist/train-images-idx3-ubyte.gz")    MNIST's idx files, labels from the file beside it
    read_images("photos/")                             a folder with a subfolder per class (needs Pillow); without
                                                       labels any folder of images
    load_digits()                                      1,797 digits of 8 x 8 that come with scikit-learn, or drawn ones

Sizes are checked before decoding, since a header can claim gigabytes.

    N images, B batch, C channels, H height, W width, K colours
"""

from __future__ import annotations

import gzip
import math
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.data.dataset import Draw
from heedful.data.ragged import content_digest
from heedful.data.samples import draw_digits
from heedful.models.base import Batch
from heedful.models.image_gpt import find_clusters, quantize

LARGEST_IMAGE = 2**26  # pixels; a photograph has about 2^24
LARGEST_SET = 2**33  # bytes of all images together
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageSet:
    """Images as integers from 0 to `top`, with optional labels."""

    pixels: np.ndarray  # (N, C, H, W) uint8
    labels: np.ndarray | None = None  # (N,) int64
    names: tuple[str, ...] = ()  # of the classes
    top: int = 255

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 4 or not all(shape):
            raise ValueError(f"images are uint8 (N, C, H, W), not {self.pixels.dtype} {shape}")
        if self.labels is not None and len(self.labels) != len(self.pixels):
            raise ValueError(f"{len(self.pixels)} images and {len(self.labels)} labels: each image needs one")

    @classmethod
    def of(cls, images: Any, labels: Any = None, *, names: Sequence[str] = (), top: int = 255) -> ImageSet:
        """From an array (N, H, W), (N, H, W, C) or (N, C, H, W) of whole numbers from 0 to `top`."""
        found = np.asarray(images)
        if found.ndim == 3:
            found = found[:, None]
        elif found.ndim == 4 and found.shape[1] not in (1, 3) and found.shape[3] in (1, 3):
            found = found.transpose(0, 3, 1, 2)
        if found.size and not (found.min() >= 0 and found.max() <= top and np.all(found == np.floor(found))):
            raise ValueError(f"pixels are whole numbers from 0 to {top}: set `top`, or scale them")
        numbers = None if labels is None else np.asarray(labels).astype(np.int64)
        if numbers is not None and not names:
            names = [str(i) for i in range(int(numbers.max()) + 1)]
        return cls(np.ascontiguousarray(found.astype(np.uint8)), numbers, tuple(names), top)

    def __len__(self) -> int:
        return len(self.pixels)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("pictures", self.pixels, self.labels, self.names, self.top)

    def subset(self, indices: np.ndarray) -> ImageSet:
        """The images with these indices."""
        labels = None if self.labels is None else self.labels[indices]
        return ImageSet(self.pixels[indices], labels, self.names, self.top)

    def scaled(self, indices: Sequence[int] | slice) -> Tensor:
        """Images with these indices as floats from -1 to 1, (N, C, H, W)."""
        return torch.from_numpy(self.pixels[indices]).float() * (2 / self.top) - 1


class LabelledImages:
    """Images scaled to -1 to 1 (mean and std 1/2, as for ViT's checkpoints), and their labels.

    `shift` is data augmentation: a random translation by up to so many pixels per example and epoch, padded with black.
    """

    lengths: None = None

    def __init__(self, images: ImageSet, *, shift: int = 0) -> None:
        if images.labels is None:
            raise ValueError("to tell what is on an image, examples with labels are needed, and these have none")
        if not 0 <= shift < min(images.pixels.shape[2:]):
            raise ValueError(f"a shift of {shift} pixels: it must be from 0 to below the image's size")
        self.images, self.shift, self.names = images, shift, images.names

    def __len__(self) -> int:
        return len(self.images)

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("images", self.images.fingerprint, self.shift)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        indices = [d.index for d in draws]
        images = self.images.scaled(indices)
        if self.shift:
            images = torch.stack([self._shift(x, d.random(seed)) for x, d in zip(images, draws, strict=True)])
        assert self.images.labels is not None
        return Batch(images=images, targets=torch.from_numpy(self.images.labels[indices]))

    def _shift(self, image: Tensor, random: np.random.Generator) -> Tensor:
        down, right = random.integers(0, 2 * self.shift + 1, 2).tolist()
        wide = torch.nn.functional.pad(image, (self.shift,) * 4, value=-1.0)
        return wide[:, down : down + image.shape[1], right : right + image.shape[2]]


class PixelSequences:
    """Images as sequences of colour ids, row by row, for next-pixel prediction (image GPT).

    The palette (K, C) has `n_colours` equidistant grey levels, or for colour images the centres of k-means clusters
    (Chen et al. 2020, section 3.2). The start token is id K. Validation data gets the palette of the training data.
    """

    lengths: None = None

    def __init__(self, images: ImageSet, n_colours: int = 16, *, palette: Tensor | None = None) -> None:
        self.images = images
        self.palette = find_palette(images, n_colours) if palette is None else palette
        if len(self.palette) >= 2**16:
            raise ValueError(f"{len(self.palette)} colours: at most {2**16 - 1} can be told apart")
        parts = [
            quantize(images.scaled(slice(begin, begin + 1024)), self.palette) for begin in range(0, len(images), 1024)
        ]
        self.ids = torch.cat(parts).numpy().astype(np.uint16)  # (N, H·W)

    @property
    def start_id(self) -> int:
        """The token before the first pixel of an image."""
        return len(self.palette)

    @property
    def vocab_size(self) -> int:
        """Number of colours, plus the start token."""
        return len(self.palette) + 1

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("pixels", self.ids, self.palette.numpy())

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        ids = torch.from_numpy(self.ids[[d.index for d in draws]].astype(np.int64))
        first = torch.full((len(ids), 1), self.start_id)
        return Batch(torch.cat([first, ids[:, :-1]], dim=1), targets=ids)


def find_palette(images: ImageSet, n_colours: int, n_images: int = 2000) -> Tensor:
    """A palette (K, C) from -1 to 1: equidistant grey levels, or k-means centres of some images' colours."""
    if not 2 <= n_colours < 2**16:
        raise ValueError(f"{n_colours} colours: 2 to {2**16 - 1} are possible")
    if images.pixels.shape[1] == 1:
        return torch.linspace(-1, 1, n_colours)[:, None]
    chosen = np.random.default_rng(0).permutation(len(images))[:n_images]
    return find_clusters(images.scaled(np.sort(chosen).tolist()), n_colours)


# --- reading --------------------------------------------------------------------------------------------------------


def read_images(path: str | Path, *, size: int | None = None, labels: bool = True) -> ImageSet:
    """The images of an idx file or of a folder; `size` resizes those of a folder to squares. With `labels`, a folder
    has a subfolder for each class."""
    path = Path(path)
    if path.is_dir():
        return read_image_folder(path, size=size, labels=labels)
    pixels = read_idx(path)
    if pixels.ndim not in (3, 4):
        raise ValueError(f"{path} has {pixels.ndim} dimensions and holds no images: is it the file of the labels?")
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    if beside == path or not beside.is_file():
        return ImageSet.of(pixels)
    classes = read_idx(beside)
    if classes.ndim != 1:
        raise ValueError(f"{beside} has {classes.ndim} dimensions and holds no labels")
    return ImageSet.of(pixels, classes)


def load_digits() -> ImageSet:
    """The 8 x 8 digits of scikit-learn: 1,797 images in 17 levels of grey, of 10 classes. Without scikit-learn as many
    digits are drawn in several fonts, and a warning tells."""
    try:
        sets = import_module("sklearn.datasets")
    except ImportError:
        told = "handwritten digits come with scikit-learn, which is not installed: drawn ones are used instead"
        warnings.warn(told, stacklevel=2)
        return ImageSet.of(*draw_digits(), top=16)
    found = sets.load_digits()
    return ImageSet.of(found.images, found.target, top=16)


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes in MNIST's idx format: 0 0 8 and the number of dimensions, the dimensions, the data."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
                raise ValueError(f"{path} is no idx file of bytes: it begins with {head.hex(' ')}, not 00 00 08")
            dimensions = file.read(4 * head[3]).ljust(4 * head[3], b"\0")  # truncated ones become too small
            sizes = np.frombuffer(dimensions, dtype=">u4").astype(int).tolist()
            total = math.prod(sizes)
            if not 0 < total <= LARGEST_SET:
                raise ValueError(f"{path} says that it holds {sizes} bytes: at most {LARGEST_SET} are read")
            # Read in chunks, so that a wrong header cannot allocate much memory.
            parts = []
            left = total
            while left and (part := file.read(min(left, 2**24))):
                parts.append(part)
                left -= len(part)
            if left or file.read(1):
                found = total - left
                raise ValueError(f"{path} should hold {total} bytes, and it holds {found if left else 'more'}")
        except (OSError, EOFError, zlib.error) as problem:
            raise ValueError(f"{path} is damaged: {problem}") from None
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(sizes)


def read_image_folder(folder: Path, *, size: int | None = None, labels: bool = True) -> ImageSet:
    """Read a folder with a subfolder of images per class, named after it, or without `labels` all images in it and
    below it; decoded by Pillow."""
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")) if labels else []
    files = [(path, label) for label, name in enumerate(names) for path in _image_files(folder / name, "*")]
    if not labels:
        files = [(path, 0) for path in _image_files(folder, "**/*")]
    if not files or len(names) == 1 or (labels and not names):
        wanted = "a folder with images for each class, at least two" if labels else f"images ({', '.join(ENDINGS)})"
        raise ValueError(f"{folder} should have {wanted}")
    found = [decode_image(path, size) for path, _ in files]
    shapes = sorted({image.shape[:2] for image in found})
    if len(shapes) > 1:
        small, large = (f"{height} x {width}" for height, width in (shapes[0], shapes[-1]))
        raise ValueError(
            f"the images of {folder} differ in size ({small}, {large}): set data.image_size to resize them all"
        )
    return ImageSet.of(np.stack(found), [label for _, label in files] if labels else None, names=names)


def _image_files(folder: Path, pattern: str) -> list[Path]:
    """The images of a folder by name, without hidden files and folders."""
    found = (path for path in folder.glob(pattern) if path.suffix.lower() in ENDINGS and path.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def decode_image(path: Path, size: int | None = None) -> np.ndarray:
    """One image as (H, W, 3), resized to a square of `size`; ValueError before decoding if it is too large."""
    try:
        pillow = import_module("PIL.Image")
    except ImportError:
        raise ValueError("to read image files the package Pillow is needed: pip install pillow") from None
    try:
        with pillow.open(path) as image:  # reads the header alone
            width, height = image.size
            if width * height > LARGEST_IMAGE:
                raise ValueError(f"{path} has {width} x {height} pixels: at most {LARGEST_IMAGE} are decoded")
            plain = image.convert("RGB")
            if size is not None:
                plain = plain.resize((size, size), pillow.Resampling.BICUBIC)
            return np.asarray(plain)
    except pillow.DecompressionBombError as problem:  # Pillow's own limit, which is higher than ours
        raise ValueError(f"{path} has too many pixels and is not decoded: {problem}") from None
    except (OSError, SyntaxError, EOFError) as problem:
        raise ValueError(f"{path} is no image, or a damaged one: {problem}") from None
