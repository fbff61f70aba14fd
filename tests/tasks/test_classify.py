"""Labels of texts, pairs of texts and images."""

from __future__ import annotations

import pytest
import torch
import transformers

import heedful
from heedful.data.images import read_images
from heedful.loaded import Loaded
from heedful.models.base import Batch, TruncationWarning
from heedful.observe.inputs import text_input
from heedful.serve.playground.images import example_clothes, example_mnist
from heedful.tasks.drawing import prepare_drawing
from support.serving import shared_data
from support.tiny import tiny

INVISIBLE = ["", "  \n", "\u200b", "\0"]


def test_digits_are_told_apart():
    loaded = heedful.load("digits-vit")
    labels = [loaded.classify(torch.tensor(digit["image"])[None] * 2 - 1) for digit in example_mnist()]
    assert [found[0].name for found in labels] == [str(digit["label"]) for digit in example_mnist()]
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


@pytest.mark.parametrize("text", INVISIBLE)
def test_a_text_without_anything_to_read_is_refused(bert, text):
    for loaded in bert("classify", n_labels=2), heedful.load("languages"):  # with and without special tokens
        for given in ((text,), (["the cat", text],), ("the cat", text)):
            with pytest.raises(ValueError, match="is empty: give a text to classify"):
                loaded.classify(*given)


def test_several_texts_are_classified_as_each_alone(bert):
    loaded = bert("classify", n_labels=3)
    texts, seconds = ["the cat", "the dog of John Smith slept in Rome", "red"], ["the mat", "Paris", "the red cat"]
    for given in ((texts,), (texts, seconds)):
        alone = [loaded.classify(*pair) for pair in zip(*given, strict=True)]
        for one, other in zip(loaded.classify(*given), alone, strict=True):
            assert [x.name for x in one] == [x.name for x in other]
            assert [x.score for x in one] == pytest.approx([x.score for x in other], abs=1e-6)
    assert loaded.classify([]) == []
    for wrong in (("the cat", ["the mat"]), (texts, "the mat"), (texts, seconds[:2])):
        with pytest.raises(ValueError, match="two lists of the same length"):
            loaded.classify(*wrong)


def test_a_long_text_is_cut_as_transformers_cuts_it_and_that_is_told(bert, tokenizer, tmp_path, recwarn):
    loaded = bert("classify", n_labels=3)
    most = loaded.model.context_length
    loaded.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for given in (("the cat sat on the mat " * 40,), ("the cat sat " * 40, "the dog slept " * 60)):
        inputs = theirs(*given, truncation=True, max_length=most, return_tensors="pt", return_token_type_ids=True)
        with torch.no_grad():
            expected = model(**inputs).logits[0].softmax(-1).sort(descending=True).values
        found = loaded.classify(*given)
        assert [x.score for x in found] == pytest.approx(expected.tolist(), abs=1e-5)
        assert f"this model reads {most}: its end is cut" in str(recwarn.pop(TruncationWarning).message)
        recwarn.clear()
    loaded.classify("the cat")
    assert not recwarn.list


def test_pixels_are_scaled_or_refused():
    loaded = heedful.load("digits-vit")
    levels = (torch.arange(784) % 256).to(torch.uint8).view(1, 28, 28)
    scaled = levels.float() / 255 * 2 - 1
    found, expected = loaded.classify(levels), loaded.classify(scaled)
    assert [x.score for x in found] == pytest.approx([x.score for x in expected], abs=1e-5)
    for wrong in (levels.float(), levels.long(), scaled.masked_fill(scaled > 0.9, torch.nan)):
        with pytest.raises(ValueError, match="pixels are floats from -1 to 1, or uint8 from 0 to 255"):
            loaded.classify(wrong)


@pytest.fixture(scope="module")
def digits():
    """One image of each digit of MNIST (10, 1, 28, 28) from -1 to 1, and the labels."""
    examples = example_mnist()
    return torch.tensor([digit["image"] for digit in examples])[:, None] * 2 - 1, [d["label"] for d in examples]


def names(loaded, images) -> list[str]:
    return [loaded.classify(image)[0].name for image in images]


def share_right(loaded, images, labels) -> float:
    return sum(name == str(label) for name, label in zip(names(loaded, images), labels, strict=True)) / len(labels)


def test_digits_are_read_in_either_polarity(digits):
    loaded, (images, labels) = heedful.load("digits-vit"), digits
    assert share_right(loaded, images, labels) == share_right(loaded, -images, labels) == 1
    torch.testing.assert_close(prepare_drawing(loaded.model, images[0]), images[0])  # as the training data is


def test_a_drawing_is_moved_and_scaled_as_the_training_data_is(digits):
    """A digit somewhere on a large white sheet, as people draw: read as before."""
    loaded, (images, labels) = heedful.load("digits-vit"), digits
    large = torch.nn.functional.interpolate(images, scale_factor=8, mode="bilinear")
    sheets = -torch.nn.functional.pad(large, (20, 200, 190, 10), value=-1)
    assert share_right(loaded, sheets, labels) == 1
    made = prepare_drawing(loaded.model, sheets[0])
    assert made.shape == (1, 28, 28) and made.max() > 0.8
    rows, columns = ((made[0] > -0.6).any(dim=axis).sum() for axis in (1, 0))
    assert max(rows, columns) in (19, 20)  # MNIST's size
    corner = torch.full((1, 28, 28), -1.0)
    corner[:, :14, :14] = torch.nn.functional.interpolate(images[3:4], size=(14, 14), antialias=True, mode="bilinear")[
        0
    ]
    assert loaded.classify(corner)[0].name == "3"


def test_an_empty_drawing_stays_empty_and_is_not_a_digit():
    loaded = heedful.load("digits-vit")
    for level in (-1.0, 0.0, 1.0):
        for shape in ((1, 28, 28), (1, 50, 60)):
            empty = torch.full(shape, level)
            assert loaded.classify(empty)[0].name == "not a digit"
    assert prepare_drawing(loaded.model, torch.ones(1, 50, 60)).max() == -1


def test_clothes_are_not_digits():
    images = torch.tensor([one["image"] for one in example_clothes()])[:, None] * 2 - 1
    for sign in (1, -1):
        assert names(heedful.load("digits-vit"), sign * images).count("not a digit") >= 8


def test_real_drawings_of_mnist_are_read():
    every = read_images(shared_data("mnist", "t10k-images-idx3-ubyte.gz"))
    images, labels = every.scaled(slice(0, 100)), every.labels[:100].tolist()
    assert share_right(heedful.load("digits-vit"), -images, labels) > 0.97
