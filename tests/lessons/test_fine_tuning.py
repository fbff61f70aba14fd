"""The lesson on fine-tuning: what the steps are worth, what the heads compute, what is said of wrong answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def names():
    return executed("fine-tuning").names


def test_real_messages_are_scored_in_the_results():
    results = (Path(__file__).parents[2] / "RESULTS.md").read_text(encoding="utf-8")
    assert "spam, 1,035 test messages | 98.9 % (98.3 to 99.5)" in results


def test_fine_tuning_beats_words_and_the_majority(names):
    majority, by_words, before, after = names["scores"].values()
    assert majority == 0.5 and before < 0.7
    assert 0.6 < by_words < 0.85
    assert after > max(by_words, 0.8)


def test_most_words_of_new_messages_are_unknown(names):
    assert 0.58 < sum(names["unknown"]) / len(names["unknown"]) < 0.64


def test_the_heads_by_hand_are_those_of_the_tasks(names):
    text = "Send two pounds and we will tell you your future."
    lines = [output.text for output in executed("fine-tuning").outputs if output.text.startswith("by hand ")]
    assert len(lines) == 1
    by_hand, classified = (dict(eval(line[9:])) for line in lines[0].splitlines())
    assert by_hand == pytest.approx(classified, abs=1e-4)
    assert names["spam"].classify(text)[0].score == pytest.approx(max(by_hand.values()), abs=1e-4)


def test_answers_of_the_passage(names):
    assert [answer.text for answer in names["answers"].values()] == ["6,400 kilometres", "Andes of Peru", ""]
    begin, end = int(names["begins"].argmax()), int(names["ends"].argmax())
    assert (
        names["reader"].tokenizer.decode(
            names["reader"].tokenizer.encode_pair("How long is the Amazon?", names["passage"])[0][begin : end + 1]
        )
        == "6, 400 kilometres"
    )


def test_names_are_found(names):
    assert [(span.text, span.label) for span in names["spans"]] == [
        ("Marie Curie", "PER"),
        ("Warsaw", "LOC"),
        ("Paris", "LOC"),
    ]
    assert names["tagger"].model.head.classifier.weight.shape == (7, 320)
    added = sum(p.numel() for p in names["tagger"].model.head.classifier.parameters())
    assert added == 7 * 320 + 7 < 3000
    assert names["model"].head.classifier.weight.shape == (2, 256)


def test_the_f1_of_the_question():
    precision, recall = 3 / 5, 3 / 4
    assert 2 * precision * recall / (precision + recall) == pytest.approx(0.67, abs=0.005)


def test_what_is_said_of_wrong_answers(capsys):
    def said(answer, name):
        return verdict(answer, capsys, name=name)

    def best(begins, ends, longest):
        sums = (begins[:, None] + ends).masked_fill(~torch.ones(15, 15).triu().tril(longest - 1).bool(), -torch.inf)
        return divmod(int(sums.argmax()), 15)

    assert "right" in said(lambda *given: best(*given), "best_answer")
    assert "before it begins" in said(lambda b, e, n: (int(b.argmax()), int(e.argmax())), "best_answer")
    assert "are allowed" in said(lambda b, e, n: best(b, e, 15), "best_answer")
    assert "exactly 4 tokens" in said(lambda b, e, n: best(b, e, n - 1), "best_answer")

    def first_then_end(b, e, n):
        i = int(b.argmax())
        return i, i + int(e[i : i + n].argmax())

    assert "not at the best beginning first" in said(first_then_end, "best_answer")

    def entities(tags, *, gap=False, merge=False, strict=False, beyond=0):
        found = []
        for i, tag in enumerate(tags):
            if tag == "O":
                continue
            kind, label = tag.split("-")
            goes_on = found and found[-1][0] == label and (gap or found[-1][2] == i - 1)
            if (kind == "I" or merge) and goes_on:
                found[-1] = (label, found[-1][1], i)
            elif kind == "B" or not strict:
                found.append((label, i, i))
        return [(label, first, last + beyond) for label, first, last in found]

    assert "right" in said(lambda tags: entities(tags), "entities_of")
    assert "not [('PER', 1, 1)]" in said(lambda tags: entities(tags, beyond=1), "entities_of")
    assert "B- begins a new entity" in said(lambda tags: entities(tags, merge=True), "entities_of")
    assert "I- of another label" in said(lambda tags: entities(tags, strict=True), "entities_of")
    assert "O ends it" in said(lambda tags: entities(tags, gap=True), "entities_of")
    assert "return" in said(lambda tags: None, "entities_of")
