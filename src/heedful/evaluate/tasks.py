"""The evaluation tasks by name: heedful's own, and those of lm-evaluation-harness."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from heedful.models.config import did_you_mean

if TYPE_CHECKING:
    from heedful.evaluate.task import Task

TASKS = {  # name: where its class is
    "perplexity": ("heedful.evaluate.perplexity", "Perplexity"),
    "translation": ("heedful.evaluate.translation", "Translation"),
    "exact_match": ("heedful.evaluate.exact_match", "ExactMatch"),
    "squad": ("heedful.evaluate.squad", "Squad"),
    "entities": ("heedful.evaluate.entities", "Entities"),
    "classification": ("heedful.evaluate.classification", "Classification"),
    "similarity": ("heedful.evaluate.similarity", "Similarity"),
    "bits_per_dimension": ("heedful.evaluate.bits_per_dimension", "BitsPerDimension"),
}
HARNESS_TASKS = {  # of lm_eval, with rows from local files; others by their name as well
    "lambada_openai": "the last word of a passage (Paperno et al. 2016)",
    "winogrande": "whom a pronoun means (Sakaguchi et al. 2019)",
    "hellaswag": "how a scene goes on (Zellers et al. 2019)",
    "piqa": "physical common sense (Bisk et al. 2019)",
    "arc_easy": "science questions of schools (Clark et al. 2018)",
    "arc_challenge": "the harder ones",
}
NAME = re.compile(
    r"^[ -]*[\"']?(?:task|group|tag)[\"']?\s*:\s*[\"']?([\w.-]+)", re.MULTILINE
)  # of a task in lm_eval's YAML


def task_class(name: str) -> type[Task]:
    """The class of heedful's own task of this name."""
    module, cls = TASKS[name]
    found: type[Task] = getattr(import_module(module), cls)
    return found


def check_task(name: str) -> None:
    """ValueError with the nearest names for a task that there is not; takes a second at most and imports no torch."""
    if name in TASKS or name in HARNESS_TASKS or name in (known := harness_names()):
        return
    hint = did_you_mean(name, [*TASKS, *HARNESS_TASKS]) or did_you_mean(name, known)
    more = " and those of lm-evaluation-harness" * bool(known)
    raise ValueError(f"there is no task {name!r}{hint}; there are {', '.join((*TASKS, *HARNESS_TASKS))}{more}")


@cache
def harness_names() -> frozenset[str]:
    """The names in lm_eval's files of tasks, none where it is not installed: to import it takes many seconds."""
    spec = find_spec("lm_eval")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found: set[str] = set()
    for folder in folders:
        for path in (Path(folder) / "tasks").rglob("*.y*ml"):
            found.update(NAME.findall(path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)


def create_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """A task with these settings; ValueError for a name or a setting that it does not have."""
    given = dict(settings or {})
    if name in TASKS:
        cls = task_class(name)
        _check_settings(name, cls, given)
        return cls(**given)
    check_task(name)
    try:
        from heedful.evaluate.harness import LanguageModelTask
    except ImportError:
        raise ValueError(f"{name} needs lm-evaluation-harness: pip install 'heedful[harness]'") from None
    if given:
        raise ValueError(f"{name} is as lm_eval defines it and has no setting {next(iter(given))!r}")
    return LanguageModelTask(name)


def _check_settings(name: str, cls: type[Task], given: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(cls)}
    types_of = get_type_hints(cls)
    for key, value in given.items():
        if key not in known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"{name} has no setting {key!r}{did_you_mean(key, sorted(known))}; {has}")
        hint = types_of[key]
        allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if type(value) not in allowed:
            wanted = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
            raise ValueError(f"{name}: {key} is {value!r}, and it must be {wanted}")
