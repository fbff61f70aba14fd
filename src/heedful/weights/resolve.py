"""What a name means: a model that ships with the package, a folder or file, an id of the hub, in this order.

The folder of a training run stands for its best checkpoint.
"""

from __future__ import annotations

import difflib
import re
from importlib import resources
from pathlib import Path

from heedful.models.registry import sizes
from heedful.weights import hub
from heedful.weights.folder import HOW_TO_CONVERT, PICKLES
from heedful.weights.manifest import best_checkpoint, is_run

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def shipped_models() -> dict[str, Path]:
    """The models that come with the package, by name."""
    zoo = Path(str(resources.files("heedful"))) / "zoo"
    found = sorted(zoo.iterdir()) if zoo.is_dir() else []
    return {path.name: path for path in found if (path / "config.json").is_file()}


def resolve(name: str | Path) -> Path:
    """The folder or GGUF file that `name` stands for; a model of the hub is downloaded."""
    text = str(name)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not the name of a model, a folder or a file")
    if isinstance(name, str) and text in shipped_models():
        return shipped_models()[text]
    path = Path(text).expanduser()
    if path.exists():
        return run_checkpoint(path) if is_run(path) else path
    if hub.is_id(text) and not text.endswith((".gguf", ".safetensors", *PICKLES)):
        return hub.download(text)
    raise ValueError(_unknown(text))


def is_local(name: str) -> bool:
    """Whether a name is that of a model on this machine: one that ships, a folder or file with one, or of the hub and
    in its cache."""
    if not name or "\0" in name:
        return False
    try:
        path = Path(name).expanduser()
        if name in shipped_models() or is_run(path) or (path / "config.json").is_file():
            return True
        return (path.suffix == ".gguf" and path.is_file()) or (hub.is_id(name) and hub.is_cached(name))
    except (OSError, RuntimeError):  # longer than names of files can be; ~ of somebody who is not here
        return False


def run_checkpoint(run: Path) -> Path:
    """The best checkpoint of a run, the newest if none is marked as the best."""
    found = best_checkpoint(run)
    if found is None:
        raise ValueError(
            f"{run} is a run without a complete checkpoint: wait for its first, or `heedful train --resume {run}`"
        )
    return found


def _unknown(text: str) -> str:
    if text in sizes():
        return (
            f"{text!r} is a published size, and its weights are not here: heedful.create({text!r}) makes a fresh one; "
            'for trained weights give a folder, a GGUF file or the hub\'s id ("org/name")'
        )
    if text.endswith(PICKLES):
        return f"there is no file {text}"
    near = difflib.get_close_matches(text, [*shipped_models(), *sizes()], n=3)
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"no model, folder or file is called {text!r}{hint} (`heedful models` lists the models)"


def reject_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise ValueError(f"{path} is a pickled checkpoint. {HOW_TO_CONVERT}")


def resolve_in(root: Path, name: str) -> Path:
    """The model `name` in a folder of models, for names that come from others (over HTTP): LookupError unless it is
    a plain name and its folder lies there."""
    if _PLAIN.fullmatch(name) is None or ".." in name:
        raise LookupError(f"no model is called {name[:200]!r}")
    path = root / name
    if not path.exists() or path.resolve().parent != root.resolve():
        raise LookupError(f"no model is called {name!r}")
    return path
