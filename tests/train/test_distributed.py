"""Two real processes do what one does: the curves, the checkpoints, the ways to end."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from heedful.train import optimizers
from heedful.train.distributed import Processes
from heedful.train.recipe import Recipe
from support import together

SHARDED = {"train": {"sharded": True}}
PARTS = {"accumulate": 2, "ema": 0.9}

# Lines of 3 to 12 tokens, six to a step. Two processes train each of these together, and one alone.
CURVES = {
    "gpt": {"train": PARTS, "sample": True},
    "gpt, sharded": {"train": {**PARTS, "sharded": True}, "sample": True},
    "gpt, sharded, recomputed": {"train": {"sharded": True, "checkpoint_activations": True}},
    "bert, whose pooler masked text does not ask": {"family": "bert", "train": {"accumulate": 3}},
    "t5, sharded": {"family": "t5", **SHARDED},
    "recurrent, sharded": {"family": "seq2seq", **SHARDED},
    "experts, of whom some are not asked": {"family": "mixtral", "train": {"accumulate": 3}},
    "experts, sharded": {"family": "mixtral", **SHARDED},
    "partly frozen": {"frozen": ["embed", "blocks.0"], "train": {"accumulate": 2}},
    "partly frozen, sharded": {"frozen": ["embed", "blocks.0"], **SHARDED},
    "lion, sharded": {"optimizer": {"name": "lion"}, **SHARDED},
    "sgd, sharded": {"optimizer": {"name": "sgd", "lr": 0.1}, **SHARDED},
}
# These round to bfloat16 somewhere, and not in the same order.
NEAR = {
    "muon, sharded": {"optimizer": {"name": "muon"}, "train": {"sharded": True, "steps": 2}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "bfloat16, sharded": {"train": {"precision": "bfloat16", "sharded": True}},
}
RUN = {"run": True, "train": PARTS}
SHARDED_RUN = {"run": True, "train": {**PARTS, "sharded": True}}
SPOILED = {
    f"{kind}{', sharded' * sharded}": {"spoiled": kind, "train": {"sharded": sharded, "halt_after": 2}}
    for kind in ("loss", "gradient")
    for sharded in (False, True)
}
STOPPED = {"stopped_at": 1, **SHARDED_RUN}


def waits(processes, folder):
    """A job: all that processes can tell each other."""
    with processes.main_first(), (folder / "order").open("a") as file:
        file.write(f"{processes.rank} ")
    processes.barrier("the order to be read")
    found = {"order": (folder / "order").read_text(), "texts": processes.gather_texts(f"I am {processes.rank}")}
    found["agreed"] = processes.broadcast_text(f"{processes.rank} decides")
    found["any"] = [processes.any_process(processes.rank == 1), processes.any_process(False)]
    return found


def is_late(processes, folder):
    """A job: the second process does not come to dinner; it waits for an answer."""
    processes.gather_texts("here")
    if processes.main:
        processes.barrier("dinner", minutes=0.005)
    processes.gather_texts("is anybody there?")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def two(place):
    runs = {"run": RUN, "sharded run": SHARDED_RUN, "stopped": STOPPED}
    jobs = {**CURVES, **NEAR, **runs, **SPOILED, "waits": waits}
    measured, ends, said = together.launch(2, place / "two", jobs)
    assert ends == [0, 0], said
    return measured


@pytest.fixture(scope="module")
def one(place):
    measured, ends, said = together.launch(1, place / "one", {**CURVES, **NEAR, "run": RUN})
    assert ends == [0], said
    return measured


# --- the same curve --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CURVES)
def test_two_processes_learn_what_one_does(one, two, name):
    alone, both = one[name], two[name]
    assert both["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert both["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert both["judged"] == pytest.approx(alone["judged"], abs=1e-5)  # of 7 lines one process has fewer batches
    assert alone["judged"][-1] < alone["judged"][0]
    assert both["idle"] == alone["idle"]  # parameters that got no gradient are as they were, on both
    assert both["tied"] == alone["tied"]


def test_the_curves_are_of_what_they_say(one, two):
    assert two["gpt, sharded"]["tied"] and two["t5, sharded"]["tied"]
    assert two["bert, whose pooler masked text does not ask"]["idle"] > 0
    assert two["experts, of whom some are not asked"]["idle"] == 0
    assert len(one["gpt"]["losses"]) == 4 and len(one["gpt"]["judged"]) == 2


@pytest.mark.parametrize("name", ["gpt", "gpt, sharded"])
def test_one_process_can_use_the_model_while_the_other_waits(one, two, name):
    alone, both = ([float(x) for x in each[name]["samples"]] for each in (one, two))
    assert len(both) == 2 and both == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("name", NEAR)
def test_two_processes_learn_nearly_what_one_does_in_bfloat16(one, two, name):
    assert two[name]["losses"] == pytest.approx(one[name]["losses"], abs=0.02)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def continued(place, source, world_size, job, name):
    """Go on with a copy of a run from its step 2."""
    folder = place / name
    folder.mkdir()
    shutil.copytree(source, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-0000004", ignore_errors=True)
    measured, ends, said = together.launch(world_size, folder, {"run": job})
    assert ends == [0] * world_size, said
    return measured["run"]


@pytest.mark.parametrize("world_size, job", [(1, RUN), (2, RUN), (2, SHARDED_RUN)], ids=["1", "2", "2 sharded"])
def test_a_run_goes_on_with_another_number_of_processes(one, two, place, world_size, job):
    """Of two that shared parameters, and of one: each with every bit of the weights and of the optimizer's state."""
    sources = {"two/sharded run": two["sharded run"], "one/run": one["run"]}
    for source, was in sources.items():
        now = continued(place, place / source, world_size, job, f"{source.replace('/', ' ')} {world_size} {job is RUN}")
        assert now["restored"] == was["saved"]["2"]
        assert now["losses"] == pytest.approx(one["run"]["losses"][2:], abs=1e-5)


