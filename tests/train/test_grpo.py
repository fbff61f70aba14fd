"""GRPO: rewards by rules, rollouts by the engine, whole runs. test_preference_parity.py has TRL's loss."""

from __future__ import annotations

import json

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.data.dataset import Draw
from heedful.data.prompts import Prompts, read_prompts
from heedful.data.rewards import RULES, check_reward_answer
from heedful.recipes.dry_run import dry_run
from heedful.recipes.launch import resume, train
from heedful.recipes.resolve import resolve_recipe
from heedful.train.grpo import GRPO
from heedful.train.rollouts import Rollouts
from support.chats import write_chat_model
from support.trainings import assert_same_run, changes, logged, power_cut

SCHEMA = json.dumps({"type": "object", "properties": {"red": {"type": "integer"}}, "required": ["red"]})


@pytest.mark.parametrize(
    ("rule", "answer", "right", "wrong"),
    [
        ("exact", "46", [" 46\n", "46"], ["46.", "146", ""]),
        ("contains", "rose", ["A rose is red."], ["Ros", ""]),
        ("regex", r"\d+( apples)?", ["12", "3 apples "], ["3 apples more", "x 3"]),
        ("json_schema", SCHEMA, ['{"red": 3}', ' {"red":3,"more":[]}'], ['{"red": "3"}', "{}", '{"red": 3', "red"]),
    ],
)
def test_rules(rule, answer, right, wrong):
    assert [RULES[rule](text, answer) for text in right] == [1.0] * len(right)
    assert [RULES[rule](text, answer) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("rule", "answer", "message"),
    [
        ("exact", " ", "compares with an answer"),
        ("regex", "(", "no regular expression"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", '{"type": "thing"}', "not understood"),
    ],
)
def test_what_a_rule_cannot_use_is_told(rule, answer, message):
    with pytest.raises(ValueError, match=message):
        check_reward_answer(rule, answer)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("grpo") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A model is praised for what has an e: chance is about a half."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"{a} {b}?", "answer": "e"} for a in ("red", "What", "is") for b in ("rose", "red", "user", "A")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_end_where_the_answer_begins(base, tmp_path):
    tokenizer = heedful.load(base).tokenizer
    asked = [{"role": "user", "content": "What is red?"}]
    rows = [
        {"prompt": "What is red?", "answer": "A rose"},
        {"prompt": asked, "solution": "A rose"},
        {"messages": [*asked, {"role": "assistant", "content": "red"}], "answer": 7},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids, answers = read_prompts(tmp_path / "p.jsonl", tokenizer)
    assert ids == [tokenizer.chat(asked)] * 3 and answers == ["A rose", "A rose", "7"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is red?"}\n')
    with pytest.raises(ValueError, match=r"line 1: no prompt with the answer"):
        read_prompts(tmp_path / "p.jsonl", tokenizer)


def test_rollouts_are_the_models_own_and_the_same_however_prompts_are_cut(base):
    """Rewarded by a function: the share of the letters that are in the answer."""
    loaded = heedful.load(base)
    model, tokenizer = loaded.model.train(), loaded.tokenizer
    prompts = Prompts(
        [tokenizer.chat([{"role": "user", "content": text}]) for text in ("red", "What is")], ["abc", "e"]
    )
    stops = loaded.chat_eos_ids
    seen = []

    def reward(completion, answer):
        seen.append((completion, answer))
        return sum(letter in answer for letter in completion) / max(1, len(completion))

    sample = Rollouts(tokenizer, prompts.answers, reward, stop_ids=stops, group=3, max_tokens=7)
    draws = [Draw(0, 0), Draw(0, 1)]
    both = sample(model, prompts.batch(draws, 1))
    assert model.training and both.tokens.shape[:2] == both.rewards.shape == (2, 3)
    assert [answer for _, answer in seen] == ["abc"] * 3 + ["e"] * 3
    alone = [sample(model, prompts.batch([draw], 1)) for draw in draws]
    assert torch.equal(torch.cat([batch.rewards for batch in alone]), both.rewards)
    for i, batch in enumerate(alone):
        n = batch.tokens.shape[2]
        assert torch.equal(batch.tokens[0], both.tokens[i, :, :n]) and torch.equal(
            batch.targets[0], both.targets[i, :, :n]
        )
    row, own = both.tokens[1, 2], both.targets[1, 2]
    learned = own[own != -100].tolist()
    assert tokenizer.decode([t for t in learned if t not in stops]) == seen[5][0] and len(learned) <= 7
    begin = len(prompts.ids[1])
    assert row[:begin].tolist() == prompts.ids[1].tolist() and row[begin : begin + len(learned)].tolist() == learned
    other = sample(model, prompts.batch([Draw(1, 0), Draw(1, 1)], 1))  # the next epoch
    assert other.tokens.shape != both.tokens.shape or not torch.equal(other.tokens, both.tokens)
    greedy = sample(model.eval(), prompts.batch(draws, 1))
    assert greedy.rewards.shape == (2, 1)
    loss = GRPO(sample)(model, greedy)
    torch.testing.assert_close(loss.mean, 1 - greedy.rewards.mean())


SHORT = changes(
    train={"steps": 12, "batch_size": 4, "eval_every": 6, "eval_first": True, "epochs": 0},
    data={"kind": "prompts", "length": 32, "share": 0.25},
    objective={"reward": "contains", "group": 4, "max_tokens": 6},
    optimizer={"lr": 0.01},
)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("lora", {"kl": 0.01}), ("none", {"kl": 0.01, "updates": 2, "loss_type": "dr_grpo"})],
)
def test_a_run_learns_what_is_rewarded_and_resumes(base, data, tmp_path, kind, more):
    settings = {**SHORT, "adapter": {"kind": kind}, "objective": {**SHORT["objective"], **more}}
    train(data, settings, init_from=str(base), folder=tmp_path / "whole", quiet=True)
    with power_cut(after=9):
        train(data, settings, init_from=str(base), folder=tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)
    steps = logged(tmp_path / "whole")
    assert sum(s["reward"] for s in steps[-3:]) > sum(s["reward"] for s in steps[:3]) and steps[-1]["kl"] > 0
    first, *_, last = logged(tmp_path / "whole", "validation")
    assert first["step"] == 0 and last["loss"] == pytest.approx(1 - last["reward"])


def test_micro_batches_add_up(base, data, tmp_path):
    found = []
    for n in 1, 4:
        settings = {**SHORT, "train": {**SHORT["train"], "steps": 2, "accumulate": n}}
        train(data, settings, init_from=str(base), folder=tmp_path / str(n), quiet=True)
        found.append(logged(tmp_path / str(n)))
    for a, b in zip(*found, strict=True):
        assert a["reward"] == b["reward"] and a["norm"] == pytest.approx(b["norm"], rel=1e-4)


def test_an_estimate_and_what_is_missing(base, data, capsys):
    plan = dry_run(resolve_recipe(data, SHORT, init_from=str(base)).recipe)
    assert plan.batch(2).tokens.shape == (2, 4, 38) and any("sampling" in note for note in plan.notes)
    assert main(["train", str(data), "--set", "data.kind=prompts"]) == 2
    assert "heedful train MODEL" in capsys.readouterr().err
    long = ["--set", "data.length=120", "--set", "data.kind=prompts", "--set", "log.samples=false"]
    assert main(["train", str(base), str(data), *long, "--set", "objective.reward=contains"]) == 2
    assert "longer than the model's 128" in capsys.readouterr().err
