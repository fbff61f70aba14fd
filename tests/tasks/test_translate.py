"""What `translate` adds to `generate`: limits by the source, and sentences without their full stop."""

from __future__ import annotations

import pytest

import heedful
from heedful.tasks.translate import longest_repeat, restore_end, sentence_end, sentence_end_of, split_end
from support.tiny import tiny


@pytest.fixture(scope="module")
def translator():
    return heedful.load("translator")


@pytest.mark.parametrize("beams", [1, 4])
def test_the_translation_of_a_fragment_ends(translator, beams):
    """What a newcomer types first; a model that has only seen whole sentences writes without end."""
    texts = ["Ein Mann", "Guten Morgen", "Zwei Hunde spielen im Schnee", "Danke", "Das Haus ist rot."]
    assert translator.translate(texts, beams=beams) == [
        "A man", "Good morning", "Two dogs are playing in the snow", "Thank you", "The house is red.",
    ]  # fmt: skip
    texts = ["a dog", "Good morning", "Two children are playing in the garden", "I have no time today."]
    assert translator.translate(texts, beams=beams) == [
        "ein Hund", "Guten Morgen", "Zwei Kinder spielen im Garten", "Ich habe heute keine Zeit.",
    ]  # fmt: skip
    whole = translator.translate("Ein Mann.", beams=beams)
    assert whole == "A man." and translator.translate("Ein Mann,", beams=beams) == "A man,"


@pytest.mark.parametrize(
    ("source", "read", "replacement"),
    [
        ("Ein Mann", "Ein Mann.", ""),
        ("Ein Mann ", "Ein Mann.", ""),
        ("Ein Mann:", "Ein Mann.", ":"),
        ("Ein Mann!", "Ein Mann!", None),
        ('Er sagte: "Ja."', 'Er sagte: "Ja."', None),
        ("", "", None),
        (" - ", " - ", None),
    ],
)
def test_a_full_stop_is_added_and_taken_off_again(source, read, replacement):
    assert split_end(source, ".") == (read, replacement)
    assert split_end(source, "") == (source, None)
    expected = "A man." if replacement is None else "A man" + replacement
    assert restore_end("A man.", ".", replacement) == expected
    assert restore_end("A man", ".", replacement) == "A man"


def test_longest_repeat():
    assert [longest_repeat(ids) for ids in ([], [1, 2, 3], [1, 2, 1], [1, 2, 3, 1, 2], [7] * 6)] == [0, 0, 1, 2, 5]


def test_training_pairs_say_how_sentences_end():
    assert sentence_end_of(["Ein Mann.", "Ja!", "Zwei.", 'Er sagte "Nein."'] * 50) == "."
    assert sentence_end_of(["Ein Mann.", "Ein Hund"]) == "" == sentence_end_of([])


def test_a_wrong_sentence_end_is_refused():
    model = tiny("t5")
    model.generation = {"sentence_end": 3}
    with pytest.raises(ValueError, match="sentence_end must be a short text"):
        sentence_end(model)
