"""Labels of texts, pairs of texts and images."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.loaded import Loaded
from heedful.models.base import Batch
from heedful.observe.inputs import text_input
from support.tiny import tiny


def test_digits_are_told_apart():
    digits = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn").load_digits()
    loaded = heedful.load("digits-vit")
    images = torch.from_numpy(digits.images[:40]).float() / 8 - 1
    labels = [loaded.classify(image[None]) for image in images]
    right = sum(int(found[0].name) == target for found, target in zip(labels, digits.target[:40].tolist(), strict=True))
    assert right >= 38
    assert sum(label.score for label in labels[0]) == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="classifies images"):
        loaded.classify("a text")


def test_texts_are_classified_as_the_head_says(bert, tokenizer):
    loaded = bert("classify", n_labels=3, labels=("a", "b", "c"))
    found = loaded.classify("the cat", "the dog")
    ids, sides = tokenizer.encode_pair("the cat", "the dog")
    with torch.no_grad():
        chances = loaded.model(Batch(torch.tensor([ids]), segments=torch.tensor([sides]))).logits[0].softmax(-1)
    assert {x.name: pytest.approx(x.score, abs=1e-6) for x in found} == dict(zip("abc", chances.tolist(), strict=True))
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    several = bert("classify", n_labels=3, problem_type="multi_label_classification")
    assert all(0 <= x.score <= 1 for x in several.classify("the cat"))


def test_two_texts_for_a_model_that_does_not_tell_them_apart(tokenizer):
    model = tiny("distilbert", vocab_size=len(tokenizer), head="classify", n_labels=2).eval()
    assert len(Loaded(model, tokenizer, "small").classify("the cat", "the dog")) == 2
    assert text_input(model, tokenizer, "the cat", second="the dog").batch.segments is None
