"""Image data: for classification (`LabelledImages`, for ViT) or as pixel sequences (`PixelSequences`, for image GPT).

    read_images("mnist/train-images-idx3-ubyte.gz")    MNIST's idx files, labels from the file beside it, and the names
                                                       of the classes from a classes.txt beside it, if there is one
    read_images("cifar10/train.npz")                   numpy's arrays: images (N, H, W) or (N, H, W, C), uint8; labels
                                                       (N,) and names of the classes if there are any
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
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

ImageSize = int | tuple[int, int] | None  # the side of a square, or height and width; None: as it is


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
        if self.labels is not None and not 0 <= self.labels.min() <= self.labels.max() < len(self.names):
            raise ValueError(
                f"labels are from {self.labels.min()} to {self.labels.max()}, of {len(self.names)} classes"
            )

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

    def with_names(self, names: Sequence[str]) -> ImageSet:
        """The same images with labels that count these names, of which its own are some: validation data may lack a
        class."""
        if unknown := sorted(set(self.names) - set(names)):
            raise ValueError(f"the validation data has classes that the training data lacks: {', '.join(unknown[:5])}")
        if self.labels is None:
            return self
        numbers = np.array([names.index(name) for name in self.names], dtype=np.int64)
        return ImageSet(self.pixels, numbers[self.labels], tuple(names), self.top)

    def scaled(self, indices: Sequence[int] | slice) -> Tensor:
        """Images with these indices as floats from -1 to 1, (N, C, H, W)."""
        return torch.from_numpy(self.pixels[indices]).float() * (2 / self.top) - 1


class LabelledImages:
    """Images as uint8 from 0 to 255, and their labels; the training device scales and augments them (augment.py)."""

    lengths: None = None

    def __init__(self, images: ImageSet) -> None:
        if images.labels is None:
            raise ValueError("to tell what is on an image, examples with labels are needed, and these have none")
        self.images, self.names = images, images.names
        self._levels = np.round(np.arange(images.top + 1) * (255 / images.top)).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of how it is split into examples."""
        return content_digest("images", self.images.fingerprint)

    def batch(self, draws: Sequence[Draw], seed: int) -> Batch:
        """The examples of these draws as one padded batch."""
        indices = [d.index for d in draws]
        pixels = self.images.pixels[indices]
        if self.images.top != 255:
            pixels = self._levels[pixels]
        assert self.images.labels is not None
        return Batch(images=torch.from_numpy(pixels), targets=torch.from_numpy(self.images.labels[indices]))


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
        self.ids = nearest_colours(images, self.palette)  # (N, H·W)

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


def nearest_colours(images: ImageSet, palette: Tensor) -> np.ndarray:
    """The colours (N, H·W) of all pixels, as numbers of the palette (K, C); each level of grey is looked up once."""
    if images.pixels.shape[1] == 1:
        levels = ImageSet(np.arange(images.top + 1, dtype=np.uint8).reshape(-1, 1, 1, 1), top=images.top)
        table = quantize(levels.scaled(slice(None)), palette)[:, 0].numpy().astype(np.uint16)
        return table[images.pixels].reshape(len(images), -1)
    parts = [quantize(images.scaled(slice(begin, begin + 1024)), palette) for begin in range(0, len(images), 1024)]
    return torch.cat(parts).numpy().astype(np.uint16)


def find_palette(images: ImageSet, n_colours: int, n_images: int = 2000) -> Tensor:
    """A palette (K, C) from -1 to 1: equidistant grey levels, or k-means centres of some images' colours."""
    if not 2 <= n_colours < 2**16:
        raise ValueError(f"{n_colours} colours: 2 to {2**16 - 1} are possible")
    if images.pixels.shape[1] == 1:
        return torch.linspace(-1, 1, n_colours)[:, None]
    chosen = np.random.default_rng(0).permutation(len(images))[:n_images]
    return find_clusters(images.scaled(np.sort(chosen).tolist()), n_colours)


# --- reading --------------------------------------------------------------------------------------------------------


