"""Patches are a convolution, positions are all that ViT knows of places, rollout, and what attention reaches."""

from __future__ import annotations

import pytest
import torch

from heedful.observe.attention import rollout
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("vision-transformer")


def test_patches_are_pytorchs_unfold_and_the_projection_is_a_convolution(lesson):
    assert "unfold gives our patches: True" in lesson.text
    assert lesson.names["difference"] < 1e-5
    assert "196 of 768" in lesson.text


def test_the_model_by_hand_is_heedfuls(lesson):
    assert torch.allclose(lesson.names["logits"], lesson.names["from_heedful"], atol=1e-5)
    assert lesson.names["logits"].argmax() == 3


def test_positions_of_neighbours_and_of_mirrored_patches_are_alike(lesson):
    cosines, distances = lesson.names["cosines"], lesson.names["distances"]
    near, far = cosines[distances == 1].mean().item(), cosines[distances >= 5].mean().item()
    assert near > 0.5 and far < 0.1
    assert lesson.names["mirrored"].item() == pytest.approx(near, abs=0.05)  # "as much alike as neighbours"
    assert lesson.names["upside_down"] < 0.2


def test_the_order_of_patches_means_nothing_and_their_positions_everything(lesson):
    found, labels = lesson.names["experiments"], lesson.names["labels"]
    right = {name: (logits.argmax(dim=1) == labels).sum().item() for name, logits in found.items()}
    assert right["as it is"] == 10 and (found["patches shuffled"].argmax(dim=1) == 10).all()  # "not a digit"
    assert torch.allclose(found["as it is"], found["patches and positions shuffled"], atol=1e-4)
    assert torch.allclose(found["one position for all"], found["one position for all, shuffled"], atol=1e-4)
    assert (found["one position for all"].argmax(dim=1) == 10).all()


def test_small_models_with_and_without_positions(lesson):
    accuracy = lesson.names["accuracy"]
    assert accuracy["with positions"] > 0.9
    assert 0.7 < accuracy["without"] < 0.87  # "eight digits of ten"
    assert accuracy["with positions, all images shuffled"] > accuracy["with positions"] - 0.03
    assert lesson.names["ViT"].create(lesson.names["config"]).n_parameters() == 18_218


def test_the_reach_and_the_parameters_of_convolutions_and_attention(lesson):
    reached = {name: int((found > 0).sum()) for name, found in lesson.names["reached"].items()}
    assert list(reached.values()) == [9, 25, 49, 225]
    assert all(f"{n:,} parameters" in lesson.text for n in (64 * 64 * 9 + 64, 64 * 64 * 64 + 64, 4 * (64 * 64 + 64)))


def test_drawn_clothes_are_recognised_and_the_rollout_shows_their_parts(lesson):
    assert all(name == label.name for name, label in lesson.names["taken_for"].items())
    assert len(lesson.names["taken_for"]) == 7
    bag, boot = (lesson.names["rollouts"][name] for name in ("Bag", "Ankle boot"))
    assert int(bag.argmax()) // 7 in (1, 2) and int(bag.argmax()) % 7 in (2, 3, 4)  # its handle
    assert int(boot.argmax()) // 7 >= 4 and int(boot.argmax()) % 7 <= 2  # its toe


def test_what_the_answers_count():
    assert (384 // 16) ** 2 == 576 and 576 / 196 == pytest.approx(2.9, abs=0.05)
    assert (576 / 196) ** 2 == pytest.approx(8.6, abs=0.05)
    assert 224**2 == 50_176 and 50_176**2 == pytest.approx(2.5e9, rel=0.01)


def pieces(images, size):
    batch, channels, height, width = images.shape
    return images.reshape(batch, channels, height // size, size, width // size, size)


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ("down the columns: they must go along", (0, 4, 2, 1, 3, 5)),
        ("channels vary fastest", (0, 2, 4, 3, 5, 1)),
        ("in a patch the pixels go down", (0, 2, 4, 1, 5, 3)),
        ("right", (0, 2, 4, 1, 3, 5)),
    ],
)
def test_patches_in_a_wrong_order_are_told_why(said, order, capsys):
    def into_patches(images, size):
        return pieces(images, size).permute(order).reshape(len(images), -1, images.shape[1] * size * size)

    assert said in verdict(into_patches, capsys)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("a reshape alone", lambda x, p: x.reshape(len(x), -1, x.shape[1] * p * p)),
        ("swap two axes", lambda x, p: torch.nn.functional.unfold(x, p, stride=p)),
        ("still in a grid", lambda x, p: pieces(x, p).permute(0, 2, 4, 1, 3, 5).flatten(3)),
        ("right", lambda x, p: torch.nn.functional.unfold(x, p, stride=p).transpose(1, 2)),
    ],
)
def test_patches_of_a_wrong_shape_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="into_patches")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("residual connection is missing", lambda w: rollout(w, residual=0)[-1]),
        ("wrong order", lambda w: rollout(w.flip(0))[-1]),
        ("only the last layer", lambda w: rollout(w[-1:])[-1]),
        ("one head is taken", lambda w: rollout(w[:, :1])[-1]),
        ("after every layer", rollout),
        ("do not sum to 1", lambda w: torch.linalg.multi_dot([*(torch.eye(5) + w.mean(dim=1)).flip(0)])),
        ("right", lambda w: rollout(w)[-1]),
    ],
)
def test_a_wrong_rollout_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="roll_out")
