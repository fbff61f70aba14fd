"""A chat model fine-tuned on conversations by one line, and its adapter where people use it."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.recipes.dry_run import dry_run
from heedful.recipes.resolve import resolve_recipe
from support.application import sync_client
from support.chats import CHATML, CHATS, TALK, write_chat_model
from support.trainings import own_cache

SHORT = [
    word
    for setting in (
        "train.steps=60 train.batch_size=1 train.eval_every=60 train.device=cpu optimizer.lr=0.02 log.samples=false "
        "schedule.warmup=5"
    ).split()
    for word in ("--set", setting)
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A chat model and one conversation."""
    folder = tmp_path_factory.mktemp("chat")
    write_chat_model(folder / "base")
    (folder / "chats.jsonl").write_text(CHATS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def run(here) -> Path:
    assert main(["train", "base", "chats.jsonl", *SHORT, "--quiet"]) == 0
    return here / "runs/chats-1"


def test_one_line_is_enough(run):
    """Everything else is chosen: the kind of data, adapters, rows, the rate."""
    chosen = tomllib.loads((run / "recipe.toml").read_text())
    assert chosen["data"]["kind"] == "chat" and chosen["adapter"]["kind"] == "lora"
    assert chosen["model"]["init_from"] == "base" and chosen["objective"]["name"] == "causal"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["kind"] == "step"]
    assert losses[0] > 3 and losses[-1] < 0.1


def test_it_answers_and_stops_at_the_end_of_its_turn(run, capsys):
    tuned = heedful.load(run)
    result = tuned.complete(TALK[:1], chat=True, temperature=0, max_tokens=40)[0].choices[0]
    assert result.text == TALK[1]["content"] and result.finish_reason == "stop"
    assert main(["generate", str(run), "What is red?", "--chat", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip().endswith(TALK[1]["content"])


def test_over_http_too(run):
    with sync_client(str(run)) as client:
        body = {"model": "chats-1", "messages": TALK[:1], "temperature": 0, "max_tokens": 40}
        status, reply = client("POST", "/v1/chat/completions", json=body)
    assert status == 200, reply
    choice = reply["choices"][0]
    assert choice["message"]["content"] == TALK[1]["content"] and choice["finish_reason"] == "stop"


def test_peft_runs_the_adapter(here, run):
    peft = pytest.importorskip("peft", reason="peft, the other implementation of adapters, is not installed")
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    tuned = heedful.load(run)
    base = transformers.AutoModelForCausalLM.from_pretrained(here / "base")
    theirs = peft.PeftModel.from_pretrained(base, run / "checkpoints" / "step-0000060").eval()
    reference = transformers.AutoTokenizer.from_pretrained(run / "checkpoints" / "step-0000060")
    ids = reference.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert ids["input_ids"][0].tolist() == tuned.tokenizer.chat(TALK[:1])
    with torch.no_grad():
        assert torch.allclose(theirs(**ids).logits, tuned.model(ids["input_ids"]).logits, atol=1e-4)
    exported = here / "merged"
    assert main(["export", str(run), str(exported)]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported)
    out = merged.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert reference.decode(out) == TALK[1]["content"] + "<|im_end|>"  # it stops there as well


def test_pairs_full_fine_tuning_and_epochs(here, capsys):
    rows = [{"prompt": f"What is red? {i}", "answer": "A rose"} for i in range(12)]
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--set", "adapter.kind=none", "--set", "log.samples=false", "--set", "train.device=cpu"]
    assert main(["train", "pairs.jsonl", "--init-from", "base", "--set", "data.length=64", *words]) == 0
    said = capsys.readouterr().err
    assert "11 conversations of" in said and "of them the assistant's" in said and "3 passes over the data" in said
    assert heedful.load("runs/pairs-1").eos_ids[-1] == heedful.load("base").tokenizer.id("<|im_end|>")


def test_an_estimate_counts_the_passes(here):
    found = resolve_recipe("chats.jsonl", {"data": {"length": 32}}, init_from="base")
    plan = dry_run(found.recipe)
    assert plan.recipe.train.steps == math.ceil(3 * len(plan.data) / 4) < 100


def test_what_is_missing_is_told(here, capsys):
    found = resolve_recipe("chats.jsonl")  # the chat model that ships is the default
    assert found.recipe.model == {"init_from": "chat"} and found.recipe.adapter.kind == "lora"
    assert "conversations: 4" in found.notes[0] and "heedful train MODEL chats.jsonl" in found.notes[1]
    assert main(["train", "base", "base", "chats.jsonl"]) == 2
    assert "heedful train MODEL DATA" in capsys.readouterr().err
    assert main(["train", "shakespeare", "chats.jsonl"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_new_model_learns_from_a_chat_model(here, run, capsys):
    """Distilled: the teacher's tokenizer, a template of its own, the loss on answers alone."""
    template = "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}" + CHATML
    student = ["model.family=llama", "model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.d_ff=64"]
    told = ["data.kind=chat", "objective.name=distill", f"objective.teacher={run}", "objective.cosine=0", *student]
    words = [word for setting in told for word in ("--set", setting)]
    words += ["--set", f"tokenizer.chat_template={json.dumps(template)}"]
    assert main(["train", "chats.jsonl", *SHORT, *words, "--out", "small", "--quiet"]) == 0
    small = heedful.load("small")
    assert small.tokenizer.chat_template == template and len(small.chat_eos_ids) == 2
    log = [json.loads(line) for line in (here / "small/log.jsonl").read_text().splitlines()]
    steps = [line for line in log if line["kind"] == "step"]
    assert steps[-1]["hard_loss"] < 0.5 * steps[0]["hard_loss"] and steps[-1]["soft_loss"] < steps[0]["soft_loss"]
    with pytest.raises(ValueError, match=r"a new one needs a teacher: objective\.name distill"):
        main_train = [*words, "--set", "objective.name=causal", "--out", "other"]
        from heedful.recipes.launch import train
        from heedful.train.recipe import parse_changes

        train("chats.jsonl", parse_changes(main_train[1::2][:-1]), folder=here / "other", quiet=True)
