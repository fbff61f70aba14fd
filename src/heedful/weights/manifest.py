"""The integrity of checkpoints: manifest.json has the size and the hash of every other file in its folder.

A run keeps its checkpoints in `checkpoints/step-0000200`. A killed save leaves nothing by such a name
(train/checkpoint.py renames only what is on the disk), so what is found wrong here was damaged later: a flipped byte,
a lost file.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from heedful.text.parse import parse_json

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
TRAINING = ("training.safetensors", "training.json")  # what only a trainer reads
LARGEST_MANIFEST = 16 * 2**20
MOST_THREADS = 8

_STEP = re.compile(r"step-(\d{7,})")


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write manifest.json with the size and hash of every file in the folder, and `facts` (numbers and texts)."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(max(1, min(MOST_THREADS, len(paths)))) as threads:
        hashes = list(threads.map(_hash, paths))
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    (folder / MANIFEST).write_bytes(_with_hash({**facts, "files": files}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's contents; ValueError if manifest.json itself is missing or damaged."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            raw = file.read(LARGEST_MANIFEST)
        found = parse_json(raw)
        found.pop("hash")
        files = found["files"].items()
        good = raw == _with_hash(found) and all(_is_inside(n) and e.keys() == {"size", "blake2b"} for n, e in files)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is not there") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"{MANIFEST} is not as it was written")
    return found


def integrity_error(folder: Path, *, skip: Collection[str] = (), sizes_only: bool = False) -> str | None:
    """What is wrong with a checkpoint's files, None if all hashes agree; it takes as long as reading them."""
    try:
        files = {n: e for n, e in read_manifest(folder)["files"].items() if n not in skip}
    except ValueError as error:
        return str(error)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is not there"
        if (size := path.stat().st_size) != entry["size"]:
            return f"{name} has {size} bytes, and {entry['size']} were written"
    if sizes_only:
        return None
    with ThreadPoolExecutor(max(1, min(MOST_THREADS, len(files)))) as threads:
        for name, problem in zip(files, threads.map(_compare, *_pairs(folder, files)), strict=True):
            if problem:
                return f"{name} {problem}"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder of them, the newest first; some may be damaged."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint: 200 -> "step-0000200"."""
    return f"step-{step:07}"


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its folder's name."""
    found = _STEP.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is no checkpoint: their names are like {step_name(200)}")
    return int(found[1])


def is_run(folder: Path) -> bool:
    """Whether a folder is a training run (train/run.py), not a model."""
    return (folder / "recipe.toml").is_file() and not (folder / "config.json").exists()


class DamagedCheckpointWarning(UserWarning):
    """A run's best checkpoint is damaged, and another one stands in for it."""


warnings.filterwarnings("always", category=DamagedCheckpointWarning, append=True)  # not only the first time


def best_checkpoint(folder: Path) -> Path | None:
    """The best checkpoint of a run, or the newest if none is marked as the best; None if there is none whose model
    files are intact. A DamagedCheckpointWarning tells if one is used in place of a damaged or lost one."""
    found = checkpoints(folder / CHECKPOINTS)
    best, wrong = None, list[str]()
    for path in found:  # the newest manifest that can be read says which step is the best
        try:
            best = read_manifest(path).get("best")
            break
        except ValueError as error:
            wrong.append(f"{path.name} is damaged ({error}) and may have been the best")
    if best is not None and step_name(best) not in {path.name for path in found}:
        wrong.append(f"{step_name(best)}, the best, is not there")
    found.sort(key=lambda p: step_of(p) != best)  # stable: the others stay in their order
    for path in found:
        problem = integrity_error(path, skip=TRAINING)
        if problem is None:
            if wrong:
                told = f"{folder}: {'; '.join(wrong)}; using {path.name} instead"
                warnings.warn(told, DamagedCheckpointWarning, stacklevel=2)
            return path
        if not any(line.startswith(path.name) for line in wrong):
            wrong.append(f"{path.name}{', the best,' * (step_of(path) == best)} is damaged ({problem})")
    return None


def _pairs(folder: Path, files: dict[str, Any]) -> tuple[Iterable[Path], Iterable[str]]:
    return [folder / name for name in files], [entry["blake2b"] for entry in files.values()]


def _compare(path: Path, wanted: str) -> str | None:
    try:
        return None if _hash(path) == wanted else "is not as it was written (its hash is another)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _with_hash(record: dict[str, Any]) -> bytes:
    """The manifest as JSON with its own hash, so that a flipped byte in it is found too."""
    text = json.dumps(record, sort_keys=True)
    own_hash = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return (json.dumps({**record, "hash": own_hash}, indent=2, sort_keys=True) + "\n").encode()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and "\\" not in name
