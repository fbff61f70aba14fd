"""ARCHITECTURE.md: the files and functions that it names exist, its walks are short, its table has the edges of the
structure test."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from support.documents import ROOT, read
from test_structure import EDGES

PAGE = "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "heedful"
MOST_LINES = 150
# The numbered lists of the page, in their order, and how many files each may have.
LISTS = {
    "GPT-2, and the file of the last matrix product": 6,
    "a token, once per prompt": 4,
    "a token, every time": 12,
    "a training step": 14,
    "an HTTP request": 10,
}
SMALL = {"openmp", "paths", "plotting", "zoo", "__main__", "__init__"}  # have no row in the table


def entries(text: str) -> list[tuple[int, str, list[str]]]:
    """The lines "1. `nn/stack.py`: `Stack.forward`, `attend`. ..." as numbers, files and names."""
    found = re.findall(r"^(\d+)\. `([^`]+\.py)`: (`[^`]+`(?:, `[^`]+`)*)", text, re.MULTILINE)
    return [(int(number), file, re.findall(r"`([^`]+)`", names)) for number, file, names in found]


def lists(text: str) -> list[list[tuple[int, str, list[str]]]]:
    """The entries by list: each begins with 1."""
    found = entries(text)
    begins = [i for i, (number, _, _) in enumerate(found) if number == 1]
    return [found[begin:end] for begin, end in pairwise([*begins, len(found)])]


def defined(code: str) -> set[str]:
    """The functions, classes and methods of a module, as "attend" and "Attention.forward"."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = set()
    for node in ast.parse(code).body:
        if isinstance(node, kinds):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds)}
    return names


def imports_by_package(text: str) -> dict[str, set[str]]:
    """The table of the layout: every package and what it imports."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]*)\|$", text, re.MULTILINE)
    return {package: set(re.findall(r"\w+", names)) for package, names in rows}


def test_it_is_short():
    assert len(read(PAGE).splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("file", "names"), [(file, names) for _, file, names in entries(read(PAGE))])
def test_the_functions_exist(file, names):
    assert not set(names) - defined((SOURCE / file).read_text(encoding="utf-8"))


def test_the_walks_are_complete_and_short():
    found = lists(read(PAGE))
    assert len(found) == len(LISTS)
    for (name, most), steps in zip(LISTS.items(), found, strict=True):
        files = [file for _, file, _ in steps]
        assert [number for number, _, _ in steps] == list(range(1, len(steps) + 1)), name
        assert len(files) == len(set(files)) <= most, name
    assert sum(map(len, found)) == len(re.findall(r"^\d+\. ", read(PAGE), re.MULTILINE)), "a line is written otherwise"


def test_every_file_it_names_exists():
    named = set(re.findall(r"`([\w/]+(?:\.(?:py|toml|md)|/))`", read(PAGE)))
    for name in named:
        assert (ROOT / name).exists() or (SOURCE / name).exists() or list(SOURCE.glob(f"*/{name}")), name


def test_the_table_has_every_edge():
    assert imports_by_package(read(PAGE)) == {name: edges for name, edges in EDGES.items() if name not in SMALL}


def test_a_wrong_name_is_found():
    code = "class A:\n    def f(self): ...\nasync def g(): ...\n"
    assert defined(code) == {"A", "A.f", "g"}
    assert entries("1. `a/b.py`: `A.f`, `g`. It.\n2. b\n") == [(1, "a/b.py", ["A.f", "g"])]
    assert imports_by_package("| `a` | it | b, c |\n| `d` | it | |\n") == {"a": {"b", "c"}, "d": set()}
