"""Images from every source, refused before decoding where they would be too large."""

import gzip
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful.data.dataset import Draw
from heedful.data.images import (
    ImageSet,
    LabelledImages,
    PixelSequences,
    load_digits,
    nearest_colours,
    read_idx,
    read_images,
)
from heedful.models.image_gpt import ImageGPT, ImageGPTConfig, quantize, to_image
from heedful.train.recipe import DataSettings

SHARED = Path(__file__).parents[3] / "shared" / "data" / "mnist"
random = np.random.default_rng(0)
GREY = random.integers(0, 256, (6, 4, 4))
COLOURED = random.integers(0, 256, (6, 4, 5, 3))


def idx(array):
    array = np.asarray(array)
    return (
        b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype("u1").tobytes()
    )


def test_idx_files_with_their_labels_beside_them(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(GREY))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx([3, 1, 4, 1, 5, 0]))
    found = read_images(tmp_path / "train-images-idx3-ubyte")
    assert np.array_equal(found.pixels[:, 0], GREY) and found.labels.tolist() == [3, 1, 4, 1, 5, 0]
    assert found.names == ("0", "1", "2", "3", "4", "5")
    with gzip.open(tmp_path / "alone.gz", "wb") as file:
        file.write(idx(GREY))
    assert read_images(tmp_path / "alone.gz").labels is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no idx file"),
        (b"\x89PNG", "no idx file of bytes"),
        (b"\0\0\x0d\x03", "no idx file of bytes"),
        (b"\0\0\x08\x03\0\0", "says that it holds"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "at most"),
        (
            b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1) + b"abc",
            "should hold 4294967295 bytes, and it holds 3",
        ),
        (idx([1, 2]) + b"x", "holds more"),
        (gzip.compress(idx(GREY), mtime=0)[:40], "damaged|no idx"),
    ],
)
def test_damaged_idx_files_are_refused_without_asking_for_memory(tmp_path, content, message):
    path = tmp_path / ("a.gz" if content[:2] == b"\x1f\x8b" else "a")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


def test_labelled_images_are_bytes():
    data = LabelledImages(ImageSet.of(COLOURED, [0, 1, 2, 0, 1, 2], names=["cat", "dog", "cow"]))
    batch = data.batch([Draw(0, 4), Draw(0, 0)], 0)
    assert batch.images.shape == (2, 3, 4, 5) and batch.targets.tolist() == [1, 0]
    assert batch.images.dtype == torch.uint8
    assert np.array_equal(batch.images[0].numpy(), COLOURED[4].transpose(2, 0, 1))
    with pytest.raises(ValueError, match="labels"):
        LabelledImages(ImageSet.of(GREY))
    digits = LabelledImages(ImageSet.of(np.arange(16).reshape(1, 4, 4) + 1, [0], top=16))
    want = torch.arange(1, 17).view(4, 4) / 16 * 255
    assert (digits.batch([Draw(0, 0)], 0).images[0, 0] - want).abs().max() <= 0.5


def test_arrays_of_numpy(tmp_path):
    path = tmp_path / "train.npz"
    for save in np.savez, np.savez_compressed:
        save(path, images=COLOURED.astype(np.uint8), labels=[0, 1, 1, 0, 1, 0], names=["cat", "dog"])
        found = read_images(path)
        assert np.array_equal(found.pixels, COLOURED.transpose(0, 3, 1, 2)) and found.names == ("cat", "dog")
        assert found.labels.tolist() == [0, 1, 1, 0, 1, 0]
    np.savez(path, images=GREY.astype(np.uint8))
    assert read_images(path).labels is None and read_images(path).pixels.shape == (6, 1, 4, 4)
    np.savez(path, pictures=GREY)
    with pytest.raises(ValueError, match="has pictures: it should have images"):
        read_images(path)
    np.savez(path, images=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="whole numbers or texts"):
        read_images(path)
    np.savez(path, images=GREY.astype(np.uint8), labels=[0, 1, 1, 0, 1, 2], names=["cat", "dog"])
    with pytest.raises(ValueError, match="labels are from 0 to 2, of 2 classes"):
        read_images(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"no \.npz file"):
        read_images(path)


def test_names_beside_idx_files_and_a_class_that_validation_lacks(tmp_path):
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx(GREY))
    (tmp_path / "a-labels-idx1-ubyte").write_bytes(idx([1, 1, 0, 1, 1, 0]))
    (tmp_path / "classes.txt").write_text("shirt\nboot\n")
    found = read_images(tmp_path / "a-images-idx3-ubyte")
    assert found.names == ("shirt", "boot")
    assert found.with_names(("boot", "hat", "shirt")).labels.tolist() == [0, 0, 2, 0, 0, 2]
    with pytest.raises(ValueError, match="training data lacks: boot"):
        found.with_names(("shirt", "hat"))


def test_grey_pixels_have_even_levels_and_a_start():
    data = PixelSequences(ImageSet.of(np.array([[[0, 16], [8, 3]]]), top=16), 17)
    assert (data.vocab_size, data.start_id) == (18, 17)
    batch = data.batch([Draw(0, 0)], 0)
    assert batch.targets.tolist() == [[0, 16, 8, 3]] and batch.tokens.tolist() == [[17, 0, 16, 8]]
    coarse = PixelSequences(ImageSet.of(np.array([[[0, 16], [8, 3]]]), top=16), 3)
    assert coarse.batch([Draw(0, 0)], 0).targets.tolist() == [[0, 2, 1, 0]]


