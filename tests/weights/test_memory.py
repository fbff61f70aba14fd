"""Loading takes the model's memory and that of one tensor, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful.models.gpt import GPT, GPTConfig
from heedful.weights.save import save

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux says what a process used"
)

# Not `ru_maxrss`, which begins with the parent's. A model without memory first, for all that is imported on the way.
PROGRAM = """
import re, sys, torch, heedful.loaded
from pathlib import Path
from heedful.weights import folder as f, load
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
path = Path(sys.argv[1])
empty = f.build(f.read_config(path))
before = peak()
dtype = getattr(torch, sys.argv[2]) if len(sys.argv) > 2 else None
model = heedful.load(path, dtype=dtype).model
print(peak() - before, sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2's layout, 250 MB: every matrix is transposed on its way in."""
    config = GPTConfig(d_model=1024, n_layers=4, n_heads=16, vocab_size=10_000, max_len=512)
    path = tmp_path_factory.mktemp("memory") / "m"
    save(GPT.create(config), path, max_shard=10**8)
    return path


@pytest.mark.parametrize("dtype", ["", "float16", "float32"])
def test_peak_memory_is_the_model_and_one_tensor(folder, dtype):
    command = [sys.executable, "-c", PROGRAM, str(folder), *([dtype] if dtype else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, model, largest = map(int, done.stdout.split())
    stored = largest * (2 if dtype == "float16" else 1)  # what is converted is read as it is stored
    assert model * 0.9 < grown < model + stored + 16 * 2**20, (
        f"{grown / 2**20:.0f} MB for {model / 2**20:.0f}"
    )


def test_the_limit_would_notice_a_second_copy(folder):
    """What the measurement gives if all tensors are read before the model is filled."""
    reads_all = PROGRAM.replace(
        "model = heedful.load(path, dtype=dtype).model",
        "model, s = empty, f.TensorFiles(f.weight_files(path))\n"
        "load.fill(model, load.DictSource({n: s.get(n) for n in s.names()}))",
    )
    command = [sys.executable, "-c", reads_all, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, model, largest = map(int, done.stdout.split())
    assert grown > model + largest + 16 * 2**20


def test_the_model_owns_its_memory(folder):
    import heedful

    model = heedful.load(folder).model
    before = model.decoder.blocks[0].feedforward.up.weight.clone()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"gone")
    assert torch.equal(model.decoder.blocks[0].feedforward.up.weight, before)
    assert all(p.is_contiguous() for p in model.parameters())
