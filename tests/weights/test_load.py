"""Loading takes the model's memory and that of one tensor, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful.models.gpt import GPT, GPTConfig
from heedful.weights.save import save

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what a process used")

# Not `ru_maxrss`, which begins with the parent's. A model without memory first, for all that is imported on the way.
PROGRAM = """
import re, sys, torch, heedful.loaded
from pathlib import Path
from heedful.weights import folder as f, load
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
path = Path(sys.argv[1])
empty = f.meta_model(f.read_config(path))
before = peak()
dtype = getattr(torch, sys.argv[2]) if len(sys.argv) > 2 else None
model = heedful.load(path, dtype=dtype).model
for p in model.parameters(): p.sum()  # what is mapped is there when it was read
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
    assert model * 0.9 < grown < model + stored + 16 * 2**20, f"{grown / 2**20:.0f} MB for {model / 2**20:.0f}"


def test_the_limit_would_notice_a_second_copy(folder):
    """What the measurement gives if all tensors are read before the model is filled."""
    reads_all = PROGRAM.replace(
        "model = heedful.load(path, dtype=dtype).model",
        "model, s = empty, f.SafetensorsFiles(f.weight_files(path))\n"
        "load.load_tensors(model, load.DictSource({n: s.get(n) for n in s.names()}))",
    )
    command = [sys.executable, "-c", reads_all, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, model, largest = map(int, done.stdout.split())
    assert grown > model + largest + 16 * 2**20


def test_loading_reads_nothing_that_is_not_used(folder):
    lazily = PROGRAM.replace("for p in model.parameters(): p.sum()", "")
    assert lazily != PROGRAM
    done = subprocess.run([sys.executable, "-c", lazily, str(folder)], capture_output=True, text=True, check=True)
    grown, model, _ = map(int, done.stdout.split())
    assert grown < model / 10


def test_a_mapped_model_may_be_written_to_and_its_files_replaced(folder):
    import heedful

    model = heedful.load(folder).model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        model.embed.weight += 1
    again = heedful.load(folder).model
    assert all(torch.equal(p, before[n]) for n, p in again.named_parameters()), "the file does not change"
    for path in folder.glob("*.safetensors"):
        path.with_suffix(".new").write_bytes(b"gone")
        path.with_suffix(".new").replace(path)
    before["embed.weight"] += 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_own_memory(tmp_path):
    import heedful
    from heedful.weights.load import clone_parameters

    save(heedful.create("gpt2", n_layers=2, d_model=64, n_heads=2, vocab_size=99), tmp_path / "m")
    mapped, owned = heedful.load(tmp_path / "m").model, clone_parameters(heedful.load(tmp_path / "m").model)
    assert not all(p.is_contiguous() for p in mapped.parameters()), "or there is nothing to test"
    for parameter in owned.parameters():
        assert parameter.is_contiguous() and parameter.data_ptr() % 64 == 0
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert owned.head.weight is owned.embed.weight
    assert all(torch.equal(a, b) for a, b in zip(mapped.parameters(), owned.parameters(), strict=True))
