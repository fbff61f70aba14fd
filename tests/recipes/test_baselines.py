"""The reference losses of a run are those of its objective: what a guess by frequency would cost."""

import math

import pytest
import torch
import torch.nn.functional as F

from heedful.data.images import ImageSet
from heedful.recipes import inputs
from heedful.text import train_wordpiece, words
from heedful.train.recipe import Recipe

TEXT = ["the cat sat on the mat and the dog did not"] * 4


def baselines(tokenizer=None, **tables):
    return inputs.load_data(Recipe.from_dict(tables), tokenizer).baselines


def test_a_classifier_is_compared_with_the_frequencies_of_its_classes(tmp_path):
    rows = ["text,label", *(f"the cat sat {i},{'spam' if i % 10 == 0 else 'ham'}" for i in range(100))]
    (tmp_path / "mail.csv").write_text("\n".join(rows))
    found = baselines(
        words(TEXT),
        data={"kind": "labelled", "source": str(tmp_path / "mail.csv"), "length": 16},
        objective={"name": "classify"},
        model={"family": "bert"},
    )
    labels = torch.tensor([1] * 10 + [0] * 90)
    best = torch.tensor([0.9, 0.1]).log().expand(100, 2)  # the constant prediction with the least loss
    assert found == {"class frequencies": pytest.approx(F.cross_entropy(best, labels).item())}


def test_tags_and_images_too(tmp_path, monkeypatch):
    (tmp_path / "tags.txt").write_text("cat B-X\nsat O\n\ndog O\nsat O\n")
    tables = {"data": {"kind": "tagged", "source": str(tmp_path / "tags.txt"), "share": 0.0}}
    found = baselines(words(TEXT), **tables, objective={"name": "tag"}, model={"family": "bert"})
    assert found["class frequencies"] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    digits = ImageSet.of(torch.zeros(4, 2, 2).numpy(), [0, 0, 0, 1], top=16)
    monkeypatch.setattr(inputs.images, "load_digits", lambda: digits)
    tables = {"data": {"kind": "images", "source": "digits", "share": 0.0}, "objective": {"name": "classify"}}
    assert baselines(**tables, model={"family": "vit"})["class frequencies"] == pytest.approx(0.5623, abs=1e-4)


def test_text_has_those_of_the_loss_it_is_trained_with(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 20))
    data = {"source": str(tmp_path / "text.txt"), "length": 16}
    tokenizer = train_wordpiece(TEXT, 60)
    tables = {"objective": {"name": "masked"}, "model": {"family": "bert"}}
    plain = baselines(tokenizer, data=data | {"pairs": False}, **tables)
    assert plain["uniform"] == pytest.approx(math.log(len(tokenizer))) and plain["unigram"] < plain["uniform"]
    pairs = baselines(tokenizer, data=data, **tables)  # next-sentence prediction tosses a coin
    assert pairs == {name: pytest.approx(loss + math.log(2)) for name, loss in plain.items()}
    distilled = {"objective": {"name": "distill", "teacher": "bert-books"}}
    assert baselines(tokenizer, data=data, **distilled) == {}  # a weighted sum of three losses
