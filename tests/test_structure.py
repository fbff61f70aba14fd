"""The house rules: imports follow the listed edges, attention's softmax has its places, nothing unsafe is called. The
rules are functions in support/structure.py; the end of this file shows that each can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import structure

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "heedful"
PYTHON = structure.files(SOURCE, ".py")  # the texts by their paths, as nn/attention.py
C = structure.files(SOURCE, ".c", ".h", ".cu")

# What each package or root module may import beside itself: every edge of the table in ARCHITECTURE.md.
EDGES: dict[str, set[str]] = {
    "openmp": set(),
    "paths": set(),
    "plotting": set(),
    "zoo": set(),
    "nn": set(),
    "text": set(),
    "models": {"nn"},
    "kernels": {"nn", "models", "paths"},
    "weights": {"nn", "models", "kernels", "text", "zoo", "paths"},
    "data": {"models", "text", "paths"},
    "train": {"nn", "models", "kernels", "text", "weights", "data", "generate", "openmp", "plotting"},
    "generate": {"nn", "models", "kernels", "text", "openmp"},
    "observe": {"nn", "models", "text", "data", "generate", "plotting"},
    "evaluate": {"models", "text", "data", "generate", "observe", "tasks"},
    "tasks": {"nn", "models", "text", "weights", "data", "generate", "observe"},
    "loaded": {"nn", "models", "kernels", "text", "weights", "generate", "observe", "evaluate", "tasks"},
    "recipes": {"models", "text", "weights", "data", "train", "tasks", "loaded", "paths"},
    "serve": {
        "nn", "models", "kernels", "text", "weights", "train", "generate", "observe", "evaluate", "tasks", "loaded",
        "zoo", "lessons",
    },
    "cli": {
        "models", "kernels", "text", "weights", "data", "train", "recipes", "generate", "observe", "evaluate", "tasks",
        "serve", "loaded", "zoo", "lessons",
    },
    "lessons": {"nn", "paths"},
    "__main__": {"cli"},
    "__init__": {"openmp", "models", "text", "weights", "loaded"},
}  # fmt: skip

SHARED_BY_FAMILIES = {"base", "config", "heads", "hub", "mapping", "registry", "rotary", "encoder", "vocabulary"}

# Softmax of attention scores: in Python here and nowhere else, in C in the second list.
ATTENTION_IN_PYTHON = {"nn/attention.py"}
ATTENTION_IN_C = {"attention.c", "block_attention.c"}
# Other softmaxes: of logits (what comes next, which label), and of a router (which experts).
OTHER_SOFTMAXES = {
    "evaluate/calibration.py", "generate/draft.py", "generate/sampling.py", "kernels/cuda/device_sampling.py",
    "kernels/sampling.py", "nn/feedforward.py",
    "observe/lens.py", "observe/views.py", "serve/playground/fill.py", "serve/playground/parameters.py",
    "serve/playground/text.py", "tasks/classify.py", "tasks/tag.py",
}  # fmt: skip
# Other exponentials: activations, and what sampling draws from.
OTHER_EXPONENTIALS = {"common.h", "sampling.c"}


def package_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def test_imports_follow_the_edges():
    found = {name: structure.foreign_edges(package_of(name), text, EDGES) for name, text in PYTHON.items()}
    assert not {name: others for name, others in found.items() if others}


def test_every_edge_is_used_and_none_leads_back():
    used: dict[str, set[str]] = {package: set() for package in EDGES}
    for name, text in PYTHON.items():
        used[package_of(name)] |= structure.packages(text)
    assert not {package: others - used[package] for package, others in EDGES.items() if others - used[package]}
    assert structure.cycle(EDGES) == []


def test_no_family_imports_another():
    for name, text in PYTHON.items():
        family = Path(name).stem
        if package_of(name) == "models" and family not in SHARED_BY_FAMILIES:
            assert not structure.foreign_families(family, text, SHARED_BY_FAMILIES), name


def test_nothing_unpickles_or_runs_foreign_code():
    found = {name: structure.unsafe_calls(text) for name, text in PYTHON.items()}
    assert found.pop("lessons/execute.py") == ["eval", "exec"]  # the cells of lessons
    assert not {name: called for name, called in found.items() if called}
    assert [name for name, text in PYTHON.items() if "torch.load(" in text] == ["weights/unpickle.py"]  # tensors alone


def test_integers_in_c_have_one_size_on_every_platform():
    """A `long` has 32 bits on Windows and 64 elsewhere: sizes, strides and indices are int64_t."""
    code = {name: re.sub(r"//.*", "", text) for name, text in C.items()}
    assert not [name for name, text in code.items() if re.search(r"\b(long|ssize_t|off_t)\b", text)]


def test_softmax_of_attention_scores_has_its_places():
    product = {name: text for name, text in PYTHON.items() if not name.startswith("lessons/checks/")}  # exercises
    in_python = {name for name, text in product.items() if structure.takes_softmax(text)}
    assert in_python == ATTENTION_IN_PYTHON | OTHER_SOFTMAXES
    in_c = {Path(name).name for name, text in C.items() if structure.takes_exponentials(text)}
    assert in_c == ATTENTION_IN_C | OTHER_EXPONENTIALS


def test_importing_heedful_and_its_text_imports_no_torch():
    code = "import sys, heedful, heedful.text, heedful.cli, heedful.models.registry; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


# --- the rules can fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "text", "found"),
    [
        ("nn", "import torch\nfrom heedful.nn.mask import causal", []),
        ("nn", "from heedful.serve.app import create_app", ["serve"]),
        ("text", "def f():\n    import heedful.models.gpt", ["models"]),
        (
            "paths",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from heedful.loaded import Loaded",
            ["loaded"],
        ),
    ],
)
def test_a_wrong_import_is_found(package, text, found):
    assert structure.foreign_edges(package, text, EDGES) == found


def test_a_cycle_of_edges_is_found():
    assert structure.cycle({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a", "c"}}) == []
    assert set(structure.cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_a_family_that_imports_another_is_found():
    text = "from heedful.models.base import Model\nfrom heedful.models.gpt import GPT"
    assert structure.foreign_families("bert", text, SHARED_BY_FAMILIES) == ["gpt"]
    assert structure.foreign_families("gpt", text, SHARED_BY_FAMILIES) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch.load('x')", ["torch.load"]),
        ("import torch\ntorch.load('x', weights_only=True)", []),
        ("import torch\ntorch.load('x', weights_only=safe)", ["torch.load"]),
        ("eval('1')", ["eval"]),
        ("model.eval()", []),
        ("f(trust_remote_code=yes)", ["trust_remote_code"]),
        ("f(trust_remote_code=False)", []),
    ],
)
def test_an_unsafe_call_is_found(text, found):
    assert structure.unsafe_calls(text) == found


def test_a_softmax_elsewhere_is_found():
    for text in (
        "(q @ k.mT).softmax(-1)",
        "torch.softmax(x, 0)",
        "F.scaled_dot_product_attention(q, k, v)",
        "softmax(x)",
    ):
        assert structure.takes_softmax(text)
    assert not structure.takes_softmax("x.log_softmax(-1)  # softmax(x)")
    for text in ("float y = expf(x);", "vec at = v_exp(v_sub(s, m));", "a = exponential(b);", "a = _mm512_exp_ps (b);"):
        assert structure.takes_exponentials(text)
    assert not structure.takes_exponentials("// exp(x)\nint expected(int n) { return n; } /* exp(x) */")
