"""pyproject.toml: what is imported is declared, and the README of a package index has no links that lead nowhere."""

from __future__ import annotations

import re
import sys
import tomllib

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
