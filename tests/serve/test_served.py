"""What can be served: a folder of transformers, a GGUF file, a run of ours; several at once, within a memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import heedful
from heedful.cli import main
from heedful.text import Tokenizer
from heedful.weights.save import save
from support.serving import Server, as_gguf, assert_error, exported, serving, words
from support.tiny import tiny
from support.trainings import own_cache, write_story

ASK = {"prompt": "the old dog", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished training of two steps."""
    here = tmp_path_factory.mktemp("runs")
    settings = "model.d_model=16 model.n_layers=1 model.n_heads=2 train.steps=2 train.batch_size=4 data.length=16"
    settings += " log.samples=false train.device=cpu"
    given = [part for assignment in settings.split() for part in ("--set", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.chdir(here)
        assert main(["train", write_story(here / "story.txt"), *given, "--out", str(here / "mine")]) == 0
    return here / "mine"


def answers(folder: Path) -> Path:
    """A T5, which answers its prompt instead of continuing it."""
    tokenizer = words()
    save(tiny("t5", vocab_size=len(tokenizer)), folder, Tokenizer(tokenizer.backend, roles=tokenizer.roles))
    return folder


def test_whatever_we_can_load(tmp_path, run):
    """By the names of their folders and files, or by a name given to them."""
    hub, gguf, t5 = exported(tmp_path / "hub"), as_gguf(tmp_path / "llama.gguf"), answers(tmp_path / "t5")
    server = Server(hub, gguf, f"trained={run}", t5)
    assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["hub", "llama", "trained", "t5"]
    assert server.count("heedful_model_loaded") == 1  # the first; the others when they are asked for
    for name, source in (("hub", hub), ("llama", gguf), ("trained", run), ("t5", t5)):
        expected = heedful.load(source).complete("the old dog", max_tokens=5, temperature=0)[0].choices[0]
        found = server.complete(model=name, **ASK)
        assert found["choices"][0]["text"] == expected.text and found["model"] == name
    assert server.count("heedful_model_loaded") == 4
    assert_error(server.post("/v1/completions", {**ASK, "model": "t5", "echo": True}), 400, param="echo")
    assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in "".join(server.said)


def test_models_make_room_for_each_other(folder):
    """Memory for one of two: the idle one goes when the other is asked for, and comes back."""
    with serving(f"one={folder}", f"two={folder}", memory=0.002, cache_tokens=1024) as server:
        loaded = 'heedful_model_loaded{model="%s"}'
        texts = []
        for name, other in (("one", "two"), ("two", "one"), ("one", "two")):
            texts.append(server.complete(model=name, **ASK)["choices"][0]["text"])
            metrics = server.metrics()
            assert metrics[loaded % name] == 1 and metrics.get(loaded % other, 0) == 0
        assert len(set(texts)) == 1
        message = assert_error(server.post("/v1/completions", ASK), 404, code="model_not_found")
        assert "one" in message and "two" in message  # which of them?


def test_the_only_model_needs_no_name():
    with serving("tiny", quantize="int8") as server:
        assert server.complete(prompt="To be", max_tokens=3)["model"] == "tiny"
