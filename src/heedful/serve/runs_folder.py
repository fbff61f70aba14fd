"""The folder of training runs: which there are, and the best checkpoint of each."""

from __future__ import annotations

from pathlib import Path

from heedful.train.run import RECIPE
from heedful.weights.manifest import CHECKPOINTS, best_checkpoint
from heedful.weights.resolve import resolve_model_in

MAX_SERVED_RUNS = 20


def find_run(root: Path, name: str) -> Path | None:
    """The folder of a run by its name; None if it is not a run or not directly in `root`."""
    try:
        folder = resolve_model_in(root, name)
    except (LookupError, OSError):
        return None
    return folder if inner_file(folder, RECIPE) is not None else None


def newest_runs(root: Path, most: int = MAX_SERVED_RUNS) -> dict[str, tuple[Path, Path]]:
    """The folder and the best checkpoint of the runs that have one, the newest first, by the names that they are
    served by: runs/shakespeare-1."""
    if not root.is_dir():
        return {}
    runs = [(folder, folder / CHECKPOINTS) for path in root.iterdir() if (folder := find_run(root, path.name))]
    dated = sorted(
        ((place.stat().st_mtime, folder) for folder, place in runs if place.is_dir() and not place.is_symlink()),
        reverse=True,
    )
    best = ((folder, best_checkpoint(folder)) for _, folder in dated[:most])
    return {f"{root.name}/{folder.name}": (folder, path) for folder, path in best if path is not None}


def inner_file(folder: Path, name: str) -> Path | None:
    """A file directly in a folder; None for a link that leads out of it."""
    path = folder / name
    try:
        inside = path.is_file() and path.resolve().parent == folder.resolve()
    except OSError:
        return None
    return path if inside else None