def test_coloured_pixels_have_a_palette_that_validation_shares():
    colours = np.array([[250, 0, 0], [0, 250, 0], [0, 0, 250], [250, 250, 250]])
    pictures = ImageSet.of(colours[random.integers(0, 4, (8, 5, 4))])
    data = PixelSequences(pictures, 4)
    images = to_image(data.batch([Draw(0, 3)], 0).targets, data.palette, height=5)
    torch.testing.assert_close(images[0], pictures.scaled([3])[0], atol=1e-5, rtol=0)
    again = PixelSequences(pictures, palette=data.palette)
    assert again.fingerprint == data.fingerprint


def test_pixels_are_what_image_gpt_wants():
    data = PixelSequences(ImageSet.of(GREY), 8)
    model = ImageGPT.create(ImageGPTConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=data.vocab_size, max_len=16))
    batch, lesson = data.batch([Draw(0, 2)], 0), model.training_batch(data.batch([Draw(0, 2)], 0).targets)
    assert torch.equal(batch.tokens, lesson.tokens) and torch.equal(batch.targets, lesson.targets)


def test_arrays_that_are_no_images_are_refused():
    with pytest.raises(ValueError, match="whole numbers from 0 to 255"):
        ImageSet.of(np.full((2, 3, 3), 0.5))
    with pytest.raises(ValueError, match="whole numbers from 0 to 16"):
        ImageSet.of(np.full((2, 3, 3), 17), top=16)
    with pytest.raises(ValueError, match="6 images and 2 labels"):
        ImageSet.of(GREY, [0, 1])
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        ImageSet.of(np.zeros((3, 3)))


def test_digits_come_with_scikit_learn():
    pytest.importorskip("sklearn", reason="wants scikit-learn")
    found = load_digits()
    assert found.pixels.shape == (1797, 1, 8, 8) and found.top == 16 and len(found.names) == 10
    assert np.bincount(found.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.skipif(not SHARED.exists(), reason="wants MNIST in ../shared/data")
def test_mnist_is_read_whole():
    found = read_images(SHARED / "t10k-images-idx3-ubyte.gz")
    assert found.pixels.shape == (10000, 1, 28, 28) and np.bincount(found.labels)[1] == 1135


# --- image files -----------------------------------------------------------------------------------------------------


def png(width, height, rows=b""):
    """A PNG whose header says so; only small ones need their rows."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def red(n):
    return png(n, n, (b"\0" + b"\xff\0\0" * n) * n)


@pytest.fixture
def folder(tmp_path):
    for name in "cat", "dog":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(red(4))
    return tmp_path


def test_without_pillow_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        read_images(folder)


def test_a_folder_for_each_class(folder):
    pytest.importorskip("PIL", reason="wants Pillow")
    (folder / "dog" / "2.png").write_bytes(red(4))
    (folder / "dog" / "notes.txt").write_text("no image")
    found = read_images(folder)
    assert found.names == ("cat", "dog") and found.labels.tolist() == [0, 1, 1]
    assert found.pixels.shape == (3, 3, 4, 4) and found.pixels[0, :, 0, 0].tolist() == [255, 0, 0]
    (folder / "dog" / "3.png").write_bytes(red(6))
    with pytest.raises(ValueError, match=r"differ in size \(4 x 4, 6 x 6\): set data.image_size") as problem:
        read_images(folder)
    setting = re.search(r"data\.(\w+)", str(problem.value))[1]
    assert hasattr(DataSettings, setting)  # the message names one that exists
    assert read_images(folder, size=8).pixels.shape == (4, 3, 8, 8)


def test_images_without_labels_need_no_classes(tmp_path):
    pytest.importorskip("PIL", reason="wants Pillow")
    (tmp_path / "more").mkdir()
    for name in ("a.png", "more/b.png", ".hidden.png"):
        (tmp_path / name).write_bytes(red(4))
    (tmp_path / "notes.txt").write_text("no image")
    found = read_images(tmp_path, labels=False)
    assert found.labels is None and found.pixels.shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match="for each class"):
        read_images(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="should have images"):
        read_images(tmp_path / "empty", labels=False)


@pytest.mark.filterwarnings("ignore")  # Pillow's own, which says the same
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(50_000, 50_000), "too many pixels|at most"),
        (png(10_000, 10_000), "10000 x 10000 pixels: at most"),
        (red(4)[:50], "damaged"),
        (b"nonsense", "no image"),
        (b"", "no image"),
    ],
)
def test_large_and_damaged_images_are_refused_before_decoding(folder, content, message):
    pytest.importorskip("PIL", reason="wants Pillow")
    (folder / "cat" / "2.png").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_images(folder)


def test_levels_of_grey_are_looked_up_as_each_pixel_would_be():
    images = ImageSet.of(np.random.default_rng(0).integers(0, 17, (5, 6, 7)), top=16)
    palette = torch.linspace(-1, 1, 6)[:, None]
    each = quantize(images.scaled(slice(None)), palette)
    assert nearest_colours(images, palette).tolist() == each.tolist()
