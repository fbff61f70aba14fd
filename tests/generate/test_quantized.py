"""Whole models with packed weights: against the plain model, and against weights rounded by hand."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import heedful
from heedful.generate.batch import greedy_batch
from heedful.kernels.accelerate import accelerate, n_bytes, packed_precision
from heedful.kernels.cpu.library import library
from heedful.kernels.modules import PackedAttention
from heedful.kernels.packed import Int4Aten, pack_weight
from heedful.models.base import GenerativeModel
from heedful.nn.block import Block
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import MixtureOfExperts
from heedful.nn.head import LanguageHead
from support.case import error
from support.families import CASES

LIMIT = 1e-5
SPEAKING = [c for c in CASES if c.generates]
every = pytest.mark.parametrize("case", SPEAKING, ids=lambda c: c.name)
# Everything that packing treats differently: tied and not, gates, biases, grouped queries, experts, norms on queries,
# cross-attention, recurrence; and an encoder.
CHOSEN = (
    "gpt2",
    "gpt-j",
    "llama3",
    "mixtral",
    "olmo2",
    "gemma2",
    "marian",
    "t5-v1.1",
    "seq2seq-gru-bi-dot",
    "bert-masked",
)
some = pytest.mark.parametrize("case", [c for c in CASES if c.name in CHOSEN], ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@every
def test_packed_float32_is_the_same_model(case):
    model, batch = case.model(), case.batch()
    counted = case.counted(batch)
    logits, ids = model(batch).logits[counted], greedy_batch(model, batch, 8)
    assert accelerate(model, "inference", precision="float32") is model
    assert error(model(batch).logits[counted], logits) < LIMIT
    assert greedy_batch(model, batch, 8) == ids


def round_by_hand(model: nn.Module, kind: str) -> None:
    """The plain model with the weights that packing rounds, rounded: by groups of 32 inputs; int4 has heads,
    tables and inputs that 32 does not divide as int8."""

    def evenly(w):
        groups = nn.functional.pad(w, (0, -w.shape[1] % 32)).reshape(len(w), -1, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
        return (torch.round(groups / scale).clamp(-127, 127) * scale).flatten(1)[:, : w.shape[1]]

    def by_groups(w):
        if w.shape[1] % 32:
            return evenly(w)
        narrow = torch.bfloat16 if isinstance(pack_weight(w, None, "int4"), Int4Aten) else torch.float16
        groups = w.reshape(len(w), -1, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).to(narrow).float()
        middle = (low.to(narrow).float() + 8 * scale).to(narrow).float()
        return (torch.round((groups - middle) / scale).clamp(-8, 7) * scale + middle).reshape(w.shape)

    floats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if kind in floats:
        halves = lambda w: w.to(floats[kind]).float()  # noqa: E731
        inner = halves
    else:
        inner = evenly if kind == "int8" else by_groups
    for block in (m for m in model.modules() if isinstance(m, Block)):
        routers = [m.router for m in block.modules() if isinstance(m, MixtureOfExperts)]
        for linear in (m for m in block.modules() if isinstance(m, nn.Linear) and m not in routers):
            linear.weight.data = inner(linear.weight.data)
    for head in (m for m in model.modules() if isinstance(m, LanguageHead)):
        head.weight = nn.Parameter((evenly if kind.startswith("int") else inner)(head.weight.data))
    for name, table in model.named_modules():
        if isinstance(table, Embedding) and name.endswith("embed"):
            table.weight = nn.Parameter((evenly if kind.startswith("int") else inner)(table.weight.data))


# Relative to the largest logit. The weights are the same on both sides; what is left is what happens to activations:
# nothing in float16 (float32), 8 bits in bfloat16's products, 7 bits and a sign in int8's and int4's.
@some
@pytest.mark.parametrize("kind, limit", [("bfloat16", 0.05), ("float16", 1e-5), ("int8", 0.08), ("int4", 0.08)])
def test_quantized_models_compute_with_the_rounded_weights(case, kind, limit):
    model, batch = case.model(), case.batch()
    by_hand = copy.deepcopy(model)
    round_by_hand(by_hand, kind)
    logits = accelerate(model, "inference", precision=kind)(batch).logits.float()
    counted = case.counted(batch)
    ours, theirs = logits[counted], by_hand(batch).logits[counted]
    if case.name == "mixtral":  # of 39 positions one has two experts so near that it goes to the other
        worst = (ours - theirs).abs().amax(-1).argmax()
        ours[worst] = theirs[worst]
    assert error(ours, theirs) < limit * (2 if case.name == "olmo2" else 1)


@some
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8", "int4"])
def test_quantized_models_keep_the_contract(case, kind):
    """Steps equal the whole, rows are themselves in any company, and the states are of the activations' type."""
    if not case.generates:
        pytest.skip("does not speak")
    model, batch = accelerate(case.model(), "inference", precision=kind), case.batch()
    together, state = model.start(batch)
    following = torch.tensor([4, 9, 6])
    stepped = model.step(following, state)
    limit = 0.03 if kind == "bfloat16" else 1e-2 if kind == "int4" else LIMIT if kind == "float16" else 1e-2
    for i, row in enumerate(case.rows(batch)):
        alone, single = model.start(row)
        assert error(together[i].float(), alone[0].float()) < limit
        assert error(stepped[i].float(), model.step(following[i : i + 1], single)[0].float()) < limit
    assert together.dtype == torch.float32


