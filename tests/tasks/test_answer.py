"""Extractive question answering."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("repeat", [1, 9])
def test_an_answer_stands_in_its_passage(bert, passage, repeat: int):
    passage = " ".join([passage] * repeat)  # longer than one window
    found = bert("answer").answer("Where did the cat sit?", passage)
    assert passage[found.begin : found.end] == found.text and found.text and 0 < found.score <= 1
    with pytest.raises(ValueError, match="a question and a passage"):
        bert("answer").answer("", passage)
