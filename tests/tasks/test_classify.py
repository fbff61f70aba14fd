"""Classifying, answering, tagging and completing images, through a loaded model."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.loaded import Loaded
from heedful.models.base import Batch
from heedful.observe.reading import read
from heedful.text.train import train_wordpiece
from support.tiny import tiny

PASSAGE = "The cat sat on the mat in Paris. The dog of John Smith slept in Rome, and the mat was red."


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([PASSAGE] * 20, 200)


def bert(tokenizer, head: str, **more) -> Loaded:
    return Loaded(tiny("bert", vocab_size=len(tokenizer), head=head, **more).eval(), tokenizer, "a small one")


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


def test_texts_are_classified_as_the_head_says(tokenizer):
    loaded = bert(tokenizer, "classify", n_labels=3, labels=("a", "b", "c"))
    found = loaded.classify("the cat", "the dog")
    ids, sides = tokenizer.encode_pair("the cat", "the dog")
    with torch.no_grad():
        chances = loaded.model(Batch(torch.tensor([ids]), segments=torch.tensor([sides]))).logits[0].softmax(-1)
    assert {x.name: pytest.approx(x.score, abs=1e-6) for x in found} == dict(zip("abc", chances.tolist(), strict=True))
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    several = bert(tokenizer, "classify", n_labels=3, problem_type="multi_label_classification")
    assert all(0 <= x.score <= 1 for x in several.classify("the cat"))


@pytest.mark.parametrize("repeat", [1, 9])
def test_an_answer_stands_in_its_passage(tokenizer, repeat: int):
    passage = " ".join([PASSAGE] * repeat)  # longer than one window
    found = bert(tokenizer, "answer").answer("Where did the cat sit?", passage)
    assert passage[found.begin : found.end] == found.text and found.text and 0 < found.score <= 1
    with pytest.raises(ValueError, match="a question and a passage"):
        bert(tokenizer, "answer").answer("", passage)


def test_entities_are_put_together(tokenizer, monkeypatch):
    names = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    loaded = bert(tokenizer, "tag", n_labels=5, labels=names)
    text = "John Smith slept in Rome."
    words = {"John": 1, "Smith": 2, "Rome": 3}

    def said(batch: Batch):
        """Logits that name the right tags, whatever the pieces."""
        logits = torch.zeros(*batch.ids.shape, 5)
        logits[..., 0] = 1
        for word, label in words.items():
            pieces = tokenizer.encode(word)
            row = batch.ids[0].tolist()
            at = next(i for i in range(len(row)) if row[i : i + len(pieces)] == pieces)
            logits[0, at, label] = 9
        return type("Said", (), {"logits": logits})

    monkeypatch.setattr(loaded.model, "forward", said)
    found = loaded.tag(text)
    assert [(x.text, x.label) for x in found] == [("John Smith", "PER"), ("Rome", "LOC")]
    assert [text[x.begin : x.end] for x in found] == ["John Smith", "Rome"]
    assert loaded.tag("  ") == []


def test_half_an_image_is_completed():
    loaded = heedful.load("digits-gpt")
    begun = torch.zeros(32, dtype=torch.long)
    images = loaded.complete_image(begun, n=2, seed=3)
    assert images.shape == (2, 64) and (images[:, :32] == 0).all() and images.max() < 16
    assert torch.equal(images, loaded.complete_image(begun, n=2, seed=3))
    assert not torch.equal(images[0], images[1])
    assert loaded.complete_image(begun[:0]).shape == (1, 64)
    for wrong in (torch.full((3,), 16), torch.zeros(64, dtype=torch.long), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="pixels"):
            loaded.complete_image(wrong)


def test_what_a_model_is_not_for_says_what_it_is():
    with pytest.raises(ValueError, match="cannot classify; it can: "):
        heedful.load("tiny").classify("x")
    with pytest.raises(ValueError, match="cannot complete_image"):
        heedful.load("tiny").complete_image(torch.zeros(3))
    with heedful.load("tiny").capture("decoder.0.self.weights") as acts:
        assert list(acts) == ["decoder.0.self.weights"]


def test_two_texts_for_a_model_that_does_not_tell_them_apart(tokenizer):
    model = tiny("distilbert", vocab_size=len(tokenizer), head="classify", n_labels=2).eval()
    assert len(Loaded(model, tokenizer, "small").classify("the cat", "the dog")) == 2
    assert read(model, tokenizer, "the cat", second="the dog").batch.segments is None
