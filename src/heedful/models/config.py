"""What every family's config shares: frozen, checked when made, readable and writable as plain data.

Nothing here imports torch: `heedful models` and `heedful info` answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from heedful.models.hub import HubLayout

# Far beyond every published model, and small enough that a hostile config is refused before anything is built.
LARGEST: dict[str, int] = {"n_layers": 2048, "n_experts": 4096}
LARGEST_SIZE = 2**24
SIZES = ("vocab_size", "max_len", "image_size", "patch_size")  # and all that begins with n_ or d_

# The types that a field's annotation may name, as JSON has them.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


@dataclass(frozen=True)
class Config:
    """Base of all configs. Names are the same everywhere: d_model, n_layers, n_heads, n_kv_heads, d_head, d_ff,
    vocab_size, max_len."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_type(field.name, str(field.type), value)
            self._check(field.name, value)

    def _check(self, name: str, value: object) -> None:
        """Finite, and sizes within reason."""
        if not _is_finite(value):
            raise ValueError(f"{name} is {str(value)[:100]}, not a finite number")
        if value is None or not (name.startswith(("n_", "d_")) or name.endswith(SIZES)):
            return
        if type(value) is not int:
            raise ValueError(f"{name} is {str(value)[:100]!r}, not a whole number")
        largest = LARGEST.get(name.replace("encoder_", "").replace("decoder_", ""), LARGEST_SIZE)
        if not 1 <= value <= largest:
            raise ValueError(f"{name} is {value}: it must be from 1 to {largest}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some values changed; an unknown name is an error with the nearest one."""
        check_names(changes, [f.name for f in dataclasses.fields(self)], type(self).__name__)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        check_names(values, [f.name for f in dataclasses.fields(cls)], cls.__name__)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    # How the hub stores models of this family, set at the end of its file; None if the hub has none.
    hub: ClassVar[HubLayout | None] = None

    @classmethod
    def from_hub(cls, hub: Mapping[str, Any]) -> Self:
        """Read the hub's config.json (already parsed)."""
        if cls.hub is None:
            raise ValueError(f"the hub has no layout for a {cls.__name__}")
        config = cls(**cls.hub.read(hub))
        cls.hub.check(config, hub)
        return config

    def to_hub(self) -> dict[str, Any]:
        """The config.json that the reference implementation reads; without a model_type, the hub has none for it."""
        return {} if self.hub is None else self.hub.write(self)


PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")  # the hub's names


@dataclass(frozen=True)
class HeadConfig(Config):
    """A config of a model with one of several heads, some of which tell labels apart."""

    head: str = "encoder"  # one of `heads`; "encoder": none
    n_labels: int = 2
    labels: tuple[str, ...] = ()  # their names
    problem_type: str | None = None  # one of PROBLEMS; None: regression if there is one label, else one of them

    heads: ClassVar[Sequence[str]] = ("encoder",)  # those that the family has

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head not in self.heads:
            raise ValueError(f"head {self.head!r} is not one of {', '.join(self.heads)}")
        if self.labels and len(self.labels) != self.n_labels:
            raise ValueError(f"{len(self.labels)} labels have names and n_labels is {self.n_labels}")
        if self.problem_type not in (None, *PROBLEMS):
            raise ValueError(f"problem_type {self.problem_type!r} is not one of {', '.join(PROBLEMS)}")

    @property
    def problem(self) -> str:
        """What the labels are: one of them is true, any number of them are, or they are numbers."""
        return self.problem_type or (PROBLEMS[2] if self.n_labels == 1 else PROBLEMS[0])


def _check_type(name: str, kind: str, value: object) -> None:
    """Values come from files: they must have the type that the field declares."""
    kinds = set(kind.split(" | "))
    if kinds <= TYPES.keys() and type(value) not in {t for k in kinds for t in TYPES[k]}:
        raise ValueError(f"{name} is {str(value)[:100]!r}: it must be {kind.replace(' | ', ' or ')}")


def _is_finite(value: object) -> bool:
    """No NaN and no infinity, in tables and lists neither."""
    if isinstance(value, Mapping):
        return all(_is_finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_is_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


def check_names(given: Mapping[str, Any], known: list[str], what: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else f": it has {', '.join(known)}"
            raise ValueError(f"{what} has no setting {name!r}{hint}")
