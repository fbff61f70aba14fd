"""Where a recipe's data is: as given, below the folder that HEEDFUL_DATA names, or what heedful has ("sample:text").

A shipped recipe whose data is at neither place is refused with what the data is and where to put it; on request
(`heedful train NAME --sample`) it trains on a small sample of the same kind.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.data.images import load_digits
from heedful.data.samples import PREFIX, sample_file
from heedful.train.recipe import DataSettings, merge_tables
from heedful.train.run import FREE_SETTINGS, flat


@dataclass(frozen=True)
class RecipeSource:
    """The data of shipped recipes in one folder: what it is, and a sample of the same kind."""

    sample: str
    about: str


BENCHMARKS = "`python benchmarks/{}` in heedful's repository writes it"
SOURCES = {
    "books/": RecipeSource(
        "sample:text", "books as plain text, a line with only a form feed between two (Project Gutenberg has many)"
    ),
    "wikitext-2/": RecipeSource("sample:text", "WikiText-2, the raw text (not the one with <unk>)"),
    "wiki/": RecipeSource(
        "sample:text",
        "articles of Wikipedia as plain text, a line with only a form feed between two; "
        + BENCHMARKS.format("zoo_data/wikipedia.py"),
    ),
    "sst2/": RecipeSource("sample:reviews", "SST-2 of GLUE: in each line a sentence, a tab, and 1 (praise) or 0"),
    "praise/": RecipeSource(
        "sample:reviews",
        "in each line a sentence, a tab, and 1 (praise) or 0; " + BENCHMARKS.format("zoo_data/reviews.py"),
    ),
    "imdb/": RecipeSource(
        "sample:reviews",
        "the Large Movie Review Dataset (IMDB): in each line a review, a tab, and its label; "
        + BENCHMARKS.format("classification.py split"),
    ),
    "spam/": RecipeSource(
        "sample:reviews",
        "the SMS Spam Collection: in each line a message, a tab, and its label; "
        + BENCHMARKS.format("classification.py split"),
    ),
    "toxic/": RecipeSource(
        "sample:reviews",
        "in each line a comment, a tab, and its label; " + BENCHMARKS.format("classification.py split"),
    ),
    "tasks/": RecipeSource(
        "sample:captions",
        "in each line a task with its text, a tab, and the answer; " + BENCHMARKS.format("zoo_data/tasks.py"),
    ),
    "digits/": RecipeSource(
        "digits",
        "MNIST's digits as they are and changed, and drawings that are no digits, as idx files; "
        + BENCHMARKS.format("zoo_data/digits.py"),
    ),
    "captions/": RecipeSource(
        "sample:captions",
        "in each line a German sentence, a tab, and the English one; " + BENCHMARKS.format("zoo_data/captions.py"),
    ),
    "translations/": RecipeSource(
        "sample:captions",
        "in each line a German sentence, a tab, and the English one, or the other way round; "
        + BENCHMARKS.format("zoo_data/translations.py"),
    ),
    "multi30k/": RecipeSource(
        "sample:captions", "Multi30k: a caption in each line, the German and the English file line by line"
    ),
    "entities/": RecipeSource(
        "sample:entities",
        "a word and its tag (B-PER, I-PER, O) in each line, an empty line between sentences; "
        + BENCHMARKS.format("zoo_data/entities.py"),
    ),
    "conll2003/": RecipeSource(
        "sample:entities",
        "CoNLL-2003's English files: a word in each line with its tag last, an empty line between sentences",
    ),
    "reader/": RecipeSource(
        "sample:questions",
        "questions and passages in SQuAD's JSON; " + BENCHMARKS.format("zoo_data/questions.py"),
    ),
    "languages/": RecipeSource(
        "sample:languages",
        "the columns text and label, separated by a tab; " + BENCHMARKS.format("zoo_data/languages.py"),
    ),
    "chats/": RecipeSource(
        "sample:chats", 'a conversation {"messages": [...]} in each line; ' + BENCHMARKS.format("zoo_data/chats.py")
    ),
    "mnist/": RecipeSource("digits", "MNIST in its own format, the images' and the labels' file"),
    "fashion-mnist/": RecipeSource("digits", "Fashion-MNIST in MNIST's format, the images' and the labels' file"),
    "cifar10/": RecipeSource("digits", "CIFAR-10 as arrays of images and labels; " + BENCHMARKS.format("cifar10.py")),
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
    recipe: Mapping[str, Any], changes: Mapping[str, Any], *, sample: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """A recipe with settings changed, and notes. With another data.source its validation data and parallel file go;
    with `sample` all of its data is replaced by a sample."""
    changed, notes = changes.get("data", {}), list[str]()
    data = dict(recipe.get("data", {}))
    source = data.get("source", "")
    if "source" in changed:
        if sample:
            raise ValueError("--sample is in place of other data: leave out data.source, or --sample")
        others = [key for key in COMPANIONS if data.get(key) and (key == "validation" or is_path(data[key]))]
        data = {key: value for key, value in data.items() if key not in others}
    elif sample:
        known = find_source(source)
        if known is not None:
            data = {key: value for key, value in data.items() if key not in COMPANIONS} | {"source": known.sample}
            notes.append(
                f"--sample: trains on {known.sample}, which comes with heedful, instead of {source}; "
                "this shows that it works, and is not what the recipe's results were measured on"
            )
        elif is_built_in(source) or data.get("kind") == "reversal":
            notes.append("--sample changes nothing: the data of this recipe comes with heedful")
        else:
            raise ValueError("--sample is for recipes that ship: there is no sample of other data")
    made = merge_tables({**recipe, "data": data}, changes)
    if made.get("expected"):
        if is_as_measured(made, changes):
            notes.append(f"measured with these settings on this data: {made['expected']}")
        else:
            made |= {"expected": "", "measured_on": ""}
    return made, notes


def check_data_is_here(name: str, data: Mapping[str, Any]) -> None:
    """ValueError if files of a shipped recipe's data are missing: what they are, and where to put them."""
    source = data.get("source", "")
    known = find_source(source)
    missing = [path for path in data_files(data) if find_data(path) is None]
    if known is None or not missing:
        return
    folder = os.environ.get("HEEDFUL_DATA")
    where = f"in {folder} (HEEDFUL_DATA)" if folder else "in a folder that HEEDFUL_DATA names"
    raise ValueError(
        f"the data of the recipe {name} is not here: {', '.join(missing)}. It is {known.about}. Put it in the current "
        f"folder or {where}; or train on other data with --set data.source=FILE; or see the recipe work on a small "
        f"sample ({known.sample}) with --sample"
    )


