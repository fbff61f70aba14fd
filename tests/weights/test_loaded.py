"""`import heedful` is light, and what `load` returns says what it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import heedful
from support.folders import saved, tiny_gpt


def test_importing_costs_nothing():
    program = (
        "import sys, heedful; heedful.__version__; dir(heedful)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'gguf', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_loading_imports_no_reference_implementation(tmp_path):
    program = (
        f"import sys, heedful; heedful.load({str(saved(tmp_path / 'm'))!r})\n"
        "print(sorted({'transformers', 'huggingface_hub', 'requests', 'httpx2', 'heedful.cli'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_package_has_what_it_says():
    for name in heedful.__all__:
        assert getattr(heedful, name) is not None
    with pytest.raises(AttributeError, match=r"it has .*load"):
        heedful.laod  # noqa: B018


def test_what_a_model_cannot_do_says_what_it_is(tmp_path):
    loaded = heedful.load(saved(tmp_path / "mine", tiny_gpt()))
    assert "generate" in loaded.abilities and "translate" not in loaded.abilities
    with pytest.raises(ValueError, match="mine is a GPT and cannot translate"):
        loaded.require("translate")
    with pytest.raises(AttributeError, match="no 'nonsense'"):
        loaded.nonsense  # noqa: B018
    assert "mine: GPT" in repr(loaded)


def test_device_and_type(tmp_path):
    folder = saved(tmp_path / "m", tiny_gpt())
    loaded = heedful.load(str(folder), device="cpu", dtype=torch.bfloat16)
    assert loaded.model.device.type == "cpu"
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in loaded.model.parameters())
    with pytest.raises(ValueError, match="cannot be loaded as"):
        heedful.load(folder, dtype=torch.int8)
