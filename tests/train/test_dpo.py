"""Preference training by DPO: the formats of pairs, its reference, whole runs. test_preference_parity.py has TRL."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import heedful
from heedful.data.dataset import Draw
from heedful.data.preferences import Preferences, is_preference_file, read_preferences
from heedful.models.base import Batch
from heedful.recipes.dry_run import dry_run
from heedful.recipes.launch import resume, train
from heedful.recipes.resolve import resolve_recipe
from heedful.train import loss as loss_module
from heedful.train.adapters import adapt
from heedful.train.dpo import DPO
from heedful.train.recipe import AdapterSettings
from support.chats import write_chat_model
from support.folders import tiny_gpt
from support.trainings import assert_same_run, changes, logged, power_cut

ASKED, CHOSEN, REJECTED = "What is red?", "A rose is red.", "red"


def says(role, content):
    return {"role": role, "content": content}


TALKS = {
    "texts": {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
    "messages": {
        "prompt": [says("user", ASKED)],
        "chosen": [says("assistant", CHOSEN)],
        "rejected": [says("assistant", REJECTED)],
    },
    "implicit": {
        "chosen": [says("user", ASKED), says("assistant", CHOSEN)],
        "rejected": [says("user", ASKED), says("assistant", REJECTED)],
    },
    "whole": {
        "prompt": ASKED,
        "chosen": [says("user", ASKED), says("assistant", CHOSEN)],
        "rejected": [says("user", ASKED), says("assistant", REJECTED)],
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("dpo") / "base")


def write(folder, *rows):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("row", TALKS.values(), ids=TALKS)
def test_the_formats_of_the_hub(base, tmp_path, row):
    tokenizer = heedful.load(base).tokenizer
    path = write(tmp_path, row)
    assert is_preference_file(path)
    for (ids, own), answer in zip(read_preferences(path, tokenizer)[0], (CHOSEN, REJECTED), strict=True):
        assert ids == tokenizer.chat([says("user", ASKED), says("assistant", answer)], add_generation_prompt=False)
        learned = [i for i, of_answer in zip(ids, own, strict=True) if of_answer]
        assert tokenizer.decode(learned, skip_special=False) == answer + "<|im_end|>"


def test_only_the_last_answer_is_compared(base, tmp_path):
    tokenizer = heedful.load(base).tokenizer
    before = [says("user", "red"), says("assistant", "A rose"), says("user", ASKED)]
    row = {side: [*before, says("assistant", text)] for side, text in (("chosen", CHOSEN), ("rejected", REJECTED))}
    ids, own = read_preferences(write(tmp_path, row), tokenizer)[0][0]
    assert tokenizer.decode([i for i, o in zip(ids, own, strict=True) if o]) == CHOSEN


def test_without_a_template_pairs_are_plain_text(base, tmp_path):
    tokenizer = heedful.load(base).tokenizer
    tokenizer.chat_template = None
    transcripts = {"chosen": f"{ASKED} {CHOSEN}", "rejected": f"{ASKED} {REJECTED}"}
    for row in TALKS["texts"] | {"prompt": f"{ASKED} "}, transcripts:
        ids, own = read_preferences(write(tmp_path, row), tokenizer)[0][0]
        assert tokenizer.decode(ids, skip_special=False) == f"{ASKED} {CHOSEN}<|endoftext|>"
        assert tokenizer.decode([i for i, o in zip(ids, own, strict=True) if o]) == CHOSEN
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 1: .*no chat template"):
        read_preferences(write(tmp_path, TALKS["messages"]), tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, '"rejected" answer; it has: prompt, chosen'),
        ({"prompt": "a", "chosen": "b", "rejected": [says("assistant", "c")]}, "both be texts, or both lists"),
        ({"chosen": [says("user", "a")], "rejected": [says("user", "a")]}, "an answer of the assistant's"),
        ({"chosen": "one", "rejected": "other"}, "do not begin with the same words"),
    ],
)
def test_a_wrong_pair_is_told(base, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_preferences(write(tmp_path, row), heedful.load(base).tokenizer)


# --- the loss ---------------------------------------------------------------------------------------------------------


def pairs():
    rows = [[([5, 6, 7, 8], [0, 0, 1, 1]), ([5, 6, 9], [0, 0, 1])], [([7, 8], [0, 1]), ([7, 9, 10, 2], [0, 1, 1, 1])]]
    return Preferences(rows, 16).batch([Draw(0, 0), Draw(0, 1)], 0)


def test_pairs_and_smoothing_by_their_formula(monkeypatch):
    """With logits in chunks of two rows as well."""
    model, reference, batch = tiny_gpt(), tiny_gpt(), pairs()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape))

    def log_prob(some, row, targets):
        return some(row[None]).logits[0].log_softmax(-1)[targets != -100, targets[targets != -100]].sum()

    rewards = [
        [log_prob(model, *x) - log_prob(reference, *x) for x in zip(*pair, strict=True)]
        for pair in zip(batch.tokens, batch.targets, strict=True)
    ]
    z = torch.stack([0.5 * (chosen - rejected) for chosen, rejected in rewards])
    want = -(0.8 * F.logsigmoid(z) + 0.2 * F.logsigmoid(-z)).sum()
    objective = DPO(reference, beta=0.5, smoothing=0.2)
    torch.testing.assert_close(objective(model, batch).sum, want)
    monkeypatch.setitem(loss_module.CHUNK, "cpu", 2 * 4 * 61)
    torch.testing.assert_close(objective(model, batch).sum, want)
    parts = [objective(model, _part(batch, i)) for i in range(2)]
    torch.testing.assert_close(sum(part.sum for part in parts), want)
    assert sum(part.n_targets for part in parts) == 2


def _part(batch, i):
    cut = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: x if x is None else x[i : i + 1] for name, x in cut.items()})


def test_adapters_off_are_the_reference():
    torch.manual_seed(0)
    model, reference = tiny_gpt(), tiny_gpt()
    with pytest.raises(ValueError, match="give its reference, or train adapters"):
        DPO()(model, pairs())
    adapt(model, AdapterSettings(kind="lora", rank=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_b" in name:
                p.normal_(std=0.2)
    model.train()
    mine, want = DPO()(model, pairs()), DPO(reference)(model, pairs())
    assert mine.metrics["margin"][0] != 0
    torch.testing.assert_close(mine.sum, want.sum)
    mine.sum.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Of each pair, the answer with a rose is preferred."""
    said = [
        (f"{a} {b}?", f"A rose {a}.", f"is {b}") for a in ("red", "What", "is") for b in ("rose", "red", "user", "A")
    ]
    rows = [{"prompt": asked, "chosen": good, "rejected": bad} for asked, good, bad in said]
    return write(tmp_path_factory.mktemp("pairs"), *rows)


SHORT = changes(
    train={"steps": 12, "batch_size": 4, "eval_every": 6, "eval_first": True, "epochs": 0},
    data={"length": 64, "share": 0.25},
    optimizer={"lr": 0.003},
)


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_run_learns_what_is_preferred_and_resumes(base, data, tmp_path, kind):
    settings = {**SHORT, "adapter": {"kind": kind}}
    train(data, settings, init_from=str(base), folder=tmp_path / "whole", quiet=True)
    with power_cut(after=9):
        train(data, settings, init_from=str(base), folder=tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)
    first, *_, last = logged(tmp_path / "whole", "validation")
    assert first["step"] == 0 and first["margin"] == pytest.approx(0, abs=1e-4)
    assert last["accuracy"] == last["ranking_accuracy"] == 1 and last["margin"] > 0.1 and last["loss"] < first["loss"]


def test_an_estimate_knows_the_reference(base, data):
    recipe = resolve_recipe(data, SHORT, init_from=str(base)).recipe
    assert dry_run(recipe).objective.reference is None  # adapters
    whole = dry_run(recipe.replace(adapter={"kind": "none"}))
    assert whole.objective.reference is not None and whole.batch(3).tokens.shape == (3, 2, 64)
