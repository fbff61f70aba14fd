"""A model's folder in the hub's layout: config.json, and model.safetensors or shards with their index.

A folder is data from outside. Only plain files in it are read (the hub's own cache keeps them in `blobs` beside the
snapshots and links to them), none larger than it may be, and nothing that a config names is imported. Pickled
checkpoints are never opened: opening one runs whatever its author put in.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from heedful.models.base import Model
from heedful.models.mapping import WeightMap, identity
from heedful.models.registry import for_hub
from heedful.text.parse import parse_json
from heedful.weights.compressed import CompressedSource, is_supported
from heedful.weights.load import TensorSource, load_tensors
from heedful.weights.safetensors_file import SafetensorsFiles

LARGEST_CONFIG = 4 * 2**20
LARGEST_INDEX = 64 * 2**20
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "source.spm",
    "sentencepiece.bpe.model", "tokenizer_config.json",
)  # fmt: skip
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OWN = "heedful"  # the model_type of families that have no layout on the hub

HOW_TO_CONVERT = (
    "Such files can run code when they are opened, so they are not: `heedful convert {} NEW_FOLDER` reads their "
    "tensors alone, in a process of its own, and writes safetensors."
)


def load_folder(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    prepare: Callable[[Model], None] | None = None,
    integers: bool = False,
) -> Model:
    """The model in a folder, in evaluation mode; `prepare` changes it on the meta device, before tensors are read;
    `integers` as in `load_tensors`."""
    hub = read_config(folder)
    with SafetensorsFiles(weight_files(folder)) as files:
        source = tensor_source(files, hub)
        model = meta_model(hub, set(source.names()))
        if prepare is not None:
            prepare(model)
        load_tensors(model, source, weights=own_names(model, hub), device=device, dtype=dtype, integers=integers)
    model.generation = read_json(folder, "generation_config.json", missing={})
    model.preprocessor = read_json(folder, "preprocessor_config.json", missing={})
    model.special = special_token_ids(hub) | special_token_ids(model.generation)
    return model.eval()


def tensor_source(files: SafetensorsFiles, hub: Mapping[str, Any]) -> TensorSource:
    """The tensors of a folder's files; those that config.json calls quantized are floats again when they are read."""
    if not hub.get("quantization_config"):
        return files
    return CompressedSource(files, hub.get("dtype") or hub.get("torch_dtype"))


# --- configs ---------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; ValueError for weights that are quantized in another way than `compressed` knows."""
    hub = read_json(folder, "config.json")
    quantization = hub.get("quantization_config")
    if quantization is not None and not (isinstance(quantization, Mapping) and is_supported(quantization)):
        raise ValueError(
            f"the weights in {folder} are quantized (quantization_config) in a way that is not supported in "
            "safetensors (compressed-tensors' symmetric int8 by row and int4 are); use the model's unquantized "
            "files, or its GGUF"
        )
    return hub


def meta_model(hub: Mapping[str, Any], tensors: Collection[str] | None = None) -> Model:
    """The model that a config.json describes, on the meta device: shapes without memory. `tensors` are the names in
    its files, for what config.json leaves open."""
    try:
        family = for_hub(hub).load()
        if hub["model_type"] == OWN:
            config = family.config_class.from_dict(own_settings(hub))
        else:
            config = family.config_class.from_hub(hub)
            config = config if tensors is None or config.hub is None else config.hub.fit(config, tensors)
        with torch.device("meta"), SkipInit():
            return family(config)
    except KeyError as error:
        raise ValueError(f"config.json has no {error}, which a {hub.get('model_type')} needs") from error
    except (TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # A text where a number belongs, a table where a list does: whatever the families trip over.
        raise ValueError(f"config.json cannot be right: {str(error)[:300]}") from error


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init inside the context: it takes time even on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def own_settings(hub: Mapping[str, Any]) -> dict[str, Any]:
    """The family's settings in a config.json of the "heedful" layout, without what every config.json has."""
    shared = {"model_type", "family", "architectures", "dtype", "quantization_config", *special_token_ids(hub)}
    return {key: value for key, value in hub.items() if key not in shared}


def own_names(model: Model, hub: Mapping[str, Any]) -> WeightMap | None:
    """The weight map of the "heedful" layout, which keeps our names; None: the family's map to the hub's names."""
    return identity(dict(model.named_parameters())) if hub["model_type"] == OWN else None


def special_token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `*_token_id` entries of a config: which tokens begin, end and pad a text."""
    found = {}
    for key, value in values.items():
        if key.endswith("_token_id"):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int for i in ids):
                raise ValueError(f"{key} is {str(value)[:100]!r}: it must be a token's number, or several")
            found[key] = value
    return found


# --- files -----------------------------------------------------------------------------------------------------------


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's files are in the folder."""
    return any((folder / file).exists() for file in TOKENIZER_FILES)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: model.safetensors, or the shards of its index."""
    if (folder / "model.safetensors").exists():
        return [regular_file(folder, "model.safetensors")]
    if (folder / "model.safetensors.index.json").exists():
        index = read_json(folder, "model.safetensors.index.json", largest=LARGEST_INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise ValueError("model.safetensors.index.json has no weight_map from tensors to files")
        shards = sorted(set(names.values()))
        for shard in shards:
            if not shard.endswith(".safetensors"):
                raise ValueError(f"model.safetensors.index.json names {shard[:200]!r}, which is no safetensors file")
        return [regular_file(folder, shard) for shard in shards]
    raise ValueError(f"{folder} has no model.safetensors{_instead(folder)}")


def _instead(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    pickles = [n for n in names if n.endswith(PICKLES)]
    others = [n for n in names if n.endswith(".safetensors")]
    if others:
        return f", only {', '.join(others[:5])}: the weights must be in model.safetensors or in shards with their index"
    if pickles:
        return f", only {', '.join(pickles[:5])}. {HOW_TO_CONVERT.format(folder)}"
    if folder.parent.name == "snapshots":
        return "; if the hub has only pickled ones (.bin), `heedful convert ORG/NAME NEW_FOLDER` fetches and converts"
    return ""


def regular_file(folder: Path, name: str) -> Path:
    """The regular file `name` in `folder`; ValueError if its name or a link leads elsewhere."""
    if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
        raise ValueError(f"{name[:200]!r} is not the name of a file in {folder}")
    path = (folder / name).resolve()
    if not any(path.is_relative_to(root) for root in allowed_roots(folder)):
        raise ValueError(f"{name} in {folder} is a link to {path}, outside the folder: copy the file there instead")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{name} in {folder} is not a plain file")
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {name}{_instead(folder) if name == 'config.json' else ''}") from None
    return path


def allowed_roots(folder: Path) -> list[Path]:
    """Where a folder's files may be: in it, or in the blobs of its own repository in the hub's cache."""
    folder = folder.resolve()
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return [folder, repository / "blobs"]
    return [folder]


def read_json(
    folder: Path, name: str, *, largest: int = LARGEST_CONFIG, missing: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A JSON object from a file in the folder; `missing` where there is none."""
    if missing is not None and not (folder / name).exists():
        return dict(missing)
    path = regular_file(folder, name)
    with path.open("rb") as file:
        raw = file.read(largest + 1)
    if len(raw) > largest:
        raise ValueError(f"{path} is larger than {largest} bytes: it cannot be a model's {name}")
    try:
        found = parse_json(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found
