"""Augmentation against Pillow's operations and the papers' formulas; random numbers follow from torch's seed."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.data import augment
from heedful.data.augment import (
    OPERATIONS,
    SCALING,
    Augmentation,
    apply_operations,
    augment_images,
    mix_images,
    mix_labels,
    scale_pixels,
)
from heedful.models.base import Batch, Output
from heedful.train.objectives import make_objective

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 12, 10)).astype(np.uint8))
UNIT = PIXELS.float() / 255
ONE = torch.ones(len(PIXELS))


def operate(name, strength=ONE, sign=ONE, x=UNIT):
    drawn = torch.full((len(x),), OPERATIONS.index(name))
    return apply_operations(x, drawn, strength, sign)


def pillow(function, x=PIXELS):
    image = pytest.importorskip("PIL.Image", reason="wants Pillow")
    made = [np.asarray(function(image.fromarray(one.permute(1, 2, 0).numpy()))) for one in x]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2) / 255


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("brightness", "Brightness"), ("colour", "Color"), ("contrast", "Contrast"), ("sharpness", "Sharpness")],
)
def test_enhancements_are_pillows(name, theirs, sign):
    enhance = pytest.importorskip("PIL.ImageEnhance", reason="wants Pillow")
    strength = 0.5
    want = pillow(lambda image: getattr(enhance, theirs)(image).enhance(1 + 0.9 * sign * strength))
    found = operate(name, ONE * strength, ONE * sign)
    torch.testing.assert_close(found, want, atol=2.01 / 255, rtol=0)  # Pillow rounds on the way


def test_operations_on_histograms_and_bits_are_pillows():
    operations = pytest.importorskip("PIL.ImageOps", reason="wants Pillow")
    dark = PIXELS // 3 + 20
    unit = dark.float() / 255
    torch.testing.assert_close(operate("equalize", x=unit), pillow(operations.equalize, dark), atol=1e-6, rtol=0)
    found = operate("auto_contrast", x=unit)
    torch.testing.assert_close(found, pillow(operations.autocontrast, dark), atol=1.01 / 255, rtol=0)
    found = operate("posterize", ONE)
    torch.testing.assert_close(found, pillow(lambda x: operations.posterize(x, 4)), atol=1e-6, rtol=0)
    found = operate("solarize", ONE * 0.5)
    torch.testing.assert_close(found, pillow(lambda x: operations.solarize(x, 128)), atol=1e-6, rtol=0)
    large = torch.from_numpy(np.random.default_rng(1).integers(0, 60, (2, 3, 40, 40)).astype(np.uint8))
    found = operate("equalize", torch.ones(2), torch.ones(2), large / 255)
    torch.testing.assert_close(found, pillow(operations.equalize, large), atol=1e-6, rtol=0)


def test_geometry():
    assert torch.equal(operate("identity"), UNIT)
    torch.testing.assert_close(operate("rotate", ONE * 0), UNIT)
    move = operate("translate_x", ONE * (3 / 10) / augment.TRANSLATE)  # 3 of 10 pixels
    torch.testing.assert_close(move[:, :, :, :7], UNIT[:, :, :, 3:])
    assert not move[:, :, :, 7:].any()
    move = operate("translate_y", ONE * (3 / 12) / augment.TRANSLATE, -ONE)
    torch.testing.assert_close(move[:, :, 3:], UNIT[:, :, :-3])
    square = UNIT[:, :, :10]
    turned = square
    for _ in range(3):  # three times 30 degrees, of a smooth image
        turned = operate("rotate", x=augment.smooth_pixels(augment.smooth_pixels(turned)))
    inner = (slice(None), slice(None), slice(4, 6), slice(4, 6))
    smooth = augment.smooth_pixels(augment.smooth_pixels(augment.smooth_pixels(square)))
    assert (turned - torch.rot90(smooth, 1, (2, 3)))[inner].abs().mean() < 0.12
    sheared = operate("shear_x", x=square)
    column = torch.arange(10) + 0.5 - 5 + 0.3 * (2.5 - 5)  # of row 2
    low = (column + 4.5).floor().long()[2:-2]
    share = (column + 4.5)[2:-2] - low
    torch.testing.assert_close(
        sheared[:, :, 2, 2:-2], square[:, :, 2, low] * (1 - share) + square[:, :, 2, low + 1] * share
    )


def test_a_shift_pads_with_black_and_a_flip_mirrors():
    torch.manual_seed(0)
    seen = [Augmentation(shift=2)(PIXELS) for _ in range(20)]
    wide = torch.nn.functional.pad(scale_pixels(PIXELS), (2,) * 4, value=-1.0)
    possible = torch.stack([wide[:, :, i : i + 12, j : j + 10] for i in range(5) for j in range(5)])
    for images in seen:
        assert ((images - possible).abs().amax(dim=(2, 3, 4)) < 1e-6).any(dim=0).all()
    assert len({tuple(images[0].flatten().tolist()) for images in seen}) > 8
    flipped = torch.cat([Augmentation(flip=True)(PIXELS) for _ in range(20)])
    plain = scale_pixels(PIXELS).repeat(20, 1, 1, 1)
    same = (flipped - plain).abs().amax(dim=(1, 2, 3)) < 1e-6
    mirrored = (flipped - plain.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-6
    assert (same ^ mirrored).all() and 30 < same.sum() < 90


def test_erased_rectangles_are_as_large_as_they_should_be():
    torch.manual_seed(0)
    images = torch.zeros(400, 1, 32, 32, dtype=torch.uint8)
    share = (Augmentation(erase=0.5)(images) > -1).float().mean(dim=(1, 2, 3))
    assert 150 < (share > 0).sum() < 250
    erased = share[share > 0]
    assert erased.min() > 0.005 and erased.max() < 0.4 and 0.1 < erased.mean() < 0.25


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_images_have_the_labels_of_their_pixels(settings):
    torch.manual_seed(0)
    labels = torch.arange(200) % 2
    images = (labels * 2.0 - 1)[:, None, None, None].expand(-1, 1, 16, 16)  # the label can be read off the pixels
    mixed, share = Augmentation(**settings).mix(images)
    shares = mix_labels(labels, share, 3)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(200))
    torch.testing.assert_close(shares[:, 1], (mixed.mean(dim=(1, 2, 3)) + 1) / 2, atol=1e-5, rtol=0)
    assert shares[:, 2].max() == 0 and share.std() > 0.1
    whole = (mixed.abs() == 1).all(dim=3).all(dim=2)[:, 0].float().mean()
    assert (whole == 1) if settings.keys() == {"cutmix"} else (whole < 0.9)


def test_the_same_seed_augments_alike_and_off_is_only_scaling():
    every = Augmentation(shift=2, flip=True, augment=2, erase=0.5, mixup=0.4, cutmix=1.0)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(every.mix(every(PIXELS))[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert runs[0].min() >= -1 and runs[0].max() <= 1
    assert torch.equal(SCALING(PIXELS), PIXELS.float() * (2 / 255) - 1)
    assert torch.equal(SCALING(SCALING(PIXELS)), SCALING(PIXELS))


class Counter(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += not function.is_view
        return function(*args, **(kwargs or {}))


def test_nothing_but_the_draws_depends_on_python(monkeypatch):
    every = Augmentation(shift=2, flip=True, augment=1, erase=0.5, mixup=0.4, cutmix=1.0)
    images, noise = (torch.empty(PIXELS.shape, dtype=kind, device="meta") for kind in (torch.uint8, torch.float32))
    draws, weights = (torch.empty(n, 6, 1, 1, 1, device="meta") for n in (11, 3))
    augmented = augment_images(every, images, draws, noise)  # reading a number would fail, and synchronize on a GPU
    assert mix_images(augmented, weights, weights[0], weights[1])[0].shape == PIXELS.shape
    monkeypatch.setattr(augment, "compiled_augment", lambda settings, images, *draws: images)
    monkeypatch.setattr(augment, "compiled_mix", lambda images, *draws: images)
    with Counter() as counter:
        every.mix(every(PIXELS))
    assert counter.n <= 7  # each is a launch on a GPU


class Recorder(torch.nn.Module):
    def forward(self, batch):
        self.seen = batch.images
        return Output(hidden=batch.images, logits=batch.images.mean(dim=(2, 3)))


def test_only_training_augments_and_mixed_labels_make_the_loss():
    model, labels = Recorder(), torch.tensor([0, 1, 2, 0, 1, 2])
    batch = Batch(images=PIXELS, targets=labels)
    objective = make_objective({"name": "classify", "smoothing": 0.1}, augment=Augmentation(mixup=0.5))
    torch.manual_seed(3)
    loss = objective(model, batch)
    torch.manual_seed(3)
    mixed, share = Augmentation(mixup=0.5).mix(scale_pixels(PIXELS))
    torch.testing.assert_close(model.seen, mixed)
    logs = mixed.mean(dim=(2, 3)).log_softmax(dim=1)

    def smoothed(own):  # the loss of one label: 0.9 of it, 0.1 of all
        return -0.9 * logs.gather(1, own[:, None])[:, 0] - 0.1 * logs.mean(dim=1)

    want = (share[:, 0] * smoothed(labels) + (1 - share[:, 0]) * smoothed(labels.roll(1))).sum()
    torch.testing.assert_close(loss.sum, want)
    assert loss.n_targets == 6
    model.eval()
    objective(model, batch)
    assert torch.equal(model.seen, scale_pixels(PIXELS))
    with pytest.raises(ValueError, match="augmented to classify"):
        make_objective({"name": "causal"}, augment=Augmentation(flip=True))
