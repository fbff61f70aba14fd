"""Entities from the tags of words."""

from __future__ import annotations

import torch

from heedful.models.base import Batch


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
