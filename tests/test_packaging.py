"""pyproject.toml: what is imported is declared, and the README of a package index has no links that lead nowhere.
Wheels: what they have of the C kernels, and for which platform they are."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from support.documents import ROOT, read
from support.structure import imports

PROJECT = tomllib.loads(read("pyproject.toml"))
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))}
# Imported where they are installed, with a message or another way where they are not; datasets comes with the harness,
# and Triton with PyTorch's builds for CUDA.
OPTIONAL = {"datasets", "tqdm", "triton", "yaml"}
MODULES = {"pydantic_core": "pydantic"}  # what comes with a package, in the version that it asks for


def declared() -> dict[str, Requirement]:
    extras = PROJECT["project"]["optional-dependencies"]
    found = map(Requirement, [*PROJECT["project"]["dependencies"], *extras["harness"], *extras["ray"]])
    return {one.name.lower().replace("_", "-"): one for one in found}


def test_every_package_that_is_imported_is_declared():
    imported = {module.split(".")[0] for text in SOURCES.values() for module in imports(text)}
    foreign = imported - set(sys.stdlib_module_names) - OPTIONAL - {"heedful"}
    assert not {name for name in foreign if MODULES.get(name, name).replace("_", "-") not in declared()}


def test_what_is_no_public_interface_has_an_upper_bound():
    inner = [
        path.name for path, text in SOURCES.items() if any(m.startswith("uvicorn.protocols") for m in imports(text))
    ]
    assert inner == ["protocol.py"]
    assert any(bound.operator == "<" for bound in declared()["uvicorn"].specifier)


def description() -> str:
    """The long description, as hatch-fancy-pypi-readme makes it."""
    settings = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    parts = [read(part["path"]) if "path" in part else part["text"] for part in settings["fragments"]]
    text = "".join(parts)
    for rule in settings["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_readme_of_a_package_index_links_to_nothing_that_is_not_there():
    text = description()
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https://")] == []
    assert "docs/serving.md has" in text and "pip install heedful" in text and "](docs/" in read("README.md")


# --- wheels ----------------------------------------------------------------------------------------------------------

# A compiler in no time, for another machine: what it links asks for a symbol of a newer C library.
COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo "gcc 12.2.0"; exit;;
  *-dumpmachine*) echo {triple}; exit;;
esac
for last; do :; done
printf 'code\\0GLIBC_2.14\\0GLIBC_2.28\\0' > "$last"
"""


@pytest.fixture
def build():
    """The build step, and what it would put into a wheel; warnings instead of a program's output."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = object.__new__(module.PackageHook)

    def add_kernels() -> tuple[dict[str, Any], list[str]]:
        warned: list[str] = []
        data: dict[str, Any] = {"force_include": {}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.PackageHook, "app", SimpleNamespace(display_warning=warned.append), raising=False)
            hook.add_kernels(data)
        hook.libraries.cleanup()
        return data, warned

    return add_kernels


def compiler(folder: Path, triple: str) -> str:
    path = folder / "cc"
    path.write_text(COMPILER.format(triple=triple), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


X86, ARM = ["avx2", "avx512", "avx512-vnni-bf16"], ["neon", "neon-i8mm"]
PLATFORMS = [
    ("x86_64-linux-gnu", "py3-none-manylinux_2_28_x86_64", X86, ".so"),
    ("aarch64-linux-gnu", "py3-none-manylinux_2_28_aarch64", ARM, ".so"),
    ("arm64-apple-darwin23.5.0", "py3-none-macosx_11_0_arm64", ARM, ".so"),
    ("x86_64-unknown-windows-gnu", "py3-none-win_amd64", X86, ".dll"),
]


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")
@pytest.mark.parametrize("triple, tag, targets, suffix", PLATFORMS)
def test_a_wheel_has_the_kernels_of_the_compilers_platform(
    tmp_path, monkeypatch, build, triple, tag, targets, suffix
):  # fmt: skip
    monkeypatch.setenv("CC", compiler(tmp_path, triple))
    monkeypatch.setenv("HEEDFUL_OPENMP", "libiomp5md.dll")
    data, warned = build()
    assert data["tag"] == tag and data["pure_python"] is False and not warned
    places = sorted(data["force_include"].values())
    assert places == sorted(f"heedful/kernels/cpu/prebuilt/{name}{suffix}" for name in targets)


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")
@pytest.mark.parametrize("triple", [None, "riscv64-linux-gnu"])
def test_without_a_compiler_that_fits_a_wheel_is_for_every_platform(tmp_path, monkeypatch, build, triple):
    if triple is None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        monkeypatch.setenv("CC", compiler(tmp_path, triple))
    data, warned = build()
    assert data == {"force_include": {}} and len(warned) == 1 and "first used" in warned[0]
    monkeypatch.setenv("HEEDFUL_PREBUILT", "require")
    with pytest.raises(SystemExit):
        build()
