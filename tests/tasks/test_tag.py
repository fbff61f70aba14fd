"""Entities from the tags of words."""

from __future__ import annotations

import re

import pytest
import torch

from heedful.models.base import Batch
from heedful.tasks import tag


def test_entities_are_put_together(bert, tokenizer, monkeypatch):
    names = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    loaded = bert("tag", n_labels=5, labels=names)
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


@pytest.mark.parametrize("windows", [1, 8])
def test_a_long_text_is_tagged_in_windows(bert, monkeypatch, windows):
    """A tag that depends on the token alone is the same wherever the windows begin and end."""
    loaded = bert("tag", n_labels=3, labels=("O", "B-X", "B-Y"))
    monkeypatch.setattr(tag, "MAX_BATCH", windows * loaded.model.context_length)
    lengths = []

    def said(batch: Batch):
        lengths.append(batch.ids.shape[1])
        return type("Said", (), {"logits": torch.nn.functional.one_hot(batch.ids % 3, 3) * 9.0})

    monkeypatch.setattr(loaded.model, "forward", said)
    text = "the cat sat on the mat in Paris red dog slept Rome and " * 30
    expected = []
    for match in re.finditer(r"\w+", text):
        label = loaded.tokenizer.encode(match.group())[0] % 3
        expected += [(match.start(), match.end(), "OXY"[label])] if label else []
    assert [(x.begin, x.end, x.label) for x in loaded.tag(text)] == expected
    assert len(lengths) > 1 or windows == 8
    assert max(lengths) == loaded.model.context_length


def test_several_texts_are_tagged_as_each_alone(bert):
    loaded = bert("tag", n_labels=3, labels=("O", "B-X", "I-X"))
    texts = ["the cat sat on the mat", "", "John Smith slept in Rome, " * 20, "dog"]
    together = loaded.tag(texts)
    for text, found in zip(texts, together, strict=True):
        alone = loaded.tag(text)
        assert [(x.begin, x.end, x.label) for x in found] == [(x.begin, x.end, x.label) for x in alone]
        assert [x.score for x in found] == pytest.approx([x.score for x in alone], abs=1e-5)
    assert loaded.tag([]) == []
