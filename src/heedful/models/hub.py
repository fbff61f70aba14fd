"""How the hub stores models of a family: the keys of their config.json and the names of their tensors.

Each family has one `HubLayout`, at the end of its file. It reads a parsed config.json into our settings, writes a
config as one, and gives the map between our tensors' names and the hub's (`heedful.models.mapping`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from heedful.models.mapping import WeightMap


class HubLayout:
    """A family's layout on the hub: a table of names, and methods for what is more than a renaming."""

    names: Mapping[str, str] = {}  # our setting -> its key in config.json
    fixed: Mapping[str, Any] = {}  # keys with the one value that is supported: checked on loading, written on saving
    dropouts: Sequence[str] = ()  # keys which all must hold our one `dropout`

    def __init__(self, config_class: type[Any]) -> None:
        self.config_class = config_class

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings from a config.json. A missing key means our default; a null too, unless the setting may be
        None."""
        for key, value in self.fixed.items():
            if key not in ("model_type", "architectures") and hub.get(key, value) != value:
                raise ValueError(f"a {hub.get('model_type')} with {key} {hub[key]!r} is not supported, only {value!r}")
        optional = {f.name for f in dataclasses.fields(self.config_class) if "None" in str(f.type)}
        read = {
            ours: hub[theirs]
            for ours, theirs in self.names.items()
            if theirs in hub and (hub[theirs] is not None or ours in optional)
        }
        if self.dropouts:
            read["dropout"] = read_dropout(hub, self.dropouts, self.config_class.dropout)
        return read

    def check(self, config: Any, hub: Mapping[str, Any]) -> None:
        """ValueError if config.json says something else than the config read from it."""

    def fit(self, config: Any, tensors: Collection[str]) -> Any:
        """The config of a file with these tensors, where config.json leaves something open."""
        return config

    def write(self, config: Any) -> dict[str, Any]:
        """The config.json that the reference implementation reads; ValueError if it has none for such a model."""
        named = {theirs: getattr(config, ours) for ours, theirs in self.names.items()}
        if named.get("context_length", 0) is None:
            del named["context_length"]  # a key of ours, which says something only where it was set
        return {**self.fixed, **named, **dict.fromkeys(self.dropouts, getattr(config, "dropout", None))}

    def weight_map(self, model: Any) -> WeightMap:
        """The map between the names of our tensors and of those in the hub's files."""
        raise NotImplementedError


class HeadLayout(HubLayout):
    """The layout of models with one of several heads (`HeadConfig`)."""

    heads: Mapping[str, str] = {}  # the hub's class -> our head; the bare model first, which a config naming none means

    def read(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `names`, the head from `architectures`, the labels from `id2label`."""
        bare = next(iter(self.heads))
        named = (hub.get("architectures") or [bare])[0]
        if named not in self.heads:
            raise ValueError(f"a {named} is not supported, only {', '.join(self.heads)}")
        head = self.heads[named]
        if named == bare and hub.get("add_pooling_layer") is False:
            head = "encoder"
        names = {int(i): name for i, name in (hub.get("id2label") or {}).items()}
        n_labels = len(names) or hub.get("num_labels") or 2
        if names and sorted(names) != list(range(n_labels)):
            raise ValueError(f"id2label numbers its labels {sorted(names)}, not from 0 to {n_labels - 1}")
        unnamed = all(name == f"LABEL_{i}" for i, name in names.items())  # what the hub calls labels without names
        return super().read(hub) | {
            "head": head,
            "n_labels": n_labels,
            "labels": () if unnamed else tuple(names[i] for i in range(n_labels)),
            "problem_type": hub.get("problem_type"),
        }

    def write(self, config: Any) -> dict[str, Any]:
        """The settings in `names`, the head as `architectures`, the labels in both directions."""
        classes = {head: name for name, head in self.heads.items()}
        names = config.labels or [f"LABEL_{i}" for i in range(config.n_labels)]
        hub = super().write(config) | {
            "architectures": [classes.get(config.head, next(iter(self.heads)))],
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": config.problem_type,
        }
        # The reference has this as an argument, not a key; it is how we know a bare model without a pooler.
        return hub if config.head in classes else hub | {"add_pooling_layer": False}


def read_rope(hub: Mapping[str, Any], theta: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary positions, in the hub's old form (`rope_theta`, `rope_scaling`) or its new one."""
    table = dict(hub.get("rope_parameters") or hub.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in table.values()):
        raise ValueError(f"rotary positions that differ by kind of layer ({', '.join(table)}) are not supported")
    theta = table.pop("rope_theta", None) or hub.get("rope_theta") or theta
    table.pop("partial_rotary_factor", None)  # see `read_rotary_share`
    kind = table.pop("type", "default")  # the old name of "rope_type"
    kind = table.setdefault("rope_type", kind)
    return float(theta), (None if kind == "default" else table)


def read_rotary_share(hub: Mapping[str, Any]) -> float:
    """The share of each head's dimensions that is rotated, from 0 to 1."""
    inside = (hub.get("rope_parameters") or {}).get("partial_rotary_factor")
    share = inside if inside is not None else hub.get("partial_rotary_factor")
    return 1.0 if share is None else float(share)


def write_rope(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys that `read_rope` reads, in both forms: old programs know the one, new ones the other."""
    table = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return {"rope_parameters": table, "rope_theta": theta, "rope_scaling": dict(scaling) if scaling else None}


def read_dropout(hub: Mapping[str, Any], keys: Iterable[str], default: float) -> float:
    """The one dropout rate of a model whose config.json has a key for each place; they must agree."""
    rates = {key: float(hub.get(key, default)) for key in keys}
    if len(set(rates.values())) > 1:
        raise ValueError(f"dropout rates that differ are not supported: {rates}")
    return next(iter(rates.values()))
