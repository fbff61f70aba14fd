"""A run's folder: settings, data fingerprint, lock and checkpoints of one training.

    recipe.toml                                    every setting, defaults included
    facts.json                                     the data's fingerprint, versions, device
    tokenizer.json ...                             as in every checkpoint, if there is one
    log.jsonl  loss.png  samples/  summary.json    see train/runlog.py
    before-1/                                      checkpoints and logs from before the run was started anew
    checkpoints/step-0000200                       see train/checkpoint.py

One process owns a run while it trains (`lock`); any number may read it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from heedful.models.base import Model
from heedful.text.parse import parse_json, parse_toml
from heedful.text.tokenizer import Tokenizer
from heedful.train import checkpoint
from heedful.train.checkpoint import Checkpoint
from heedful.weights.manifest import CHECKPOINTS, best_checkpoint, checkpoints, read_manifest

try:
    import fcntl
except ImportError:  # Windows: runs are not locked there
    fcntl = None  # type: ignore[assignment]

RECIPE, FACTS, TOKENIZER, LOCK = "recipe.toml", "facts.json", "tokenizer.json", ".lock"
SUMMARY = "summary.json"
LOGS = ("log.jsonl", "loss.png", "samples", SUMMARY)  # train/runlog.py writes them

# Settings that may change when a run is resumed: they say how or where a step is computed, or what is shown, not what
# is learned. More steps are allowed too.
FREE_SETTINGS = re.compile(
    r"about|expected|measured_on|log\..*"
    r"|train\.(device|workers|compile|cuda_graph|accumulate|checkpoint_activations|sharded|keep|save_every)"
    r"|train\.(patience|target)"  # when it ends: going on after it is a resume, as more steps are
)
FREE_FACTS = ("versions", "device", "threads", "processes", "began")


class Run:
    """The folder of one training."""

    def __init__(self, folder: Path, recipe: dict[str, Any], facts: dict[str, Any]) -> None:
        self.folder, self.recipe, self.facts = folder, recipe, facts
        self._locked: IO[str] | None = None

    @classmethod
    def create(cls, folder: Path, recipe_text: str, facts: Mapping[str, Any]) -> Run:
        """Create a run in a new or empty folder. `facts` are plain data that must be the same when it is resumed,
        except FREE_FACTS."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: a run needs a folder")
        if folder.exists() and (found := [p.name for p in folder.iterdir() if p.name != LOCK]):
            if RECIPE not in found:
                listed = ", ".join(sorted(found)[:3])
                raise ValueError(f"{folder} holds something else ({listed}): give another folder")
            if checkpoints(folder / CHECKPOINTS) or not (folder / LOCK).exists():
                raise ValueError(
                    f"{folder} is a run already: go on with `heedful train --resume {folder}`, or give another folder"
                )
            failed = cls(folder, {}, {})  # it ended before its first checkpoint
            failed.lock()
            failed.set_aside(set(found))
            failed.unlock()
        recipe = parse_toml(recipe_text)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / CHECKPOINTS).mkdir()
        except FileExistsError:
            raise ValueError(f"another process has just begun a run in {folder}: give another folder") from None
        write_atomic(folder / FACTS, json.dumps(dict(facts), indent=2) + "\n")
        write_atomic(folder / RECIPE, recipe_text)  # last: a folder with a recipe is a run
        return cls(folder, recipe, _plain(facts))

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing run, to resume it."""
        folder = Path(folder)
        if not (folder / RECIPE).is_file():
            what = "there is no such folder" if not folder.is_dir() else f"it has no {RECIPE}"
            raise ValueError(f"{folder} is no run: {what}{_runs_near(folder)}")
        try:
            recipe = parse_toml((folder / RECIPE).read_text(encoding="utf-8"))
            facts = parse_json((folder / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} cannot be resumed: {RECIPE} or {FACTS} is damaged ({error})") from None
        return cls(folder, recipe, facts)

    @staticmethod
    def next_name(root: Path = Path("runs"), stem: str = "run") -> Path:
        """An unused folder name: runs/shakespeare-1, -2 and so on, above the highest number in use."""
        stem = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "run"
        taken = re.compile(re.escape(stem) + r"-(\d+)")
        there = [p.name for p in Path(root).iterdir()] if Path(root).is_dir() else []
        highest = max((int(m[1]) for name in there if (m := taken.fullmatch(name))), default=0)
        return Path(root) / f"{stem}-{highest + 1}"

    def has_begun(self) -> bool:
        """Whether a step was made: the log has it, or there is a checkpoint."""
        log = self.folder / LOGS[0]
        steps = log.is_file() and '"kind": "step"' in log.read_text(encoding="utf-8", errors="replace")
        return steps or bool(checkpoints(self.checkpoints))

    # --- resuming --------------------------------------------------------------------------------------------------

    def check_same(self, recipe: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """ValueError with every difference from the settings and data the run was created with."""
        was, now = dict(flat(self.recipe)), dict(flat(_plain(recipe)))
        wrong = [
            _difference(key, was, now)
            for key in [*was, *(k for k in now if k not in was)]
            if was.get(key) != now.get(key) and not FREE_SETTINGS.fullmatch(key) and not _grows(key, was, now)
        ]
        old = {k: v for k, v in flat(self.facts) if k.split(".")[0] not in FREE_FACTS}
        new = {k: v for k, v in flat(_plain(facts)) if k.split(".")[0] not in FREE_FACTS}
        wrong += [
            f"{_difference(key, old, new)} (not what it was trained on)"
            for key in [*old, *(k for k in new if k not in old)]
            if old.get(key) != new.get(key)
        ]
        if wrong:
            listed = "".join(f"\n  {line}" for line in wrong)
            raise ValueError(
                f"{self.folder} began with other settings or data, so it cannot be resumed with these:{listed}\n"
                "Resume it with what it began with; or begin a new run from its weights with "
                f"`--init-from {self.folder}`"
            )

    def rewrite_recipe(self, recipe_text: str) -> None:
        """Record the settings of a resumed run."""
        self.recipe = parse_toml(recipe_text)
        write_atomic(self.folder / RECIPE, recipe_text)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder / CHECKPOINTS

    def save(
        self,
        step: int,
        model: Model,
        tokenizer: Tokenizer | None,
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, Any],
        best: bool,
        *,
        keep: int = 2,
        also: Mapping[str, Any] | None = None,
        write_model: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint, then remove all but the newest `keep` and the best."""
        if tokenizer is not None and not (self.folder / TOKENIZER).exists():
            tokenizer.save(self.folder)
        best_step = step if best else self._best_before(step)
        path = checkpoint.write_checkpoint(
            self.checkpoints,
            step,
            model,
            tokenizer,
            tensors,
            numbers,
            also=also,
            write_model=write_model,
            best_step=best_step,
        )
        checkpoint.prune_checkpoints(self.checkpoints, keep, () if best_step is None else (best_step,), whole=step)
        return path

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest undamaged checkpoint, None of a run that was stopped before its first one; damaged ones are
        reported. ValueError if those it had are lost: going on without them would overwrite the run."""
        try:
            found = checkpoint.newest_checkpoint(self.checkpoints, report)
            if found is None and (self.folder / SUMMARY).exists():
                raise ValueError(f"its checkpoints are gone: there is none in {self.checkpoints}")
        except ValueError as problem:
            raise ValueError(
                f"{self.folder} cannot be resumed, and was left as it is: {problem}\n"
                f"To start it anew at step 1: `heedful train --resume {self.folder} --restart`, which keeps what is "
                "there in a subfolder"
            ) from None
        return found

    def set_aside(self, names: Collection[str] = (*LOGS, CHECKPOINTS)) -> Path | None:
        """Move files, by default the checkpoints and logs so far, into a new subfolder before-1, -2 and so on; None if
        there is nothing to move."""
        there = [path for name in names if (path := self.folder / name).exists() and not name.startswith("before-")]
        if not there:
            return None
        aside = self.next_name(self.folder, "before")
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)
        return aside

    @property
    def best(self) -> Path | None:
        """The checkpoint that `heedful.load` loads for the run: the best, or the newest if none was marked."""
        return best_checkpoint(self.folder)

    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None if it has none, or was stopped before its first checkpoint."""
        return Tokenizer.from_folder(self.folder) if (self.folder / TOKENIZER).is_file() else None

    def _best_before(self, step: int) -> int | None:
        """The best step, as the newest checkpoint up to `step` records it; later ones are of an abandoned history."""
        for path in checkpoints(self.checkpoints):
            try:
                facts = read_manifest(path)
            except ValueError:
                continue
            if facts["step"] <= step:
                best: int | None = facts["best"]
                return best
        return None

    # --- lock ------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the run until `unlock` or the end of this process; ValueError if another process holds the lock."""
        if fcntl is None or self._locked is not None:
            return
        file = (self.folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).strip() or "unknown"
            file.close()
            raise ValueError(
                f"{self.folder} is being trained by another process (its number is {owner}): wait for it, or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._locked = file
        # A forked worker must not hold the lock when its parent is gone.
        os.register_at_fork(after_in_child=file.close)

    def unlock(self) -> None:
        """Release the lock."""
        if self._locked is not None:
            self._locked.close()
            self._locked = None


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically: it has all of the text, or is as it was."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


# --- TOML ------------------------------------------------------------------------------------------------------------


def to_toml(data: Mapping[str, Any]) -> str:
    """Plain data as TOML, which the standard library reads but does not write. None is left out."""
    lines: list[str] = []
    _table(lines, (), data)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(lines: list[str], path: tuple[str, ...], data: Mapping[str, Any]) -> None:
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping)}
    values = {k: v for k, v in data.items() if v is not None and k not in tables}
    if path and (values or not tables):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(k)} = {_value(v)}" for k, v in values.items()]
    for key, table in tables.items():
        _table(lines, (*path, key), table)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(str(key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)  # nan, inf and -inf are valid TOML
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's but for what TOML wants escaped too, and half characters, which it cannot have.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"{type(value).__name__} is no plain data: {str(value)[:100]}")


# --- comparing -------------------------------------------------------------------------------------------------------


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data as TOML reads it back: tuples as lists, without None."""
    return parse_toml(to_toml(data))


def flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names with their values, without None."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", value


def _grows(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return key == "train.steps" and now.get(key, 0) >= was.get(key, 0)


def _difference(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (_value(side[key]) if key in side else "(not set)" for side in (was, now))
    return f"{key}: {old} -> {new}"


def _runs_near(folder: Path) -> str:
    """Runs in the folder or beside it, for the error message."""
    for place in (folder, folder.parent):
        there = sorted(place.iterdir()) if place.is_dir() else []
        runs = [str(p) for p in there if (p / RECIPE).is_file()]
        if runs:
            return f"; runs there: {', '.join(runs[:5])}"
    return ""