def read_images(path: str | Path, *, size: ImageSize = None, labels: bool = True) -> ImageSet:
    """The images of an idx or .npz file or of a folder; `size` resizes those of a folder. With `labels`, a
    folder has a subfolder for each class."""
    path = Path(path)
    if path.is_dir():
        return read_image_folder(path, size=size, labels=labels)
    if path.suffix == ".npz":
        arrays = read_npz(path)
        if "images" not in arrays:
            raise ValueError(f"{path} has {', '.join(arrays) or 'no arrays'}: it should have images, and labels (N,)")
        return ImageSet.of(arrays["images"], arrays.get("labels"), names=arrays.get("names", np.array([])).tolist())
    pixels = read_idx(path)
    if pixels.ndim not in (3, 4):
        raise ValueError(f"{path} has {pixels.ndim} dimensions and holds no images: is it the file of the labels?")
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    if beside == path or not beside.is_file():
        return ImageSet.of(pixels)
    classes = read_idx(beside)
    if classes.ndim != 1:
        raise ValueError(f"{beside} has {classes.ndim} dimensions and holds no labels")
    listed = path.with_name("classes.txt")
    names = listed.read_text(encoding="utf-8").split("\n") if listed.is_file() else []
    return ImageSet.of(pixels, classes, names=[name.strip() for name in names if name.strip()])


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


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of numpy's .npz: numbers and texts alone, nothing is unpickled."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                with archive.open(part) as file:
                    version = np.lib.format.read_magic(file)
                    read_header = np.lib.format.read_array_header_1_0
                    if version != (1, 0):
                        read_header = np.lib.format.read_array_header_2_0
                    shape, fortran_order, kind = read_header(file, max_header_size=10_000)
                    n_bytes = math.prod(shape) * kind.itemsize
                    if kind.kind not in "uiU" or fortran_order or n_bytes > min(part.file_size, LARGEST_SET):
                        raise ValueError(f"{part.filename} is {kind} {shape}, not an array of whole numbers or texts")
                    data = file.read(n_bytes)
                    found[part.filename.removesuffix(".npy")] = np.frombuffer(data, kind).reshape(shape)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError) as problem:
        raise ValueError(f"{path} is no .npz file of images: {problem}") from None
    return found


def read_image_folder(folder: Path, *, size: ImageSize = None, labels: bool = True) -> ImageSet:
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


def is_image_data(path: Path) -> bool:
    """Whether a path is one of images with labels: a folder with images in two subfolders or more, or a file of
    arrays."""
    if path.is_dir():
        classes = (p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        return sum(bool(_image_files(folder, "*")) for folder in classes) > 1
    return path.suffix == ".npz" or "-images-idx" in path.name


def count_images(folder: Path) -> tuple[int, list[str]]:
    """The number of images in a folder's classes, and the classes' names."""
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return len(_image_files(folder, "*/*")), names


def common_size(folder: Path) -> int | None:
    """The side of a folder's images if all are squares of one size, read from their headers; else None."""
    sizes = {image_size(path) for path in _image_files(folder, "*/*")}
    height, width = next(iter(sizes), (0, 1))
    return height if len(sizes) == 1 and height == width else None


def _image_files(folder: Path, pattern: str) -> list[Path]:
    """The images of a folder by name, without hidden files and folders."""
    found = (path for path in folder.glob(pattern) if path.suffix.lower() in ENDINGS and path.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, from its header; ValueError if it is none, or too large."""
    with _opened(path) as image:
        return image.height, image.width


def decode_image(path: Path, size: ImageSize = None) -> np.ndarray:
    """One image as (H, W, 3), resized to `size`; ValueError before decoding if it is too large."""
    with _opened(path) as image:
        plain = image.convert("RGB")
        if size is not None:
            height, width = size if isinstance(size, tuple) else (size, size)
            plain = plain.resize((width, height), import_module("PIL.Image").Resampling.BICUBIC)
        return np.asarray(plain)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An image file, its header read and its size checked."""
    try:
        pillow = import_module("PIL.Image")
    except ImportError:
        raise ValueError("to read image files the package Pillow is needed: pip install pillow") from None
    try:
        with pillow.open(path) as image:  # reads the header alone
            width, height = image.size
            if width * height > LARGEST_IMAGE:
                raise ValueError(f"{path} has {width} x {height} pixels: at most {LARGEST_IMAGE} are decoded")
            yield image
    except pillow.DecompressionBombError as problem:  # Pillow's own limit, which is higher than ours
        raise ValueError(f"{path} has too many pixels and is not decoded: {problem}") from None
    except (OSError, SyntaxError, EOFError) as problem:
        raise ValueError(f"{path} is no image, or a damaged one: {problem}") from None
