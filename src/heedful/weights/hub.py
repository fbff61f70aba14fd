"""Models of the Hugging Face hub by their id ("org/name"), downloaded once into its own cache.

huggingface_hub does the work: resuming, progress, the cache that other programs share. Only data is fetched, never
pickled weights or code.
"""

from __future__ import annotations

import re
from pathlib import Path

ALLOWED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm"]
# The same weights in another form (a folder per framework, Mistral's and LLaMA's originals, half precision).
IGNORED = [
    "onnx/*",
    "original/*",
    "*/*.safetensors",
    "consolidated*",
    "*.fp16.*",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.py",
]
PICKLED = ["pytorch_model*.bin", "adapter_model.bin"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_id(name: str) -> bool:
    """Whether a name has the form of a hub id, "org/name"."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def is_cached(name: str) -> bool:
    """Whether a model of the hub is in the cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def download(name: str, *, revision: str | None = None, pickles: bool = False) -> Path:
    """The folder of a hub model in the cache, downloaded if it is not there yet; with `pickles`, pickled weights too,
    which `heedful convert` reads."""
    from huggingface_hub import errors, snapshot_download

    allowed = [*ALLOWED, *PICKLED] if pickles else ALLOWED
    ignored = [pattern for pattern in IGNORED if not pickles or pattern != "*.bin"]
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{name} asks for its license to be accepted: do so at https://huggingface.co/{name}, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no folder and no model {name!r} on the hub (or it is private: `hf auth login`)"
        ) from error
    except OSError as error:  # no network, HF_HUB_OFFLINE, a failing server
        raise ValueError(
            f"{name!r} is no folder here, it is not in the hub's cache, and the hub cannot be reached "
            f"({str(error).splitlines()[0][:200] if str(error) else type(error).__name__}). "
            f"Where there is a network, `hf download {name}` fetches it; then copy the cache "
            "(~/.cache/huggingface/hub, or what HF_HUB_CACHE names) to this machine, "
            "or the model's folder and give its path."
        ) from error
    assert isinstance(found, str)
    return Path(found)
