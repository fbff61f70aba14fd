"""Pixels as tokens, k-means, bits per dimension, completions, the head that looks up, and probes by layer."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lessons.support import executed, verdict

RESULTS = Path(__file__).parents[2] / "RESULTS.md"


@pytest.fixture(scope="module")
def lesson():
    return executed("image-gpt")


def test_k_means_never_gets_worse_and_beats_an_even_palette(lesson):
    errors = lesson.names["errors"]
    assert all(after <= before + 1e-9 for before, after in pairwise(errors))
    pixels = lesson.names["pixels"]

    def error(palette):
        return torch.cdist(pixels, palette).min(dim=1).values.square().mean().item()

    assert error(lesson.names["palettes"][8]) < error(lesson.names["corners"]) / 10  # "far nearer"
    assert error(lesson.names["ours"]) <= error(lesson.names["palettes"][8])
    assert 256**3 == pytest.approx(16.8e6, rel=0.01)


def test_bits_are_cross_entropy_and_heedfuls_own_score(lesson):
    logits, ids = lesson.names["logits"], lesson.names["ids"]
    expected = F.cross_entropy(logits.transpose(1, 2), ids).item() / math.log(2)
    assert lesson.names["bits"].mean().item() == pytest.approx(expected, abs=1e-5)
    assert lesson.names["score"].value == pytest.approx(expected, abs=1e-4)
    assert expected < lesson.names["entropy"] < 4
    border = lesson.names["bits"].view(20, 8, 8)[:, :, 0].mean()
    assert border < 0.2  # "next to nothing"


def test_nats_of_the_card_in_bits():
    card = (Path(__file__).parents[2] / "src/heedful/zoo/digits-gpt/README.md").read_text(encoding="utf-8")
    assert "1.1764 nats per pixel" in card
    assert 1.1764 / math.log(2) == pytest.approx(1.70, abs=0.005)


def test_completions_begin_with_what_was_given_and_are_mostly_digits(lesson):
    completions, half = lesson.names["completions"], lesson.names["half"]
    assert torch.allclose(completions[:, :, :4], half.expand(5, -1, -1, -1), atol=0.07)  # the nearest of 16 levels
    opinions = lesson.names["opinions"]
    assert list(opinions) == [0, 3, 4, 7]
    assert sum(seen.count(str(digit)) for digit, seen in opinions.items()) >= 15
    assert "4" in opinions[0] and "not a digit" in opinions[0]  # as the text says


def test_a_head_looks_at_the_pixel_above(lesson):
    by_distance = lesson.names["by_distance"]
    assert by_distance.argmax() == 7 and 0.4 < by_distance[7] < 0.5  # "nearly half"


def test_a_linear_probe_finds_digits_that_the_model_was_never_told_of(lesson):
    learned, chance = lesson.names["learned"], lesson.names["chance"]
    assert len(learned) == 5
    assert learned[1:].min() > 0.78 and chance.max() < 0.6
    assert learned[1:].max() - learned[1:].min() < 0.05  # "differ too little to rank them"
    assert learned[1] > learned[0] + 0.1
    assert lesson.names["by_pixels"].item() > learned.max()


def test_probes_on_mnist_are_those_of_results(lesson):
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    for name, scores in lesson.names["mnist"].items():
        row = next(line for line in lines if line.startswith(f"| `{name}` | {scores[0]} |"))
        assert scores == [float(cell.strip(" *")) for cell in row.split("|")[2:] if cell.strip()]
    assert lesson.names["best"] == {"image-gpt-mnist": 7, "vit-mnist": 6}


def nearest_means(pixels, centres, *, reduce):
    nearest = torch.cdist(pixels, centres).argmin(dim=1)
    return torch.stack([reduce(pixels[nearest == k], centre) for k, centre in enumerate(centres)])


@pytest.mark.parametrize(
    ("said", "reduce"),
    [
        ("there are NaNs", lambda own, centre: own.mean(dim=0)),
        ("it must stay", lambda own, centre: own.mean(dim=0) if len(own) else torch.zeros(3)),
        ("single pixel", lambda own, centre: own[0] if len(own) else centre),
        ("the sum of its pixels", lambda own, centre: own.sum(dim=0) if len(own) else centre),
        ("no centre has moved", lambda own, centre: centre),
        ("right", lambda own, centre: own.mean(dim=0) if len(own) else centre),
    ],
)
def test_a_wrong_step_of_k_means_is_told_why(said, reduce, capsys):
    torch.manual_seed(0)
    assert said in verdict(lambda p, c: nearest_means(p, c, reduce=reduce), capsys, name="k_means_step")


def test_changed_centres_are_noticed(capsys):
    assert "work on a copy" in verdict(lambda p, c: c.add_(1), capsys, name="k_means_step")


def chances(logits, ids, axis=-1):
    return logits.softmax(dim=axis).gather(-1, ids[..., None])[..., 0]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("these are nats:", lambda x, i: -chances(x, i).log().mean()),
        ("nats times ln 2", lambda x, i: -chances(x, i).log().mean() * math.log(2)),
        ("sign is wrong", lambda x, i: chances(x, i).log2().mean()),
        ("sum over the pixels", lambda x, i: -chances(x, i).log2().sum()),
        ("bits of an image", lambda x, i: -chances(x, i).log2().sum(dim=1).mean()),
        ("mean of the logs", lambda x, i: -chances(x, i).mean().log2()),
        ("over the pixels: it must run over the colours", lambda x, i: -chances(x, i, axis=1).log2().mean()),
        ("where is the softmax", lambda x, i: -x.gather(-1, i[..., None]).mean()),
        ("their mean is asked for", lambda x, i: -chances(x, i).log2()),
        ("right", lambda x, i: F.cross_entropy(x.transpose(1, 2), i) / math.log(2)),
    ],
)
def test_wrong_bits_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="bits_per_pixel")