def data_files(data: Mapping[str, Any]) -> list[str]:
    """The files that a [data] table names: source, target, and those to validate with."""
    named = [data.get(key, "") for key in ("source", "target", "validation", "validation_target")]
    files = [name for name in named if isinstance(name, str) and name and not is_built_in(name)]
    return [name for name in files if name == data.get("source") or is_path(name)]


def is_as_measured(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether a recipe is what its `expected` scores were measured with: the same settings, and files of the same
    content."""
    paths = {f"data.{key}" for key in ("source", *COMPANIONS)}
    changed = [key for key, _ in flat(changes) if key not in paths and not FREE_SETTINGS.fullmatch(key)]
    return not changed and bool(recipe.get("measured_on")) and recipe["measured_on"] == data_digest(recipe["data"])


def data_digest(data: Mapping[str, Any]) -> str:
    """A digest of the content of all files that a [data] table names; "" if one is missing, or if they are several
    sources."""
    content = hashlib.blake2b(digest_size=8)
    for key in ("source", *COMPANIONS):
        name = data.get(key, "")
        if name == "digits":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # drawn digits: said when they are read
                content.update(load_digits().fingerprint.encode())
        elif name and (key == "source" or is_built_in(name) or is_path(name)):
            path = find_data(name) if isinstance(name, str) else None
            if path is None or not path.is_file():
                return ""
            with path.open("rb") as file:
                content.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
    return content.hexdigest()


def is_built_in(source: Any) -> bool:
    """Whether data comes with heedful."""
    return isinstance(source, str) and (source.startswith(PREFIX) or source == "digits")


def find_source(source: Any) -> RecipeSource | None:
    """What is known of a shipped recipe's data, by the folder that it is in."""
    if not isinstance(source, str):
        return None
    return next((known for folder, known in SOURCES.items() if source.startswith(folder)), None)
