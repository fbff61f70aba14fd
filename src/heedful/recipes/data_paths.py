"""Where a recipe's data is: as given, below the folder that HEEDFUL_DATA names, or made by heedful ("sample:text").

A shipped recipe whose own data is at neither place trains on a sample of the same kind instead, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.data.samples import PREFIX, sample_file
from heedful.train.recipe import DataSettings, merge_tables

# The sample that replaces the data of shipped recipes, by the begin of its path.
SAMPLE_OF = {
    "shakespeare.txt": "sample:text",
    "books/": "sample:text",
    "wikitext-2/": "sample:text",
    "wiki/": "sample:text",
    "sst2/": "sample:reviews",
    "praise/": "sample:reviews",
    "imdb/": "sample:reviews",
    "spam/": "sample:reviews",
    "toxic/": "sample:reviews",
    "tasks/": "sample:captions",
    "captions/": "sample:captions",
    "multi30k/": "sample:captions",
    "entities/": "sample:entities",
    "conll2003/": "sample:entities",
    "squad/": "sample:questions",
    "reader/": "sample:questions",
    "languages/": "sample:languages",
    "chats/": "sample:chats",
    "mnist/": "digits",
    "fashion-mnist/": "digits",
    "cifar10/": "digits",
}
# What goes with a source, and does not fit another one.
COMPANIONS = ("validation", "target", "validation_target")


def find_data(name: str) -> Path | None:
    """A path as given, or else below the folder that HEEDFUL_DATA names; None if it is at neither place."""
    path = Path(os.path.expanduser(name))
    if name.startswith(PREFIX):
        return sample_file(name)
    if path.exists() or path.is_absolute():
        return path
    data_root = os.environ.get("HEEDFUL_DATA")
    return Path(data_root) / path if data_root and (Path(data_root) / path).exists() else None


def resolve_data_path(name: str, setting: str = "source") -> Path:
    """The path of `find_data`; ValueError if there is none."""
    found = find_data(name)
    if found is not None:
        return found
    data_root = os.environ.get("HEEDFUL_DATA")
    where = f"nor in {data_root} (HEEDFUL_DATA)" if data_root else "and HEEDFUL_DATA names no folder of data to look in"
    raise ValueError(f"there is no file {name} here, {where}: set data.{setting}, or put it there")


def source_paths(data: DataSettings) -> list[tuple[Path, float]]:
    """The paths to read and their mixture weights."""
    given: Sequence[Any] = [data.source] if isinstance(data.source, str) else data.source
    found = []
    for i, entry in enumerate(given):
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not entry.get("path") or entry.keys() - {"path", "weight"}:
            raise ValueError(f"data.source is {entry!r}: give a path, or several as {{path = ..., weight = ...}}")
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"data.source, entry {i + 1}: the weight {weight!r} is not a number above 0")
        found.append((resolve_data_path(entry["path"]), float(weight)))
    return found


def single_source_path(data: DataSettings) -> Path:
    """The path of data that cannot be a mixture."""
    found = source_paths(data)
    if len(found) != 1:
        raise ValueError(f"data of the kind {data.kind!r} is read from one source, not {len(found)}")
    return found[0][0]


def resolve_target(target: str) -> str:
    """The target side of pairs: a file, resolved as all data paths, or the name of a column."""
    return str(resolve_data_path(target, "target")) if is_path(target) else target


def is_path(target: str) -> bool:
    """Whether the target side of pairs is a file, and not the name of a column."""
    return "/" in target or "." in target


def change_recipe(
    recipe: Mapping[str, Any], changes: Mapping[str, Any], *, shipped: bool
) -> tuple[dict[str, Any], list[str]]:
    """A recipe with settings changed, and notes. With another data.source its validation data and parallel file go; of
    a `shipped` recipe, data that is not here is replaced by a sample."""
    changed, notes = changes.get("data", {}), list[str]()
    data = dict(recipe.get("data", {}))
    source = data.get("source", "")
    if "source" in changed:
        others = [key for key in COMPANIONS if data.get(key) and (key == "validation" or is_path(data[key]))]
        data = {key: value for key, value in data.items() if key not in others}
    elif shipped and isinstance(source, str) and (sample := _sample_of(source)) and find_data(source) is None:
        data = {key: value for key, value in data.items() if key not in COMPANIONS} | {"source": sample}
        notes.append(
            f"{source} is neither here nor in a folder that HEEDFUL_DATA names: {sample} is used instead, which "
            "heedful makes; the results of the recipe are those of its own data"
        )
    return merge_tables({**recipe, "data": data}, changes), notes


def _sample_of(source: str) -> str | None:
    return next((sample for begin, sample in SAMPLE_OF.items() if source.startswith(begin)), None)