def model_bytes(model: nn.Module, kind: str) -> int:
    """What the documentation promises, from the shapes of the plain model."""
    per_weight = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 2 / 32, "int4": 0.625}[kind]
    outer = 1 + 2 / 32 if kind == "int4" else per_weight
    n_outputs = (lambda n: n) if library() is None else (lambda n: -(-n // 32) * 32)  # by panels
    total = 0.0
    for name, p in model.named_parameters():
        if name.startswith("decoder.blocks") and p.ndim == 2:
            total += n_outputs(len(p)) * p.shape[1] * per_weight
        elif name == "embed.weight":  # and the head's, tied to it
            total += (len(p) + n_outputs(len(p))) * p.shape[1] * outer
        else:
            total += p.numel() * 4  # norms, biases, positions
    return int(total)


@pytest.mark.skipif(library() is None, reason="the documented sizes are those of the C kernels' layouts")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_memory_is_as_documented(kind):
    model = heedful.load("shakespeare").model
    expected, before = model_bytes(model, kind), model.n_parameters()
    assert n_bytes(accelerate(model, "inference", precision=kind)) == expected
    assert model.n_parameters() == before


# Linux tells a process's present and largest size. What the allocator keeps for later is given back before it is read.
PROGRAM = """
import ctypes, re, sys, torch
from heedful.models.llama import Llama, LlamaConfig
from heedful.kernels.accelerate import accelerate, n_bytes, packed_precision
def size(what): return 1024 * int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
def llama(d, vocab):
    with torch.device("meta"):
        model = Llama(LlamaConfig(d_model=d, n_layers=2, d_ff=4 * d, vocab_size=vocab, n_heads=4, max_len=64))
    model.to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        p.data.fill_(0.01 * i + 0.01)
    return model
accelerate(llama(64, 64), "inference", precision=sys.argv[1])  # whatever the libraries allocate once
before = size("VmRSS")
model = llama(1024, 16_000)
plain = size("VmRSS")
accelerate(model, "inference", precision=sys.argv[1])
peak = size("VmHWM")
ctypes.CDLL(None).malloc_trim(0)
print(peak - plain, size("VmRSS") - before, n_bytes(model))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what a process used")
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_the_process_grows_by_no_more_than_that(kind):
    """A model of 265 MB, its largest matrix 65 MB: a joined matrix and its packed form above, and no more after."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    above, after, promised = map(int, done.stdout.split())
    assert above < 2 * 65e6 + 32e6, f"{above / 1e6:.0f} MB above the plain model"
    assert after < promised + 24e6, f"{after / 1e6:.0f} MB for {promised / 1e6:.0f}"


def test_a_packed_model_is_not_saved(tmp_path):
    loaded = heedful.load("shakespeare", quantize="int8")
    with pytest.raises(ValueError, match="packed: save"):
        loaded.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match="packed already"):
        accelerate(loaded.model, "inference", precision="int4")


def test_what_cannot_be_packed_is_said(tmp_path):
    cbow = next(c for c in CASES if c.name == "cbow")
    with pytest.raises(ValueError, match="nothing to pack"):
        accelerate(cbow.model(), "inference", precision="int8")
    with pytest.raises(ValueError, match="float32, bfloat16, float16, int8, int4"):
        heedful.load("shakespeare", quantize="int2")  # type: ignore[arg-type]
    model = heedful.load("shakespeare").model
    model.decoder.blocks[0].feedforward.up.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="bfloat16"):
        accelerate(model, "inference", precision="float16")
    assert packed_precision(model) is None and greedy_batch(model, heedful_batch(), 2)  # and nothing has changed


def heedful_batch():
    from heedful.models.base import Batch

    return Batch(torch.tensor([[5, 6, 7]]))


def test_gradients_do_not_pass():
    model = heedful.load("shakespeare", quantize="int8").model
    with torch.enable_grad():
        assert not model(heedful_batch()).logits.requires_grad  # nothing in it learns
        model.decoder.norm.weight.requires_grad_()
        with pytest.raises(ValueError, match="gradient"):
            model(heedful_batch())


def test_queries_keys_and_values_are_one_product():
    model = heedful.load("shakespeare", quantize="int8").model
    assert isinstance(model, GenerativeModel)
    assert not [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    joined = [m.joint.n_outputs for m in model.modules() if isinstance(m, PackedAttention)]
    assert joined == [3 * 192] * 6


def test_every_kind_speaks_through_load_and_the_command_line(capsys):
    from heedful.cli import main

    plain = heedful.load("shakespeare", dtype=torch.float32).generate("ROMEO:", max_tokens=40, temperature=0)
    for kind in ("float32", "float16"):  # too near to the plain model to say something else here
        assert heedful.load("shakespeare", quantize=kind).generate("ROMEO:", max_tokens=40, temperature=0) == plain
    for kind in ("bfloat16", "int8", "int4"):
        arguments = ["--max-tokens", "40", "--temperature", "0", "--quantize", kind]
        assert main(["generate", "shakespeare", "ROMEO:", *arguments]) == 0
        said = capsys.readouterr()
        assert re.match(r"ROMEO:\n\w+", said.out) and not said.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@some
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_on_a_gpu_quantized_models_compute_with_the_rounded_weights(case, kind):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, batch = case.model(), case.batch()
    by_hand = copy.deepcopy(model)
    if kind != "float32":
        round_by_hand(by_hand, kind)
    there = dataclasses.replace(batch, **{n: v.cuda() for n, v in vars(batch).items() if isinstance(v, torch.Tensor)})
    logits = accelerate(model.cuda(), "inference", precision=kind)(there).logits.float().cpu()
    counted = case.counted(batch)
    off = error(logits[counted], by_hand(batch).logits[counted])
    limit = {"float32": 1e-4, "float16": 0.01}.get(kind, 0.08)
    assert off < limit * (2 if case.name == "mixtral" else 1)  # a rounded router may choose another expert
    if case.generates:
        assert len(greedy_batch(model, there, 4)) == 3
