"""Where models run: the choice of a device, and everything on one that is neither the CPU nor CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.kernels.device import choose_device, choose_process_device
from heedful.train.cost import free_memory

TESTS = Path(__file__).parent


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many CUDA GPUs, and with or without Apple's."""

    def has(cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return has


def test_the_best_device_there_is_is_chosen(machine):
    for cuda, mps, best in ((2, True, "cuda"), (2, False, "cuda"), (0, True, "mps"), (0, False, "cpu")):
        machine(cuda, mps)
        assert choose_device("auto") == choose_device() == torch.device(best)
        assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_a_users_mistake(machine):
    machine(cuda=1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    for name, problem in (("tpu9", "auto, cpu, cuda, cuda:N or mps"), ("cuda:1", "has 1"), ("mps", "Apple GPU")):
        with pytest.raises(ValueError, match=problem):
            choose_device(name)
    machine()
    for name in ("cuda", "mps"):
        with pytest.raises(ValueError, match=f"device is {name}"):
            heedful.load("sums", device=name)
    assert main(["generate", "sums", "1+1=", "--device", "mps"]) == 2


def test_processes_of_torchrun_share_no_apple_gpu(machine):
    machine(mps=True)
    assert choose_process_device("auto", 1) == torch.device("cpu")
    with pytest.raises(ValueError, match="single process"):
        choose_process_device("mps", 0)
    machine(cuda=2, mps=True)
    assert choose_process_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="nproc-per-node 2"):
        choose_process_device("cuda", 2)


def test_the_memory_of_an_apple_gpu_is_a_part_of_the_machines(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    assert free_memory("mps") == 1000
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 2**60)
    assert free_memory("mps") <= free_memory("cpu") * 1.5


def test_models_tasks_and_training_on_a_device_that_is_neither_cpu_nor_cuda():
    """Nothing in float64, no tensors of two devices, and what the CPU computes: support/on_emulated_device.py."""
    done = subprocess.run(
        [sys.executable, "-m", "support.emulated_device"], capture_output=True, text=True, cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(heedful.__file__).parents[1]), str(TESTS)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
