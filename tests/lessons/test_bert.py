"""The lesson on BERT: what was counted, what the model says, and what is said of wrong answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def names():
    return executed("bert").names


def test_the_shares_of_hidden_words(names):
    shares = [float(share) for share in names["shares"].values()]
    assert shares == pytest.approx([0.15, 0.8, 0.1, 0.1, 0.5], abs=0.035)


def test_the_loss_is_that_of_the_targets_alone(names):
    by_hand = F.cross_entropy(names["logits"][names["asked"]], names["few"].targets[names["asked"]])
    assert float(names["trained"].sum / names["trained"].n_targets) == pytest.approx(float(by_hand), abs=1e-4)


def test_a_random_token_is_not_simply_believed(names):
    masked, itself, random = names["right"].values()
    assert masked == pytest.approx(0.43, abs=0.02) and itself > 0.95
    assert 0.8 * masked < random < masked


def test_the_words_on_both_sides_decide(names):
    sentences = (
        "She drank a glass of _.",
        "She ate a slice of _.",
        "The _ shone all day.",
        "The _ sailed across the sea.",
    )
    best = [names["bert"].fill(sentence).top(k=1)[0][0] for sentence in sentences]
    assert best == ["wine", "bread", "sun", "ship"]


def test_sequels_are_told_from_strangers(names):
    follows = names["follows"]
    assert min(follows[::2]) > 0.9 and max(follows[1::2]) < 0.3


def test_what_is_said_of_wrong_answers(capsys):
    def said(answer, name):
        return verdict(answer, capsys, name=name)

    def corrupted(ids, chosen, fate, random_ids, mask_id, *, low=0.8, everywhere=False, truth=True):
        hidden = torch.where(fate < low, mask_id, torch.where(fate < 0.9, random_ids, ids))
        inputs = hidden if everywhere else torch.where(chosen, hidden, ids)
        return inputs, torch.where(chosen, ids if truth else inputs, -100)

    def changed(**how):
        return lambda *given: corrupted(*given, **how)

    assert "right" in said(changed(), "corrupted")
    assert "below 0.8 becomes [MASK]" in said(changed(low=0.5), "corrupted")
    assert "not chosen is changed" in said(changed(everywhere=True), "corrupted")
    assert "after hiding" in said(changed(truth=False), "corrupted")
    assert "return two tensors" in said(lambda *given: corrupted(*given)[0], "corrupted")

    def mean(logits, targets, **how):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)

    assert "divide by how many" in said(lambda x, t: mean(x, t, reduction="sum"), "masked_loss")
    assert "all positions" in said(lambda x, t: mean(x, t, reduction="none").mean(), "masked_loss")
    assert "as GPT does" in said(lambda x, t: mean(x[:, :-1], t[:, 1:]), "masked_loss")
    assert "sign" in said(lambda x, t: -mean(x, t), "masked_loss")
