"""The rules of tests/test_structure.py as functions of a file's text: each gives what is wrong with it, or nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

UNSAFE = {"torch.load", "pickle.load", "pickle.loads", "eval", "exec", "os.system"}


def imports(text: str) -> set[str]:
    """The modules that a file imports anywhere in it, those for type checking alone too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def packages(text: str) -> set[str]:
    """The packages and root modules of heedful that a file imports."""
    rests = [module.removeprefix("heedful.") for module in imports(text) if module.startswith("heedful.")]
    return {rest.split(".")[0] for rest in rests if not rest.startswith("__")}


def foreign_edges(package: str, text: str, edges: Mapping[str, set[str]]) -> list[str]:
    """Packages that a file of `package` imports though no edge leads there."""
    return sorted(packages(text) - {package} - edges[package])


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """Packages that import each other in a circle, or none."""
    left = {package: set(others) for package, others in edges.items()}
    while free := [package for package, others in left.items() if not others & set(left)]:
        for package in free:
            del left[package]
    return sorted(left)


def foreign_families(family: str, text: str, shared: set[str]) -> list[str]:
    """Other families that a family's file imports."""
    found = {module.split(".")[2] for module in imports(text) if module.startswith("heedful.models.")}
    return sorted(found - shared - {family})


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name that is called as far as it is one: `torch.load`, `?.softmax`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(name):
                    yield name, node
                case ast.Attribute(ast.Name(module), name):
                    yield f"{module}.{name}", node
                case ast.Attribute(_, name):
                    yield f"?.{name}", node


def unsafe_calls(text: str) -> list[str]:
    """Calls that unpickle, or run what they are given."""
    found = {name for name, node in calls(text) if name in UNSAFE and not is_of_tensors_alone(name, node)}
    for _, node in calls(text):
        found |= {k.arg for k in node.keywords if k.arg == "trust_remote_code" and not is_false(k.value)}
    return sorted(found)


def is_of_tensors_alone(name: str, node: ast.Call) -> bool:
    """Whether it is torch.load(..., weights_only=True)."""
    told = [k.value for k in node.keywords if k.arg == "weights_only"]
    return name == "torch.load" and len(told) == 1 and isinstance(told[0], ast.Constant) and told[0].value is True


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def takes_softmax(text: str) -> bool:
    """Whether Python code computes a softmax, or attention as a whole."""
    return any(name.split(".")[-1] in ("softmax", "scaled_dot_product_attention") for name, _ in calls(text))


def takes_exponentials(text: str) -> bool:
    """Whether C code computes exponentials, of which a softmax is made."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.search(r"\b(\w+_)?exp(f|2f?|_ps|_pd|onential|onentiate)?\s*\(", code) is not None


def files(root: Path, *suffixes: str) -> dict[str, str]:
    """The texts of the files under a folder, by their paths from there."""
    found = sorted(path for path in root.rglob("*") if path.suffix in suffixes and path.is_file())
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in found}
