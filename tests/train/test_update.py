"""A step as one CUDA graph is the step without it; batches of another shape are computed plainly."""

import numpy as np
import pytest
import torch

from heedful.recipes.launch import resume, train
from heedful.train import update
from heedful.train.run import to_toml
from support.trainings import SMALL, changes, logged, power_cut

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The path of a recipe on images with everything random, with and without a graph."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), dtype=np.uint8)
    np.savez("images.npz", images=images, labels=np.arange(200) % 3)

    def write(*, graph, device="cuda", optimizer="muon"):
        augmented = {"shift": 2, "flip": True, "augment": 1, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
        settings = changes(
            model={"family": "vit", **SMALL, "dropout": 0.2},
            data={"kind": "images", "source": "images.npz", **augmented},
            objective={"name": "classify", "smoothing": 0.1},
            train={"ema": 0.9, "device": device, "compile": "no", "cuda_graph": graph},
            optimizer={"name": optimizer},
        )
        path = tmp_path / f"recipe-{graph}-{optimizer}.toml"
        path.write_text(to_toml(settings))
        return path

    return write


@on_a_gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_graph_makes_the_steps_of_the_plain_update(recipe, tmp_path, monkeypatch, optimizer):
    train(recipe(graph=False, optimizer=optimizer), folder=tmp_path / "plain", quiet=True)
    captured = []
    capture = update.GraphedUpdate._capture
    monkeypatch.setattr(update.GraphedUpdate, "_capture", lambda self, b: (capture(self, b), captured.append(self)))
    train(recipe(graph=True, optimizer=optimizer), folder=tmp_path / "graph", quiet=True)
    assert [one.failed for one in captured] == [False]
    with power_cut(after=13):
        train(recipe(graph=True, optimizer=optimizer), folder=tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    for name in ("graph", "cut"):
        for kind in ("step", "validation"):
            pairs = zip(logged(tmp_path / "plain", kind), logged(tmp_path / name, kind), strict=True)
            for mine, other in pairs:
                assert other == pytest.approx(mine, rel=2e-3)


def test_without_a_gpu_the_setting_changes_nothing(recipe, tmp_path):
    found = []
    for graph in (False, True):
        train(recipe(graph=graph, device="cpu"), {"train": {"steps": 2}}, folder=tmp_path / str(graph), quiet=True)
        found.append(logged(tmp_path / str(graph)))
    assert found[0] == found[1]
