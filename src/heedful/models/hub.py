"""How the hub stores models of a family: the keys of their config.json and the names of their tensors.

Each family has one `HubLayout`, at the end of its file. It reads a parsed config.json into our settings, writes a
config as one, and gives the map between our tensors' names and the hub's (`heedful.models.mapping`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from heedful.models.mapping import WeightMap


class HubLayout:
    """A family's layout on the hub: a table of names, and methods for what is more than a renaming."""

    names: Mapping[str, str] = {}  # our setting -> its key in config.json
    fixed: Mapping[str, Any] = {}  # keys with the one value that is supported: checked on loading, written on saving
    # Keys that are written but not checked, since they change nothing when a model runs: of training, say.
    written: Mapping[str, Any] = {}
    # Our dropout rates -> their keys. Those other than `dropout` are None where they are the same.
    dropouts: Mapping[str, str] = {}

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
            read |= read_dropouts(hub, self.dropouts, self.config_class.dropout)
        return read | (read_decoder_head(hub) if self.is_decoder else {})

    @property
    def is_decoder(self) -> bool:
        """Whether this is the layout of a decoder, whose head may be another one than the language head."""
        return getattr(self.config_class, "head", None) == "language"

    def check(self, config: Any, hub: Mapping[str, Any]) -> None:
        """ValueError if config.json says something else than the config read from it."""

    def fit(self, config: Any, tensors: Collection[str]) -> Any:
        """The config of a file with these tensors, where config.json leaves something open: a decoder whose file has
        no head, and whose embedding is not its head, is a model without one."""
        if not self.is_decoder or config.head == "classify":
            return config
        if getattr(config, "tied", False) or any(name.startswith(HEADS) for name in tensors):
            return dataclasses.replace(config, head="language")
        is_base = len({name.startswith(BASES) for name in tensors}) == 1  # and nothing else: a head may be misnamed
        return dataclasses.replace(config, head="none") if is_base else config

    def write(self, config: Any) -> dict[str, Any]:
        """The config.json that the reference implementation reads; ValueError if it has none for such a model."""
        named = {theirs: getattr(config, ours) for ours, theirs in self.names.items()}
        if named.get("context_length", 0) is None:
            del named["context_length"]  # a key of ours, which says something only where it was set
        rates = {ours: getattr(config, ours) for ours in self.dropouts}
        theirs = {self.dropouts[ours]: rates["dropout"] if rate is None else rate for ours, rate in rates.items()}
        return {**self.fixed, **self.written, **named, **theirs}

    def write_head(self, config: Any, hub: dict[str, Any]) -> dict[str, Any]:
        """A decoder's config.json with its head and its labels."""
        return write_decoder_head(config, hub)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """The preprocessor_config.json of a model for images whose files have none; empty for other models."""
        return {}

    def equivalent(self, model: Any, pad_id: int | None) -> Any:
        """A model with settings that this layout has, and with the same outputs; the model itself where it needs no
        other, or where there is none."""
        return model

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
            warnings.warn(
                f"the head of a {str(named)[:100]} is not known: the model is loaded as a {bare}, without a head",
                stacklevel=2,
            )
        head = self.heads.get(named, self.heads[bare])
        if named == bare and hub.get("add_pooling_layer") is False:
            head = "encoder"
        return super().read(hub) | {"head": head, **read_labels(hub)}

    def fit(self, config: Any, tensors: Collection[str]) -> Any:
        """A bare model whose file has no pooler is one without it."""
        if config.head != "pooler" or any(name.endswith("pooler.dense.weight") for name in tensors):
            return config
        return dataclasses.replace(config, head="encoder")

    def write(self, config: Any) -> dict[str, Any]:
        """The settings in `names`, the head as `architectures`, the labels in both directions."""
        classes = {head: name for name, head in self.heads.items()}
        named = {"architectures": [classes.get(config.head, next(iter(self.heads)))]}
        hub = super().write(config) | named | write_labels(config)
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


def read_dropouts(hub: Mapping[str, Any], keys: Mapping[str, str], default: float) -> dict[str, float | None]:
    """The dropout rates of a model whose config.json has a key for each place: `dropout`, and those that differ."""
    rates = {ours: hub.get(theirs) for ours, theirs in keys.items()}
    known = {ours: default if rate is None else rate for ours, rate in rates.items()}
    return {ours: None if ours != "dropout" and rate == known["dropout"] else rate for ours, rate in known.items()}


# --- heads and labels ------------------------------------------------------------------------------------------------

# A decoder's head -> what the names of its classes in transformers end with.
CLASSES = {"language": ("ForCausalLM", "LMHeadModel"), "classify": ("ForSequenceClassification",), "none": ("Model",)}
BASES = ("model.", "transformer.", "gpt_neox.")  # what the names of a decoder's tensors begin with, but for its head
HEADS = ("lm_head.", "embed_out.")


def read_decoder_head(hub: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder's head and its labels, by the class that config.json names; ValueError for one that is not known."""
    name = str((hub.get("architectures") or ["ForCausalLM"])[0])
    heads = [head for head, ends in CLASSES.items() if name.endswith(ends)]
    if not heads:
        known = "...ForCausalLM, ...ForSequenceClassification and the model without a head, ...Model"
        raise ValueError(f"a {name} is not supported: of decoders these are: {known}")
    return {"head": heads[0], **(read_labels(hub) if heads[0] == "classify" else {})}


def write_decoder_head(config: Any, hub: dict[str, Any]) -> dict[str, Any]:
    """A decoder's config.json with the class of its head, and the labels."""
    if config.head == "language" or "architectures" not in hub:
        return hub
    stem = str(hub["architectures"][0])
    for end in CLASSES["language"]:
        stem = stem.removesuffix(end)
    hub = hub | {"architectures": [stem + CLASSES[config.head][0]]}
    return hub | write_labels(config) if config.head == "classify" else hub


def read_labels(hub: Mapping[str, Any]) -> dict[str, Any]:
    """The labels of a config.json: `id2label`, or their number."""
    names = {int(i): name for i, name in (hub.get("id2label") or {}).items()}
    n_labels = len(names) or hub.get("num_labels") or 2
    if names and sorted(names) != list(range(n_labels)):
        raise ValueError(f"id2label numbers its labels {sorted(names)}, not from 0 to {n_labels - 1}")
    unnamed = all(name == f"LABEL_{i}" for i, name in names.items())  # what the hub calls labels without names
    return {
        "n_labels": n_labels,
        "labels": () if unnamed else tuple(names[i] for i in range(n_labels)),
        "problem_type": hub.get("problem_type"),
    }


def write_labels(config: Any) -> dict[str, Any]:
    """The labels of a config as config.json has them, in both directions."""
    names = config.labels or [f"LABEL_{i}" for i in range(config.n_labels)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": config.problem_type,
    }
