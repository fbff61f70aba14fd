"""A table of a recipe as a frozen class: what its settings may be."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from heedful.models.config import Config, did_you_mean


def choice_field(default: str, *others: str) -> Any:
    """A setting with a fixed set of choices."""
    return field(default=default, metadata={"choices": (default, *others)})


LARGEST = 1e12  # no setting is larger, but for a seed


def number_field(default: float, least: float, most: float = LARGEST) -> Any:
    """A number within bounds."""
    return field(default=default, metadata={"bounds": (least, most)})


LISTS: dict[str, tuple[Any, str]] = {
    "tuple[str, ...]": (str, 'texts, as ["a", "b"]'),
    "tuple[float, ...]": (int | float, "numbers, as [0.9, 0.99]"),
}


@dataclass(frozen=True)
class Settings(Config):
    """A table of a recipe: types and finite numbers are checked by `Config`, choices and bounds here."""

    def _check(self, name: str, value: Any) -> None:
        field = next(f for f in dataclasses.fields(self) if f.name == name)
        limits = field.metadata
        if str(field.type) in LISTS:
            item, what = LISTS[str(field.type)]
            if not isinstance(value, list | tuple) or not all(isinstance(x, item) for x in value):
                raise ValueError(f"{name} is {value!r}: it must be a list of {what}")
        elif str(field.type).startswith("str |") and not isinstance(value, str | list | tuple):
            raise ValueError(f"{name} is {value!r}: it must be a text, or a list")
        if "choices" in limits and value not in limits["choices"]:
            hint = did_you_mean(str(value), limits["choices"])
            raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(limits['choices'])}{hint}")
        if "bounds" not in limits:
            return super()._check(name, value)
        least, most = limits["bounds"]
        if not least <= value <= most:
            above = f" and at most {most:g}" if most < LARGEST or value > most else ""
            raise ValueError(f"{name} is {value}: it must be at least {least:g}{above}")

    def check_together(self) -> None:
        """Check settings against each other."""
