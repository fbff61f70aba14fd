"""The house rules: imports go one way, files and families stay small, nothing unsafe is called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "heedful"
FILES = sorted(SOURCE.rglob("*.py"))

# What each package or root module may import beside itself: every edge of the picture in CONTRIBUTING.md.
EDGES: dict[str, set[str]] = {
    "paths": set(),
    "plotting": set(),
    "zoo": set(),
    "nn": {"kernels"},
    "text": set(),
    "models": {"nn"},
    "kernels": {"nn", "models", "paths"},
    "weights": {"nn", "models", "text", "zoo"},
    "data": {"models", "text", "paths"},
    "train": {"nn", "models", "kernels", "text", "weights", "data", "plotting"},
    "generate": {"nn", "models", "kernels", "text"},
    "observe": {"nn", "models", "text", "data", "generate", "plotting"},
    "evaluate": {"models", "text", "data", "generate", "observe"},
    "tasks": {"models", "text", "weights", "data", "generate", "observe"},
    "loaded": {"models", "kernels", "text", "weights", "generate", "observe", "tasks"},
    "recipes": {"models", "text", "weights", "data", "train", "loaded", "paths"},
    "serve": {"nn", "models", "kernels", "text", "weights", "train", "generate", "observe", "tasks", "loaded", "zoo"},
    "cli": {
        "models", "kernels", "text", "weights", "data", "train", "recipes", "generate", "observe", "evaluate", "serve",
        "loaded", "zoo",
    },
    "__main__": {"cli"},
    "__init__": {"models", "text", "weights", "loaded"},
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, those for type checking alone too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports name their module in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_edges(path):
    package = package_of(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "heedful" and rest and not rest.startswith("__"):
            other = rest.split(".")[0]
            assert other == package or other in EDGES[package], f"{package} must not import {module}"


def test_every_edge_is_used_and_none_leads_back():
    used: dict[str, set[str]] = {package: set() for package in EDGES}
    for path in FILES:
        rests = [m.removeprefix("heedful.") for m in imports(path) if m.startswith("heedful.")]
        used[package_of(path)] |= {r.split(".")[0] for r in rests if not r.startswith("__")}
    for package, others in EDGES.items():
        assert others <= used[package], f"{package} does not import {others - used[package]}: take the edge away"


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.py")), ids=lambda p: p.name)
def test_no_family_imports_another(path):
    shared = {"base", "config", "mapping", "registry", "families", "rotary", "encoder"}
    for module in imports(path):
        if module.startswith("heedful.models.") and path.stem not in shared:
            assert module.split(".")[2] in shared, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path):
    limit = 280 if path.parent.name == "models" and path.stem != "base" else 400
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_nothing_unpickles_or_runs_foreign_code():
    forbidden = ("torch.load(", "pickle.load", "trust_remote_code=True", "eval(", "exec(")
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace(".eval(", "").replace("_eval(", "")
        for word in forbidden:
            assert word not in text, f"{path} has {word}"


def test_softmax_of_scores_lives_in_one_place():
    users = [p.name for p in FILES if "scaled_dot_product_attention" in p.read_text(encoding="utf-8")]
    assert users == ["attention.py"]


def test_importing_heedful_and_its_text_imports_no_torch():
    code = "import sys, heedful, heedful.text, heedful.cli, heedful.models.registry; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
