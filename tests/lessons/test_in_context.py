"""C4: tasks by prompt; what examples do and do not teach the shipped model, measured."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.evaluate.perplexity import score_continuations
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("in-context").names


def test_chat_fails_at_the_four_prompts_of_the_slides(lesson):
    wanted = {"language detection": "French", "translation": "fromage", "classification": "negative"}
    wanted["question answering"] = "Paris"
    assert list(lesson["written"]) == list(wanted)
    assert not [task for task, right in wanted.items() if right in lesson["written"][task]]
    chat = executed("in-context").text.partition("asked as a chat")[2].splitlines()[0]
    assert "Paris" in chat


def test_labels_are_scored_as_the_harness_would(lesson):
    """Examples in a KV cache, and rows in one padded batch, are the same as every prompt by itself."""
    loaded = heedful.load("chat", dtype=torch.float32)
    encode = loaded.tokenizer.encode
    for review in (0, 25):
        prompt = lesson["shots"](lesson["examples"][:2]) + f"Review: {lesson['reviews'][review]}\nSentiment:"
        whole = [(encode(f"{prompt} {label}"), 1) for label in lesson["labels"]]
        alone = [score for score, _ in score_continuations(loaded.model, whole)]
        assert lesson["found"][2][review].tolist() == pytest.approx(alone, abs=1e-3)


def test_examples_teach_the_form_and_not_the_task(lesson):
    found, truth = lesson["found"], lesson["truth"]
    p_label = {k: scores[:40].exp().sum(dim=1).mean().item() for k, scores in found.items()}
    assert p_label[0] < 0.001 and p_label[4] == pytest.approx(0.14, abs=0.01)
    for scores in found.values():
        assert (scores[:40].argmax(dim=1) == truth).float().mean() <= 0.55
        assert (scores[:40].argmax(dim=1) == 0).sum() > 34  # "positive to nearly everything"
    ranked = [float(lesson["ranked_right"](found[k])) for k in (0, 1, 2)]
    assert all(0.85 < share < 0.95 for share in ranked)  # "nine pairs in ten"
    assert (lesson["margin"][:40] > 0).all()  # "all forty points are to the right of 0"
    assert (lesson["other"][:40].argmax(dim=1) == 0).sum() < 25  # after a negative example
    assert lesson["ranked_right"](lesson["wrong"]) > lesson["ranked_right"](found[4])  # labels swapped


def test_calibration_moves_the_threshold(lesson):
    plain, calibrated = lesson["accuracy"]["as it is"], lesson["accuracy"]["calibrated"]
    assert all(calibrated[k][0] > plain[k][0] for k in plain)
    assert max(value for value, _, _ in calibrated.values()) == pytest.approx(80)
    assert calibrated[4][0] < calibrated[0][0]  # "four are no better than none"


def test_fine_tuned(lesson):
    assert (lesson["tuned"] == lesson["truth"]).float().mean() == pytest.approx(0.9, abs=0.03)
    assert 134.5 / 6.9 == pytest.approx(20, abs=1)  # "twenty times its size"


def test_a_repeated_sequence_is_copied_weakly(lesson):
    assert round(lesson["first"]) == 13 and round(lesson["second"]) == 9


def blocks(examples):
    return [f"Review: {review}\nSentiment: {label}\n\n" for review, label in examples]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("space", lambda e, q: "".join(blocks(e)) + f"Review: {q}\nSentiment: "),
        ("new line", lambda e, q: "".join(blocks(e)) + f"Review: {q}\nSentiment:\n"),
        ("reverse order", lambda e, q: "".join(blocks(e[::-1])) + f"Review: {q}\nSentiment:"),
        ("inside the loop", lambda e, q: blocks(e)[0] + f"Review: {q}\nSentiment:"),
        ("do not replace", lambda e, q: blocks(e)[-1] + f"Review: {q}\nSentiment:"),
        ("empty line", lambda e, q: "".join(blocks(e)).replace("\n\n", "\n") + f"Review: {q}\nSentiment:"),
        ("must end with", lambda e, q: "".join(blocks(e)) + f"Review: {q}"),
        ("without examples", lambda e, q: ("".join(blocks(e)) or "\n") + f"Review: {q}\nSentiment:"),
        ("query is not", lambda e, q: "".join(blocks(e)) + "Sentiment:"),
    ],
)
def test_a_wrong_prompt_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="few_shot_prompt")


def normalized(ratio):
    return ratio / ratio.sum(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("normalize after", lambda s, n: s.softmax(1) / n.softmax(1).mean(0)),
        ("nothing is calibrated", lambda s, n: s.softmax(1)),
        ("multiplies", lambda s, n: normalized(s.softmax(1) * n.softmax(1).mean(0))),
        ("each neutral row", lambda s, n: normalized(s.softmax(1) / n.exp().mean(0))),
        ("averages logarithms", lambda s, n: (s - n.mean(0)).softmax(1)),
        ("only the first", lambda s, n: normalized(s.softmax(1) / n.softmax(1)[0])),
        ("are these logarithms", lambda s, n: s - n.softmax(1).mean(0).log()),
        ("right", lambda s, n: (s - n.softmax(1).mean(0).log()).softmax(1)),
    ],
)
def test_a_wrong_calibration_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="calibrate_labels")
