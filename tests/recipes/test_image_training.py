"""Runs on images: a user's own folder by one command, augmentation that goes on after an interruption."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

import heedful
from heedful.cli import main
from heedful.recipes.build import choose_patch_size
from heedful.recipes.launch import resume, train
from heedful.recipes.resolve import resolve_recipe
from heedful.train.run import to_toml
from support.trainings import SMALL, assert_same_run, changes, power_cut

SHORT = ["--set", "train.steps=2", "--set", "train.batch_size=4", "--set", "train.device=cpu"]
random = np.random.default_rng(0)


def write_photos(folder, sizes, n=6):
    image = pytest.importorskip("PIL.Image", reason="wants Pillow")
    for i, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for k in range(n):
            size = sizes[k % len(sizes)]
            pixels = np.full((*size, 3), 200 * i, dtype=np.uint8) + random.integers(0, 50, (*size, 3), dtype=np.uint8)
            image.fromarray(pixels).save(folder / name / f"{k}.png")
    return folder


def test_a_folder_of_photographs_by_one_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "pets", [(20, 30), (41, 23)])
    assert main(["train", "pets", *SHORT]) == 0
    assert "accuracy" in capfd.readouterr().err
    model = heedful.load("runs/pets-1")
    assert list(model.model.config.labels) == ["cat", "dog"]
    assert (model.model.config.image_size, model.model.config.patch_size) == (64, 8)
    assert main(["train", "runs/pets-1", "pets", *SHORT, "--out", "again"]) == 0  # fine-tuned at its size


def test_what_the_size_of_the_images_implies(tmp_path):
    write_photos(tmp_path / "small", [(28, 28)], n=2)
    write_photos(tmp_path / "large", [(96, 96)], n=2)
    assert resolve_recipe(tmp_path / "small").recipe.data.image_size == 0
    assert resolve_recipe(tmp_path / "large").recipe.data.image_size == 64
    assert [choose_patch_size(n) for n in (8, 28, 32, 64, 224, 13)] == [1, 4, 4, 8, 28, 13]
    (tmp_path / "texts" / "a").mkdir(parents=True)
    assert resolve_recipe(tmp_path / "texts").recipe.data.kind == "text"


def test_augmented_training_resumed_is_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("images.npz", images=random.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), labels=np.arange(40) % 3)
    augmented = {"shift": 2, "flip": True, "augment": 1, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
    settings = changes(
        model={"family": "vit", **SMALL, "dropout": 0.2},
        data={"kind": "images", "source": "images.npz", **augmented},
        objective={"name": "classify", "smoothing": 0.1},
        train={"accumulate": 2, "ema": 0.9},
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(settings))
    train(recipe, folder=tmp_path / "whole", quiet=True)
    with power_cut(after=13):
        train(recipe, folder=tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 20)


def test_image_gpt_says_bits_per_dimension_and_draws_completions(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    pixels = np.repeat(random.integers(0, 2, (12, 6, 1)), 6, axis=2) * 255
    np.savez("stripes.npz", images=pixels.astype(np.uint8))
    settings = changes(
        model={"family": "image_gpt", **SMALL, "dropout": 0.0},
        data={"kind": "pixels", "source": "stripes.npz", "levels": 2, "share": 0.25},
        log={"samples": True},
        train={"steps": 2, "eval_every": 1},
    )
    (tmp_path / "recipe.toml").write_text(to_toml(settings))
    assert main(["train", "recipe.toml", "--out", "run"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    scores = [line for line in lines if line["kind"] == "validation"]
    assert scores[-1]["bits_per_dimension"] == pytest.approx(scores[-1]["loss"] / np.log(2))
    assert "bits per dimension" in capfd.readouterr().err
    assert json.loads((tmp_path / "run/summary.json").read_text())["bits_per_dimension"] > 0
    pictures = sorted((tmp_path / "run/samples").glob("*.png"))
    assert [path.name for path in pictures] == ["step-0000001.png", "step-0000002.png"]
    picture = imread(pictures[-1])[..., 0]  # 3 images of validation: half, whole, 6 completions of 96 x 96, gaps of 4
    assert picture.shape == (3 * 100 - 4, 8 * 100 - 4)
    tiles = np.pad(picture, ((0, 4), (0, 4))).reshape(3, 100, 8, 100).transpose(0, 2, 1, 3)[:, :, 8:96:16, 8:96:16]
    assert (tiles[:, 1:, :3] == tiles[:, :1, :3]).all()  # the upper half stays
    assert set(np.unique(tiles[:, 1:])) <= {0.0, 1.0} and len(np.unique(tiles[:, 0, 3:])) == 1
