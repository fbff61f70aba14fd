"""The lesson on layers: what parts two meanings, which layers tag unseen names best, and the lecture's table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from heedful.observe.lens import combine_layers
from lessons.support import executed, verdict

TITLES = {
    "first": "first (embeddings)", "last": "last", "sum_all": "sum of all", "second_to_last": "second-to-last",
    "sum_last_four": "sum of the last four", "concat_last_four": "concatenation of the last four",
}  # fmt: skip


@pytest.fixture(scope="module")
def names():
    return executed("which-layer").names


def test_layers_part_two_meanings_of_bank_and_watch_but_not_of_spring(names):
    gaps = {word: (same - different).tolist() for word, (same, different) in names["similar"].items()}
    assert all(abs(gap[0]) < 0.03 for gap in gaps.values())
    assert max(gaps["bank"]) > 0.15 and max(gaps["watch"]) > 0.08
    assert max(map(abs, gaps["spring"])) < 0.03


def test_no_name_is_in_both_parts(names):
    assert not any(word in names["seen"] for word in names["names"]) and len(names["known"]) == 40


def test_the_probe_by_hand_is_heedfuls(names):
    assert float((names["by_hand"] == names["fitted"]).float().mean()) > 0.98


def test_the_order_of_the_layers(names):
    scores = names["scores"]
    assert scores["first"] == min(scores.values()) and scores["first"] == pytest.approx(45.9, abs=3)
    assert scores["last"] == pytest.approx(60.1, abs=4)
    assert max(scores[str(i)] for i in (2, 3)) > scores["last"] + 8
    assert scores["concat_last_four"] == max(scores[which] for which in names["BERT_BASE"])
    assert min(scores[which] for which in ("sum_all", "sum_last_four", "concat_last_four")) > scores["last"]


def test_the_tables_are_the_lectures_and_that_of_the_results(names):
    assert list(names["BERT_BASE"].values()) == [91.0, 94.9, 95.5, 95.6, 95.9, 96.1]
    results = (Path(__file__).parents[2] / "RESULTS.md").read_text(encoding="utf-8")
    for which, score in names["ON_CONLL"].items():
        assert any(f"| {TITLES[which]} | {bold}{score}{bold} (" in results for bold in ("", "**"))
    assert "--train-sentences 2000 --dev-sentences 1000" in results


def test_what_is_said_of_wrong_answers(capsys):
    def said(answer, name):
        return verdict(answer, capsys, name=name)

    def but(which, features):
        return lambda layers, asked: features(layers) if asked == which else combine_layers(layers, asked)

    assert "right" in said(lambda layers, which: combine_layers(layers, which), "word_features")
    wrong = {
        "row 0": but("first", lambda x: x[1]),
        "row before the last": but("second_to_last", lambda x: x[-1]),
        "leaves out row 0": but("sum_all", lambda x: x.sum(0)),
        "that is a mean": but("sum_all", lambda x: x[1:].mean(0)),
        "last four rows": but("sum_last_four", lambda x: x[-3:].sum(0)),
        "not along the tokens": but("concat_last_four", lambda x: torch.cat(list(x[-4:]))),
        "side by side": but("concat_last_four", lambda x: torch.cat(list(x[:4]), dim=-1)),
    }
    for message, answer in wrong.items():
        assert message in said(answer, "word_features")

    def memory(known, words, *, lower=False):
        counts = {}
        for some, tags in known:
            for word, tag in zip(some, tags, strict=True):
                counts.setdefault(word.lower() if lower else word, Counter())[tag] += 1
        words = [word.lower() if lower else word for word in words]
        return [counts[word].most_common(1)[0][0] if word in counts else "O" for word in words]

    first = {word: tag for tag, word in [("B-PER", "Paris"), ("B-PER", "Anna"), ("O", ".")]}
    assert "right" in said(lambda known, words: memory(known, words), "by_memory")
    assert "not the first" in said(lambda known, words: [first.get(w, "O") for w in words], "by_memory")
    assert "as they are written" in said(lambda known, words: memory(known, words, lower=True), "by_memory")
    assert "O, not" in said(lambda known, words: ["B-PER", "B-LOC", "B-LOC", "O"][: len(words)], "by_memory")
