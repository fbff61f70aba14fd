"""Atomic checkpoints: a checkpoint is complete or does not exist.

A checkpoint is a model folder in the hub's layout, as weights/save.py writes it, with what resuming needs:

    config.json  model.safetensors  tokenizer.json ...     the model
    training.safetensors                                   optimizer state, averaged weights
    training.json                                          step, best validation loss and so on
    manifest.json                                          size and hash of every file

It is written under a hidden name, synced to disk and renamed. A process killed at any moment leaves the older
checkpoints intact, and at most a hidden folder that the next save removes:

    .step-0000200.partial    being written          .step-0000200.gone    being removed
    .step-0000200.old        being replaced by a new one of its step; comes back if that one did not get its name
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Model
from heedful.text.parse import parse_json
from heedful.text.tokenizer import Tokenizer
from heedful.train.distributed import shard_like
from heedful.weights.folder import load_folder
from heedful.weights.manifest import (
    checkpoints,
    integrity_error,
    read_manifest,
    step_name,
    step_of,
    write_manifest,
)
from heedful.weights.safetensors_file import SafetensorsFiles
from heedful.weights.save import write_folder, write_safetensors

NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_HIDDEN = re.compile(r"\.(step-\d{7,})\.(partial|gone|old)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose hashes have been checked."""

    path: Path
    step: int
    numbers: dict[str, Any]
    best_step: int | None  # which step was the best so far, when this one was saved

    def tensors(self) -> dict[str, Tensor]:
        """The tensors given to `write_checkpoint`, on the CPU, copied out of the mapped file: there they lack torch's
        alignment, and kernels may then sum in another order, so that resuming would not be bit-exact."""
        with SafetensorsFiles([self.path / "training.safetensors"]) as files:
            return {name: files.get(name).clone() for name in files.names()}

    def restore(self, model: Model) -> None:
        """Copy the saved weights into a model, on any device, bit for bit."""
        saved = dict(load_folder(self.path).named_parameters())
        parameters = dict(model.named_parameters())
        if saved.keys() != parameters.keys():
            names = sorted(saved.keys() ^ parameters.keys())
            raise ValueError(f"{self.path} holds another model: they differ in {', '.join(names[:10])}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if saved[name].shape != parameter.shape:
                    raise ValueError(
                        f"{self.path} holds another model: {name} is {list(saved[name].shape)} there and "
                        f"{list(parameter.shape)} here"
                    )
                parameter.copy_(shard_like(saved[name], parameter))


def write_checkpoint(
    folder: Path,
    step: int,
    model: Model,
    tokenizer: Tokenizer | None,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    *,
    also: Mapping[str, Any] | None = None,
    write_model: Callable[[Path], None] | None = None,
    best_step: int | None = None,
) -> Path:
    """Save a checkpoint in `folder`; one of the same step is replaced.

    `numbers` is JSON data. `also` are more JSON files, by their paths in the checkpoint. `write_model` replaces saving
    the whole model: it writes an adapter, for example, into the folder it is given.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _sync_folder(folder.parent)
    remove_leftovers(folder)
    place = folder / step_name(step)
    aside = _hidden(place, "partial")
    try:
        aside.mkdir()
        if write_model is None:
            write_folder(aside, model, tokenizer)
        else:
            write_model(aside)
        write_safetensors(_separate(tensors), aside / "training.safetensors")
        for name, content in {"training.json": dict(numbers), **(also or {})}.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_manifest(aside, step=step, best=best_step)
        _to_disk(aside)
        _put_in_place(aside, place)
    except BaseException as error:
        needed = _size_on_disk(model, tensors, write_model is None)
        shutil.rmtree(aside, ignore_errors=True)
        _put_back(folder)
        _say_if_full(error, place, needed)
        raise
    return place


def newest_checkpoint(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest undamaged checkpoint, None if there is none at all; damaged ones are skipped and reported, and if no
    other is left a ValueError. May move back what a killed save had moved, so only the process that owns the run may
    call it."""
    if not folder.is_dir():
        return None
    _put_back(folder)
    damaged: list[tuple[Path, str]] = []
    found = None
    for path in checkpoints(folder):
        problem = integrity_error(path)
        if problem is None:
            found = _open(path)
            break
        damaged.append((path, problem))
    if damaged and found is None:
        listed = "".join(f"\n  {path.name}: {problem}" for path, problem in damaged)
        raise ValueError(f"every checkpoint in {folder} is damaged:{listed}")
    for path, problem in damaged:
        assert found is not None
        report(f"{path.name} is damaged: {problem}; using {found.path.name}")
    return found


def prune_checkpoints(folder: Path, keep: int, protect: Iterable[int] = (), *, whole: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps in `protect`; the newest undamaged one always
    stays. `whole` is the step just written, whose hashes need no check."""
    remove_leftovers(folder)
    protected = set(protect)
    kept, safe = 0, False
    for path in checkpoints(folder):
        step = step_of(path)
        if integrity_error(path, sizes_only=True) is not None:
            if safe and step not in protected:
                _remove(path)
            continue
        if kept < keep or not safe:
            kept += 1
            safe = safe or step == whole or integrity_error(path) is None
        elif step not in protected:
            _remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove hidden folders that killed saves left behind."""
    _put_back(folder)
    for path in folder.iterdir():
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path)


# --- files -----------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Checkpoint:
    numbers = parse_json((path / "training.json").read_text(encoding="utf-8"))
    facts = read_manifest(path)
    return Checkpoint(path, facts["step"], numbers, facts["best"])


def _hidden(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{what}")


def _put_back(folder: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    for path in folder.iterdir():
        name = _HIDDEN.fullmatch(path.name)
        if name and name[2] == "old" and not (folder / name[1]).exists():
            path.rename(folder / name[1])


def _put_in_place(aside: Path, place: Path) -> None:
    old = _hidden(place, "old")
    if place.exists():
        place.rename(old)
    aside.rename(place)
    _sync_folder(place.parent)
    if old.exists():
        shutil.rmtree(old)


def _remove(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that no incomplete one has a checkpoint's name."""
    gone = _hidden(path, "gone")
    path.rename(gone)
    shutil.rmtree(gone)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors without shared memory, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.detach().to("cpu").contiguous()
        memory = whole.untyped_storage()
        if memory.nbytes() != whole.nbytes or (whole.nbytes and memory.data_ptr() in seen):
            whole = whole.clone()
        seen.add(whole.untyped_storage().data_ptr())
        found[name] = whole
    return found


def _to_disk(folder: Path) -> None:
    """fsync all files, so that the rename does not reach the disk before the contents."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    for path in reversed(paths):
        if path.is_dir():
            _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _size_on_disk(model: Model, tensors: Mapping[str, Tensor], with_model: bool) -> int:
    parts = [*tensors.values(), *(model.parameters() if with_model else ())]
    return sum(t.nbytes for t in parts)


def _say_if_full(error: BaseException, place: Path, needed: int) -> None:
    """Raise an OSError that says what to do, if the error means that the disk or quota is full."""
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number in NO_ROOM:
        free = shutil.disk_usage(place.parent).free
        raise OSError(
            number,
            f"{place} could not be written, {os.strerror(number).lower()}: it needs about {needed / 1e6:,.1f} MB, and "
            f"{free / 1e6:,.1f} MB are free. The checkpoints before it are as they were. Make room, then go on with "
            "--resume",
        ) from error
