"""Images as colours and back, their completion, and their features."""

import numpy as np
import pytest
import torch

import heedful
from heedful.generate.batch import greedy_batch
from heedful.models.base import Batch
from heedful.models.image_gpt import ImageGPT, ImageGPTConfig, find_clusters, quantize, to_image
from heedful.recipes import train
from heedful.train.objectives import causal

SIDE, COLOURS = 4, 6


@pytest.fixture
def palette():
    return torch.rand(COLOURS, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture
def ids():
    return torch.randint(COLOURS, (2, SIDE * SIDE), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ImageGPTConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=COLOURS + 1, max_len=SIDE * SIDE, dropout=0.0)
    made = ImageGPT.create(config).eval()
    torch.nn.init.normal_(made.head.weight)  # fresh, it is 0: every colour alike
    return made


def test_an_image_of_cluster_colours_comes_back_as_it_was(ids, palette):
    image = to_image(ids, palette)
    assert image.shape == (2, 3, SIDE, SIDE)
    assert torch.equal(quantize(image, palette), ids)
    assert torch.equal(to_image(quantize(image, palette), palette), image)


def test_pixels_are_read_row_by_row(palette):
    ids = torch.arange(COLOURS)[None]
    image = to_image(ids, palette, height=2)
    assert image.shape == (1, 3, 2, 3)
    assert torch.equal(image[0, :, 0, 2], palette[2]) and torch.equal(image[0, :, 1, 0], palette[3])


def test_a_pixel_becomes_its_nearest_colour():
    palette = torch.tensor([[0.0], [1.0], [0.4]])
    image = torch.tensor([[0.1, 0.9], [0.21, 0.69]])[None, None]
    assert quantize(image, palette).tolist() == [[0, 1, 2, 2]]
    bytes_ = torch.tensor([[1, 9], [3, 6]], dtype=torch.uint8)[None, None]
    assert quantize(bytes_, palette * 10).tolist() == [[0, 1, 2, 2]]


def test_k_means_finds_separate_heaps():
    """Pixels around three colours, unequally many: the palette is the heaps' means."""
    g = torch.Generator().manual_seed(0)
    means = torch.tensor([[-0.8, 0.0, 0.5], [0.9, 0.9, -0.9], [0.0, -0.7, 0.0]])
    heap = torch.tensor([0] * 900 + [1] * 90 + [2] * 34)
    pixels = means[heap] + 0.01 * torch.randn(1024, 3, generator=g)
    image = pixels.T.reshape(1, 3, 32, 32)
    found = find_clusters(image, 3)
    order = torch.cdist(means, found).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    want = torch.stack([pixels[heap == i].mean(0) for i in range(3)])
    assert (found[order] - want).abs().max() < 1e-5
    assert torch.equal(found, find_clusters(image, 3))


def test_a_palette_of_every_colour_loses_nothing(ids, palette):
    image = to_image(ids, palette)
    found = find_clusters(image, len(ids.unique()))
    assert torch.equal(to_image(quantize(image, found), found), image)
    with pytest.raises(ValueError, match="ask for fewer"):
        find_clusters(image, COLOURS + 1)


def test_half_an_image_is_kept_and_completed(model, ids):
    half = ids[:, : ids.shape[1] // 2]
    rest = torch.tensor(greedy_batch(model, model.prompt(half), half.shape[1]))
    whole = torch.cat([half, rest], dim=1)
    assert whole.shape == ids.shape and rest.max() < COLOURS  # the start token is never drawn
    # Step by step is what reading the whole completed image at once says.
    with torch.no_grad():
        logits = model(model.training_batch(whole)).logits
    assert torch.equal(logits.argmax(-1)[:, half.shape[1] :], rest)


def test_an_image_can_begin_from_nothing(model):
    nothing = torch.empty(3, 0, dtype=torch.long)
    assert len(greedy_batch(model, model.prompt(nothing), SIDE * SIDE)[0]) == SIDE * SIDE


def test_a_lesson_asks_for_every_pixel(model, ids):
    batch = model.training_batch(ids)
    assert batch.tokens.shape == ids.shape and (batch.tokens[:, 0] == COLOURS).all()
    assert torch.equal(batch.targets, ids) and torch.equal(batch.tokens[:, 1:], ids[:, :-1])
    assert causal(model, batch).n_targets == ids.numel()


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    """Trained on images of 5 x 6 in two colours, which are in no folders of classes."""
    pillow = pytest.importorskip("PIL.Image", reason="wants Pillow")
    folder = tmp_path_factory.mktemp("images")
    (folder / "photos").mkdir()
    draw = np.random.default_rng(0)
    for i in range(8):
        image = np.where(draw.random((5, 6, 1)) < 0.5, [[[200, 30, 30]]], [[[20, 60, 220]]]).astype(np.uint8)
        pillow.fromarray(image).save(folder / "photos" / f"{i}.png")
    changes = {
        "data": {"source": str(folder / "photos"), "levels": 2, "share": 0.0},
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 1},
        "train": {"steps": 2, "batch_size": 4},
    }
    train("image_gpt", changes, folder=folder / "run", quiet=True)
    heedful.load(folder / "run").save(folder / "saved")
    return folder


def test_the_palette_is_saved_and_images_are_completed_in_it(painter):
    loaded = heedful.load(painter / "saved")
    colours = torch.tensor([[200, 30, 30], [20, 60, 220]]) * (2 / 255) - 1
    found = loaded.model.palette
    assert torch.allclose(found[found[:, 0].argsort(descending=True)], colours, atol=1e-5)
    begun = torch.tensor([[[200] * 6], [[30] * 6], [[30] * 6]], dtype=torch.uint8)
    images = loaded.complete_image(begun, n=2)
    assert images.shape == (2, 3, 5, 6) and torch.allclose(images[:, :, 0], colours[0, None, :, None], atol=1e-5)
    assert torch.equal(to_image(quantize(images, found), found, height=5), images)  # every pixel is one of the palette
    assert torch.allclose(loaded.complete_image(begun.float() * (2 / 255) - 1, n=2), images)
    with pytest.raises(ValueError, match=r"first rows of an image as \(3, rows, 6\)"):
        loaded.complete_image(begun[:1])


def test_transformers_reads_the_same_colours(painter):
    processors = pytest.importorskip("transformers", reason="wants transformers")
    loaded = heedful.load(painter / "saved")
    image = np.random.default_rng(1).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    processor = processors.ImageGPTImageProcessor.from_pretrained(painter / "saved", do_resize=False)
    theirs = processor(image, return_tensors="np")["input_ids"].reshape(-1).tolist()
    ours = quantize(torch.from_numpy(image).permute(2, 0, 1)[None] * (2 / 255) - 1, loaded.model.palette)
    assert ours[0].tolist() == theirs


def test_without_a_file_few_colours_are_greys_and_many_are_unknown(model):
    assert torch.allclose(model.palette, torch.linspace(-1, 1, COLOURS)[:, None])
    many = ImageGPT(ImageGPTConfig(d_model=4, n_layers=1, n_heads=1, vocab_size=513, max_len=4))
    with pytest.raises(ValueError, match="not in its files"):
        _ = many.palette


def test_features_are_means_of_what_a_layer_reads(model, ids):
    batch = Batch(ids)
    with torch.no_grad():
        first = model.decoder.blocks[0].attention_norm(
            model.embed(ids) + model.position(torch.arange(ids.shape[1])[None])
        )
        assert torch.allclose(model.features(batch, 0), first.mean(1), atol=1e-6)
        assert torch.allclose(model.features(batch, 2), model.hidden(batch).mean(1), atol=1e-6)
        assert not torch.allclose(model.features(batch, 1), model.features(batch, 2), atol=1e-2)
    with pytest.raises(ValueError, match="0 to 2"):
        model.features(batch, 3)


def test_mistakes_are_named(ids, palette):
    with pytest.raises(ValueError, match="channels"):
        quantize(torch.zeros(2, 1, 4, 4), palette)
    with pytest.raises(ValueError, match="give its height"):
        to_image(ids[:, :5], palette)
    with pytest.raises(ValueError, match="colours of this palette"):
        to_image(ids + COLOURS, palette)
