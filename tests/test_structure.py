"""The house rules: imports go one way, files and families stay small, nothing unsafe is called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "heedful"
FILES = sorted(SOURCE.rglob("*.py"))

# A package may import those to its left, and itself. What stands above all of them (cli, loaded) may import any.
ORDER = [
    "nn",
    "text",
    "models",
    "weights",
    "data",
    "train",
    "generate",
    "observe",
    "evaluate",
    "serve",
    "lessons",
]
# Serving is a way to reach models, as the command line is: of what stands above, it may import this.
ABOVE = {"serve": ["loaded", "embedding", "info", "tasks", "zoo"]}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    package = path.relative_to(SOURCE).parts[0]
    if package not in ORDER:
        return
    allowed = [*ORDER[: ORDER.index(package) + 1], *ABOVE.get(package, [])]
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "heedful" and len(parts) > 1:
            assert parts[1] in allowed, f"{package} must not import {module}"


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
