"""What every family's config shares: frozen, checked when made, readable and writable as plain data.

Nothing here imports torch: `heedful models` and `heedful info` answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
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

    # The hub's config.json as data. `hub_names`: our setting -> its key there; a key that is missing there means our
    # default, and so does a null unless the setting may be None. `hub_fixed`: what this family takes for granted;
    # checked on loading, written on saving.
    hub_names: ClassVar[Mapping[str, str]] = {}
    hub_fixed: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def from_hub(cls, hub: Mapping[str, Any]) -> Self:
        """Read the hub's config.json (already parsed)."""
        if cls.hub is None:
            return cls(**cls.read_hub(hub))
        config = cls(**cls.hub.read(hub))
        cls.hub.check(config, hub)
        return config

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that `hub_names` finds; families with more to read add to it."""
        for key, value in cls.hub_fixed.items():
            if key not in ("model_type", "architectures") and hub.get(key, value) != value:
                raise ValueError(f"a {hub.get('model_type')} with {key} {hub[key]!r} is not supported, only {value!r}")
        optional = {f.name for f in dataclasses.fields(cls) if "None" in str(f.type)}
        return {
            ours: hub[theirs]
            for ours, theirs in cls.hub_names.items()
            if theirs in hub and (hub[theirs] is not None or ours in optional)
        }

    def to_hub(self) -> dict[str, Any]:
        """The config.json that the reference implementation reads; without a model_type, the hub has none for it."""
        if self.hub is not None:
            return self.hub.write(self)
        return {**self.hub_fixed, **{theirs: getattr(self, ours) for ours, theirs in self.hub_names.items()}}


PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")  # the hub's names


@dataclass(frozen=True)
class HeadConfig(Config):
    """A config of a model with one of several heads, some of which tell labels apart."""

    head: str = "encoder"  # one of `hub_heads`, or "encoder" for none
    n_labels: int = 2
    labels: tuple[str, ...] = ()  # their names
    problem_type: str | None = None  # one of PROBLEMS; None: regression if there is one label, else one of them

    # The hub's class -> our head, the bare model first: it is meant where a config names none.
    hub_heads: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = dict.fromkeys(["encoder", *self.hub_heads.values()])
        if self.head not in heads:
            raise ValueError(f"head {self.head!r} is not one of {', '.join(heads)}")
        if self.labels and len(self.labels) != self.n_labels:
            raise ValueError(f"{len(self.labels)} labels have names and n_labels is {self.n_labels}")
        if self.problem_type not in (None, *PROBLEMS):
            raise ValueError(f"problem_type {self.problem_type!r} is not one of {', '.join(PROBLEMS)}")

    @property
    def problem(self) -> str:
        """What the labels are: one of them is true, any number of them are, or they are numbers."""
        return self.problem_type or (PROBLEMS[2] if self.n_labels == 1 else PROBLEMS[0])

    @classmethod
    def read_hub(cls, hub: Mapping[str, Any]) -> dict[str, Any]:
        bare = next(iter(cls.hub_heads))
        named = (hub.get("architectures") or [bare])[0]
        if named not in cls.hub_heads:
            raise ValueError(f"a {named} is not supported, only {', '.join(cls.hub_heads)}")
        head = cls.hub_heads[named]
        if named == bare and hub.get("add_pooling_layer") is False:
            head = "encoder"
        names = {int(i): name for i, name in (hub.get("id2label") or {}).items()}
        n_labels = len(names) or hub.get("num_labels") or 2
        if names and sorted(names) != list(range(n_labels)):
            raise ValueError(f"id2label numbers its labels {sorted(names)}, not from 0 to {n_labels - 1}")
        unnamed = all(name == f"LABEL_{i}" for i, name in names.items())  # what the hub calls labels without names
        return super().read_hub(hub) | {
            "head": head,
            "n_labels": n_labels,
            "labels": () if unnamed else tuple(names[i] for i in range(n_labels)),
            "problem_type": hub.get("problem_type"),
        }

    def to_hub(self) -> dict[str, Any]:
        classes = {head: name for name, head in self.hub_heads.items()}
        names = self.labels or [f"LABEL_{i}" for i in range(self.n_labels)]
        hub = super().to_hub() | {
            "architectures": [classes.get(self.head, next(iter(self.hub_heads)))],
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": self.problem_type,
        }
        # The reference has this as an argument, not a key; it is how we know a bare model without a pooler.
        return hub if self.head in classes else hub | {"add_pooling_layer": False}


def read_rope(hub: Mapping[str, Any], theta: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary positions, in the hub's old form (`rope_theta`, `rope_scaling`) or its new one."""
    table = dict(hub.get("rope_parameters") or hub.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in table.values()):
        raise ValueError(f"rotary positions that differ by kind of layer ({', '.join(table)}) are not supported")
    theta = table.pop("rope_theta", None) or hub.get("rope_theta") or theta
    table.pop("partial_rotary_factor", None)  # `read_rotary_share` asks for it
    kind = table.pop("type", "default")  # what "rope_type" was called first
    kind = table.setdefault("rope_type", kind)
    return float(theta), (None if kind == "default" else table)


def read_rotary_share(hub: Mapping[str, Any]) -> float:
    """How much of each head is rotated, from 0 to 1."""
    inside = (hub.get("rope_parameters") or {}).get("partial_rotary_factor")
    share = inside if inside is not None else hub.get("partial_rotary_factor")
    return 1.0 if share is None else float(share)


def write_rope(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `read_rope` reads, in both forms: old programs know the one, new ones the other."""
    table = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return {"rope_parameters": table, "rope_theta": theta, "rope_scaling": dict(scaling) if scaling else None}


def read_dropout(hub: Mapping[str, Any], keys: Iterable[str], default: float) -> float:
    """The one rate of a model whose hub config has a key for each place; they must agree."""
    rates = {key: float(hub.get(key, default)) for key in keys}
    if len(set(rates.values())) > 1:
        raise ValueError(f"dropout rates that differ are not supported: {rates}")
    return next(iter(rates.values()))


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
