"""Extractive question answering."""

from __future__ import annotations

import math

import pytest

from heedful.models.base import TruncationWarning


@pytest.mark.parametrize("repeat", [1, 9])
def test_an_answer_stands_in_its_passage(bert, passage, repeat: int):
    passage = " ".join([passage] * repeat)  # longer than one window
    found = bert("answer").answer("Where did the cat sit?", passage)
    assert passage[found.begin : found.end] == found.text and found.text and 0 < found.score <= 1
    with pytest.raises(ValueError, match="a question and a passage"):
        bert("answer").answer("", passage)


@pytest.mark.parametrize("nothing", ["", " ", "\u200b", "\0", "\ufe0f"])
def test_a_question_or_a_passage_without_anything_to_read_is_refused(bert, passage, nothing):
    for question, text in ((nothing, passage), ("Where?", nothing)):
        with pytest.raises(ValueError, match="a question and a passage"):
            bert("answer").answer(question, text)


def test_that_a_long_question_is_cut_is_told(bert, passage):
    loaded = bert("answer", max_len=128)
    with pytest.warns(TruncationWarning, match="longer than 64 tokens: their ends are cut"):
        loaded.answer("where is the cat " * 20, passage)


def test_several_questions_are_answered_as_each_alone(bert, passage):
    loaded = bert("answer")
    questions, passages = ["where?", "who slept in Rome?", "red?"], [passage, passage * 8, "the mat was red"]
    for found, question, text in zip(loaded.answer(questions, passages), questions, passages, strict=True):
        alone = loaded.answer(question, text)
        assert (found.text, found.begin, found.end) == (alone.text, alone.begin, alone.end)
        assert found.score == pytest.approx(alone.score, rel=1e-4)
    with pytest.raises(ValueError, match="3 questions and 1 passages"):
        loaded.answer(questions, [passage])
    with pytest.raises(ValueError, match="two lists"):
        loaded.answer(questions, passage)


def test_a_model_with_a_threshold_may_say_that_there_is_no_answer(bert, passage):
    """As transformers' pipeline with handle_impossible_answer: [CLS] as first and last token against the best span."""
    asked = "Where did the cat sit?"
    always = bert("answer").answer(asked, passage)
    assert always.no_answer is None and always.text
    never, often = (bert("answer", null_threshold=t).answer(asked, passage) for t in (1e4, -1e4))
    assert (never.text, never.score) == (always.text, always.score)
    assert often.text == "" and often.begin == often.end == 0
    assert 0 < often.no_answer == never.no_answer < 1
    margin = math.log(never.no_answer) - math.log(never.score)
    assert bert("answer", null_threshold=margin + 1e-4).answer(asked, passage).text
    assert not bert("answer", null_threshold=margin - 1e-4).answer(asked, passage).text
