"""What every family's config shares: frozen dataclasses, validated when created, to and from plain data.

Nothing here imports torch, whose import takes seconds.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from heedful.models.hub import HubLayout

# The largest values allowed: far above every published model, and low enough to refuse a hostile config before
# anything is built.
LARGEST: dict[str, int] = {"n_layers": 2048, "n_experts": 4096}
LARGEST_SIZE = 2**24
SIZES = ("vocab_size", "max_len", "context_length", "image_size", "patch_size")  # and names that begin with n_ or d_
PAIRS = ("image_size", "patch_size")  # may be (height, width)

# The names of types in a field's annotation -> the types of its values from JSON.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


@dataclass(frozen=True)
class Config:
    """Base of all configs. Families use the same names: d_model, n_layers, n_heads, n_kv_heads, d_head, d_ff,
    vocab_size, max_len."""

    # The family's layout on the hub, assigned at the end of its file; None if the hub has no such models.
    hub: ClassVar[HubLayout | None] = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_type(field.name, str(field.type), value)
            self._check(field.name, value)

    def _check(self, name: str, value: object) -> None:
        """ValueError if a value is not finite or a size is not within its limits."""
        if not _is_finite(value):
            raise ValueError(f"{name} is {str(value)[:100]}, not a finite number")
        if value is None or not (name.startswith(("n_", "d_")) or name.endswith(SIZES)):
            return
        if name in PAIRS and isinstance(value, tuple):
            if len(value) != 2:
                raise ValueError(f"{name} is {str(value)[:100]}: it must be a number, or a height and a width")
            for size in value:
                self._check(f"{name}", size)
            return
        if type(value) is not int:
            raise ValueError(f"{name} is {str(value)[:100]!r}, not a whole number")
        largest = LARGEST.get(name.replace("encoder_", "").replace("decoder_", ""), LARGEST_SIZE)
        if not 1 <= value <= largest:
            raise ValueError(f"{name} is {value}: it must be from 1 to {largest}")

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model is made for, None if there is no limit."""
        return getattr(self, "max_len", None)

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed; ValueError for an unknown name."""
        check_names(changes, [f.name for f in dataclasses.fields(self)], type(self).__name__)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from plain data, such as `to_dict` gives; ValueError for an unknown name."""
        check_names(values, [f.name for f in dataclasses.fields(cls)], cls.__name__)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    @classmethod
    def from_hub(cls, hub: Mapping[str, Any]) -> Self:
        """A config from the hub's config.json, parsed."""
        if cls.hub is None:
            raise ValueError(f"the hub has no layout for a {cls.__name__}")
        config = cls(**cls.hub.read(hub))
        cls.hub.check(config, hub)
        return config

    def to_hub(self) -> dict[str, Any]:
        """The config.json that the reference implementation reads; {} if the hub has no such models."""
        return {} if self.hub is None else self.hub.write(self)


STRETCHED = ("linear", "yarn")  # rope scalings by which `factor` times the trained length can be read


@dataclass(frozen=True)
class RotaryPositions(Config):
    """Base of the configs with rotary positions: they have no end, so that a sequence may exceed the trained length."""

    context_length: int | None = None  # the longest sequence allowed; None: as long as the model was trained for

    @property
    def longest(self) -> int | None:
        """`context_length`; else `max_len`, times the factor of a scaling that is not counted in it."""
        if self.context_length is not None:
            return self.context_length
        longest, scaling = super().longest, getattr(self, "scaling", None) or {}
        if longest is None or scaling.get("rope_type") not in STRETCHED:
            return longest
        trained = scaling.get("original_max_position_embeddings") or longest
        return max(longest, int(trained * scaling.get("factor", 1)))


PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")  # the hub's names


@dataclass(frozen=True)
class LabelConfig(Config):
    """Base of the configs of models with one of several heads, some of which have labels."""

    head: str = "encoder"  # one of `heads`
    n_labels: int = 2
    labels: tuple[str, ...] = ()  # their names
    problem_type: str | None = None  # one of PROBLEMS; None: `problem` decides

    heads: ClassVar[Sequence[str]] = ("encoder",)  # that the family has

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
        """One of PROBLEMS: `problem_type`, or regression if there is one label, else single-label classification."""
        return self.problem_type or (PROBLEMS[2] if self.n_labels == 1 else PROBLEMS[0])


@dataclass(frozen=True)
class HeadConfig(LabelConfig):
    """Base of the configs of encoders, whose heads are in `heedful.models.heads`; "encoder" is none."""


@dataclass(frozen=True)
class DecoderConfig(LabelConfig):
    """Base of the configs of decoders: next to the language head, a classifier of the last token, or no head."""

    head: str = "language"

    heads: ClassVar[Sequence[str]] = ("language", "classify", "none")

    def to_hub(self) -> dict[str, Any]:
        """The config.json that the reference implementation reads; its `architectures` name the head."""
        return {} if self.hub is None else self.hub.write_head(self, super().to_hub())


def _check_type(name: str, kind: str, value: object) -> None:
    """ValueError if a value, which may come from a file, has another type than its field's."""
    kinds = set(kind.split(" | "))
    if kinds <= TYPES.keys() and type(value) not in {t for k in kinds for t in TYPES[k]}:
        raise ValueError(f"{name} is {str(value)[:100]!r}: it must be {kind.replace(' | ', ' or ')}")


def _is_finite(value: object) -> bool:
    """Whether a value has no NaN and no infinity, in tables and lists too."""
    if isinstance(value, Mapping):
        return all(_is_finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_is_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


def check_names(given: Mapping[str, Any], known: list[str], what: str) -> None:
    """ValueError for a name of `given` that is not one of the `known`, with the nearest one; `what` has these names."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f": it has {', '.join(known)}"
            raise ValueError(f"{what} has no setting {name!r}{hint}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message on a misspelled name, " (did you mean steps?)"; empty if no known name is near it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
