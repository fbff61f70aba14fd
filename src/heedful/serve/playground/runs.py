"""GET /api/runs and /api/runs/{name}: the trainings in a folder of this machine, as their files tell (train/runlog.py).

A run's log is read from where the last answer ended: `after` is a place in the file, which the answer names. A run that
was resumed has cut its log; a place beyond its end means from the beginning, and `restarted` says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.serve.errors import ApiError
from heedful.serve.playground.shapes import reply
from heedful.train.run import LOCK, RECIPE
from heedful.train.runlog import BASELINES, LOG, SAMPLES, SUMMARY
from heedful.weights.resolve import resolve_in

router = APIRouter()
MOST_RUNS = 200
BLOCK = 2**20  # bytes of a log in one answer
TAIL = 2**16  # bytes of a log's end in which its last numbers are
LARGEST = 2**20  # bytes of the other files
MOST_SAMPLES, LONGEST_SAMPLE = 50, 4000  # characters

Place = Annotated[int, Query(ge=0, le=2**53)]
Step = Annotated[int, Query(ge=-1, le=2**53)]


@router.get("/api/runs")
async def list_runs(http: HttpRequest) -> Response:
    root = Path(http.app.state.options.runs)
    return await reply(http, {"folder": str(root), "runs": await asyncio.to_thread(runs_in, root)})


@router.get("/api/runs/{name}")
async def one_run(http: HttpRequest, name: str, after: Place = 0, samples_after: Step = -1) -> Response:
    root = Path(http.app.state.options.runs)
    return await reply(http, await asyncio.to_thread(run_of, root, name, after, samples_after))


def runs_in(root: Path) -> list[dict[str, Any]]:
    """All runs, the one that said something last first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if readable(root, path.name) is not None]
    found = [summary_of(folder) for folder in folders[: 10 * MOST_RUNS]]
    return sorted(found, key=lambda run: -run["updated"])[:MOST_RUNS]


def readable(root: Path, name: str) -> Path | None:
    """The folder of a run by its name; None unless it is a run and lies there."""
    try:
        folder = resolve_in(root, name)
    except (LookupError, OSError):
        return None
    return folder if _file(folder, RECIPE) is not None else None


def run_of(root: Path, name: str, after: int, samples_after: int) -> dict[str, Any]:
    folder = readable(root, name) if root.is_dir() else None
    if folder is None:
        raise ApiError(404, f"no run is called {name[:200]!r} here", param="name", code="run_not_found")
    path = _file(folder, LOG)
    size = 0 if path is None else path.stat().st_size
    restarted = after > size
    lines, following = ([], 0) if path is None else read_lines(path, 0 if restarted else after)
    return {
        **summary_of(folder),
        "lines": lines,
        "next": following,
        "more": size - (0 if restarted else after) > BLOCK,
        "restarted": restarted,
        "baselines": _json(folder, BASELINES),
        "samples": samples_of(folder, samples_after),
        "recipe": _text(folder, RECIPE),
    }


def read_lines(path: Path, begin: int, most: int = BLOCK) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a log from a place on, and the place after them."""
    with path.open("rb") as file:
        file.seek(begin)
        raw = file.read(most)
    end = raw.rfind(b"\n") + 1 or (len(raw) if len(raw) == most else 0)  # no line of ours is so long
    return [said for line in raw[:end].splitlines() if (said := _line(line)) is not None], begin + end


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def summary_of(folder: Path) -> dict[str, Any]:
    """How a run stands."""
    log, ended = _file(folder, LOG), _json(folder, SUMMARY)
    last: dict[str, dict[str, Any]] = {}
    updated = folder.stat().st_mtime
    if log is not None:
        updated = log.stat().st_mtime
        begin = max(0, log.stat().st_size - TAIL)
        last = {str(said.get("kind")): said for said in read_lines(log, begin, TAIL)[0]}
    step, validation = last.get("step", {}), last.get("validation", {})
    return {
        "name": folder.name,
        "state": state_of(folder, ended),
        "step": step.get("step", ended.get("step", 0)),
        "steps": _steps(folder),
        "loss": step.get("loss", ended.get("training_loss")),
        "validation": validation.get("loss", ended.get("validation_loss")),
        "updated": updated,
    }


def state_of(folder: Path, ended: dict[str, Any]) -> str:
    """Whether it is running, or why it ended; a summary older than the lock is of an earlier part of the run."""
    lock, summary = _file(folder, LOCK), _file(folder, SUMMARY)
    if lock is not None and (summary is None or summary.stat().st_mtime < lock.stat().st_mtime):
        return "running" if _lives(lock) else "stopped"
    return str(ended.get("reason", "finished" if ended else "stopped"))


def _lives(lock: Path) -> bool:
    """Whether the process is there that the lock names. Asking for the lock itself could disturb one that begins."""
    try:
        with lock.open("rb") as file:
            number = int(file.read(20))
        if number < 1:
            return False
        os.kill(number, 0)
    except PermissionError:
        return True  # somebody else's
    except (ValueError, OverflowError, OSError):
        return False
    return True


def _steps(folder: Path) -> int | None:
    """How many there are to be."""
    try:
        steps = tomllib.loads(_text(folder, RECIPE)).get("train", {}).get("steps")
    except (ValueError, AttributeError):
        return None
    return steps if type(steps) is int else None


def samples_of(folder: Path, after: int) -> list[dict[str, Any]]:
    """What the model wrote after a step, the last ones."""
    found = []
    place = folder / SAMPLES
    if place.is_symlink() or not place.is_dir():
        return []
    for path in place.glob("step-*.txt"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and len(number) < 16 and int(number) > after and _file(place, path.name):
            found.append((int(number), path.name))
    chosen = sorted(found)[-MOST_SAMPLES:]
    return [{"step": step, "text": _text(place, name)[:LONGEST_SAMPLE]} for step, name in chosen]


# --- files ------------------------------------------------------------------------------------------------------------


def _file(folder: Path, name: str) -> Path | None:
    """A file of the folder itself: a link out of it is not read."""
    path = folder / name
    try:
        inside = path.is_file() and path.resolve().parent == folder.resolve()
    except OSError:
        return None
    return path if inside else None


def _text(folder: Path, name: str) -> str:
    path = _file(folder, name)
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(LARGEST).decode("utf-8", "replace")


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(_text(folder, name) or "{}", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
