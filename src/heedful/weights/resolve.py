"""Resolving a model's name: a model that ships with the package, a folder or file, a pulled model, a hub id, in this
order.

The folder of a training run resolves to its best checkpoint.
"""

from __future__ import annotations

import difflib
import os
import re
from importlib import resources
from pathlib import Path

from heedful.models.registry import sizes
from heedful.weights import hub
from heedful.weights.catalog import catalog, how_to_pull, pulled_models
from heedful.weights.folder import HOW_TO_CONVERT, PICKLES
from heedful.weights.manifest import CHECKPOINTS, TRAINING, best_checkpoint, checkpoints, integrity_error, is_run

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def shipped_models() -> dict[str, Path]:
    """The folders of the models that ship with the package, by name."""
    zoo = Path(str(resources.files("heedful"))) / "zoo"
    found = sorted(zoo.iterdir()) if zoo.is_dir() else []
    return {path.name: path for path in found if (path / "config.json").is_file()}


def resolve_model(name: str | Path) -> Path:
    """The folder or GGUF file of a model's name; a model of the hub is downloaded."""
    text = str(name)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not the name of a model, a folder or a file")
    if isinstance(name, str) and text in shipped_models():
        return shipped_models()[text]
    path = Path(os.path.expanduser(text))
    if path.exists():
        return run_checkpoint(path) if is_run(path) else path
    if text in pulled_models():
        return pulled_models()[text]
    if hub.is_id(text) and not text.endswith((".gguf", ".safetensors", *PICKLES)):
        return hub.download(text)
    raise ValueError(_unknown(text))


def is_local(name: str) -> bool:
    """Whether a name resolves without a download: a shipped or pulled model, a folder, a run, a GGUF file, or a
    cached hub id."""
    if not name or "\0" in name:
        return False
    try:
        path = Path(os.path.expanduser(name))
        if name in shipped_models() or is_run(path) or (path / "config.json").is_file():
            return True
        if name in pulled_models():
            return True
        return (path.suffix == ".gguf" and path.is_file()) or (hub.is_id(name) and hub.is_cached(name))
    except (OSError, RuntimeError):  # longer than file names can be; ~ of an unknown user
        return False


def run_checkpoint(run: Path) -> Path:
    """The best checkpoint of a run, the newest if none is marked; ValueError if it has none."""
    found = best_checkpoint(run)
    damaged = checkpoints(run / CHECKPOINTS)
    if found is None and damaged:
        problems = [f"{path.name} ({integrity_error(path, skip=TRAINING)})" for path in damaged]
        raise ValueError(
            f"every checkpoint of {run} is damaged: {'; '.join(problems)}. Copy one back from a backup, or train again "
            f"into another folder; `heedful train --resume {run} --restart` begins this run again"
        )
    if found is None:
        raise ValueError(
            f"{run} is a run without a complete checkpoint: wait for its first, or `heedful train --resume {run}`"
        )
    return found


def model_name(given: str | Path, path: Path) -> str:
    """The hub id of a downloaded model, else the name of its folder (a run's, not its checkpoint's)."""
    if "snapshots" in path.parts:
        return str(given)
    return (Path(os.path.expanduser(given)) if is_run(Path(os.path.expanduser(given))) else path).resolve().name


def _unknown(text: str) -> str:
    if text in catalog():
        return how_to_pull(text)
    if text in sizes():
        return (
            f"{text!r} is a published size, and its weights are not here: heedful.create({text!r}) makes a fresh one; "
            'for trained weights give a folder, a GGUF file or the hub\'s id ("org/name")'
        )
    if text.endswith(PICKLES):
        return f"there is no file {text}"
    near = difflib.get_close_matches(text, [*shipped_models(), *pulled_models(), *catalog(), *sizes()], n=3)
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"no model, folder or file is called {text!r}{hint} (`heedful models` lists the models)"


def reject_pickle(path: Path) -> None:
    """ValueError, with how to convert it, for a pickled checkpoint."""
    if path.suffix in PICKLES:
        raise ValueError(f"{path} is a pickled checkpoint. {HOW_TO_CONVERT.format(path)}")


def resolve_model_in(root: Path, name: str) -> Path:
    """The folder `name` in a folder of models, for untrusted names (over HTTP): LookupError for anything else than the
    plain name of an entry in it."""
    if _PLAIN.fullmatch(name) is None or ".." in name:
        raise LookupError(f"no model is called {name[:200]!r}")
    path = root / name
    if not path.exists() or path.resolve().parent != root.resolve():
        raise LookupError(f"no model is called {name!r}")
    return path