def test_who_wrote_a_checkpoint_cannot_be_seen(one, two, place):
    folders = [place / name / "checkpoints" / "step-0000002" for name in ("one/run", "two/run", "two/sharded run")]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] == names[2]
    shapes = [{k: v.shape for k, v in load_file(folder / "training.safetensors").items()} for folder in folders]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("job", [RUN, SHARDED_RUN], ids=["run", "sharded"])
def test_a_run_goes_on_after_one_process_was_killed(one, place, job):
    """SIGKILL after step 3, with a checkpoint of step 2; then both, or one alone, do the rest."""
    name = f"killed {job is RUN}"
    _, ends, said = together.launch(2, place / name, {"run": {"killed_at": 3, **job}})
    assert ends == [1, -9]
    assert "process 0 of 2" in said and "another ended without a word" in said
    for world_size in 1, 2:
        now = continued(place, place / name / "run", world_size, job, f"{name}, {world_size}")
        assert now["losses"] == pytest.approx(one["run"]["losses"][2:], abs=1e-5)


# --- the ends --------------------------------------------------------------------------------------------------------


def test_ctrl_c_under_torchrun_saves(two, place):
    """It arrives twice, and at one process earlier than at the other: both stop after the same step."""
    assert two["stopped"]["reason"] == "stopped"
    assert len(two["stopped"]["losses"]) == 1
    assert (place / "two" / "stopped" / "checkpoints" / "step-0000001" / "manifest.json").exists()


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_not_finite_in_one_process_halts_both_and_is_named(two, name):
    where = "the loss" if "loss" in name else "decoder.norm.weight (its gradient)"
    assert f"2 steps in a row had no finite gradient; the first layer with one is {where}" in two[name]["reason"]


def test_who_fails_says_why_and_the_other_says_who(place):
    _, ends, said = together.launch(2, place / "fails", {"gpt": {"fails_at": 2}})
    assert ends == [1, 1]
    why = "ValueError: the milk is sour: buy some"
    assert re.search(rf"process 1 of 2 \(.*\) failed: {why}", said)
    assert re.search(rf"process 0 of 2 \(.*\) ends, because another failed: process 1 of 2 \(.*\): {why}", said)


def test_who_does_not_come_is_named(place):
    _, ends, said = together.launch(2, place / "late", {"late": is_late})
    assert ends == [1, 1]
    assert "process 1 did not come within 0.005 minutes, where all wait for dinner" in said


def test_processes_wait_for_each_other_and_tell_each_other(two):
    found = two["waits"]
    assert found["order"] == "0 1 "
    assert found["texts"] == ["I am 0", "I am 1"] and found["agreed"] == "0 decides"
    assert found["any"] == [True, False]


SCRIPT = """
from pathlib import Path
from heedful.train.distributed import Processes
with Processes.start("auto") as processes:
    found = processes.gather_texts(str(processes.device))
    Path(__file__).with_name(str(processes.rank)).write_text(" ".join(found))
    if processes.rank == 1:
        raise ValueError("the milk is sour")
    processes.barrier("breakfast")
"""


def test_torchrun_starts_it_and_its_summary_says_who_failed_and_why(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, *command, tmp_path / "script.py"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 1
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["cpu cpu", "cpu cpu"]
    assert re.search(r"process 1 of 2 \(.*\) failed: ValueError: the milk is sour", ended.stderr)
    summary = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "rank      : 1" in summary and "ValueError: the milk is sour" in summary


# --- one alone -------------------------------------------------------------------------------------------------------


def test_without_torchrun_one_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with Processes.start("cpu") as processes:
        assert (processes.main, processes.rank, processes.world_size) == (True, 0, 1)
        layer, tensors = torch.nn.Linear(2, 2), {"a": torch.ones(1)}
        assert processes.wrap(layer, sharded=True) is layer
        with processes.gathered(layer, tensors) as whole, processes.main_first(), processes.unsharded(layer):
            assert whole == tensors


def test_torchruns_environment_is_whole_or_said_to_be_not(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK.*torchrun"):
        Processes.start("cpu")


def test_an_optimizer_that_cannot_be_sharded_says_so(monkeypatch):
    monkeypatch.setattr(optimizers, "is_sharded", lambda tensor: True)
    with pytest.raises(ValueError, match=r"adafactor.*train\.sharded"):
        optimizers.make_optimizer(
            torch.nn.Linear(2, 2), Recipe.from_dict({"optimizer": {"name": "adafactor"}}).optimizer
        )
