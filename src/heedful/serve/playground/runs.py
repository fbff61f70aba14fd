"""GET /api/runs and /api/runs/{name}: training runs in a folder of this machine, from their files (train/runlog.py).

A log is read incrementally: `after` is a byte offset, `next` in the response is the next one. A resumed run has cut its
log: with an offset beyond its end the log is read from the beginning, and `restarted` is true.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.serve.errors import ApiError
from heedful.serve.playground.training import TrainingState, training_state
from heedful.serve.playground.wire import PlaygroundModel, encode_response
from heedful.serve.runs_folder import find_run, inner_file
from heedful.text.parse import parse_json, parse_toml
from heedful.train.run import LOCK, RECIPE, SUMMARY
from heedful.train.runlog import BASELINES, LOG, SAMPLES
from heedful.weights.manifest import CHECKPOINTS, checkpoints

router = APIRouter()
MAX_RUNS = 200
MAX_LOG_BYTES = 2**20  # of a log in one response
TAIL_BYTES = 2**16  # of a log's end, in which its last numbers are
MAX_FILE_BYTES = 2**20  # of other files
MAX_SAMPLES, MAX_SAMPLE_CHARACTERS = 50, 4000

Offset = Annotated[int, Query(ge=0, le=2**53)]
Step = Annotated[int, Query(ge=-1, le=2**53)]


class RunSummary(PlaygroundModel):
    """A run, how far it is, and its last losses."""

    name: str
    state: str
    step: int | None
    steps: int | None = Field(description="Of the whole run")
    loss: float | None
    validation: float | None
    updated: float = Field(description="Seconds since 1970")
    model: str | None = Field(description="The name that its best checkpoint is served by; null: it has none yet")


class RunsResponse(PlaygroundModel):
    """All runs of a folder."""

    folder: str
    runs: list[RunSummary]
    training: TrainingState


class RunSample(PlaygroundModel):
    """A text that the model generated after a step."""

    step: int
    text: str


class RunResponse(RunSummary):
    """A run with the part of its log that begins at an offset."""

    lines: list[dict[str, Any]]
    next: int = Field(description="The offset after these lines")
    more: bool = Field(description="Whether the log goes on there already")
    restarted: bool = Field(description="Whether the log was cut: these lines are from its beginning")
    baselines: dict[str, Any]
    samples: list[RunSample]
    recipe: str


@router.get("/api/runs", response_model=RunsResponse)
async def get_runs(http: HttpRequest) -> Response:
    """All runs of the server's folder, the last updated first."""
    root = Path(http.app.state.options.runs)
    runs, training = await asyncio.to_thread(list_runs, root), training_state(http)
    return await encode_response(http, {"folder": str(root), "runs": runs, "training": training})


@router.get("/api/runs/{name}", response_model=RunResponse)
async def get_run(http: HttpRequest, name: str, after: Offset = 0, samples_after: Step = -1) -> Response:
    """One run: its summary, its log after an offset, its samples after a step, and its recipe."""
    root = Path(http.app.state.options.runs)
    return await encode_response(http, await asyncio.to_thread(read_run, root, name, after, samples_after))


def list_runs(root: Path) -> list[dict[str, Any]]:
    """RunSummary of all runs, the last updated first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if find_run(root, path.name) is not None]
    found = [summarize_run(folder) for folder in folders[: 10 * MAX_RUNS]]
    return sorted(found, key=lambda run: -run["updated"])[:MAX_RUNS]


def read_run(root: Path, name: str, after: int, samples_after: int) -> dict[str, Any]:
    """A RunResponse."""
    folder = find_run(root, name) if root.is_dir() else None
    if folder is None:
        raise ApiError(404, f"no run is called {name[:200]!r} here", param="name", code="run_not_found")
    path = inner_file(folder, LOG)
    size = 0 if path is None else path.stat().st_size
    restarted = after > size
    lines, end = ([], 0) if path is None else read_lines(path, 0 if restarted else after)
    return {
        **summarize_run(folder),
        "lines": lines,
        "next": end,
        "more": size - (0 if restarted else after) > MAX_LOG_BYTES,
        "restarted": restarted,
        "baselines": _json(folder, BASELINES),
        "samples": read_samples(folder, samples_after),
        "recipe": _text(folder, RECIPE),
    }


def read_lines(path: Path, begin: int, most: int = MAX_LOG_BYTES) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a log from an offset on, and the offset after them."""
    with path.open("rb") as file:
        file.seek(begin)
        raw = file.read(most)
    end = raw.rfind(b"\n") + 1 or (len(raw) if len(raw) == most else 0)  # no line of ours is so long
    return [entry for line in raw[:end].splitlines() if (entry := _parse_line(line)) is not None], begin + end


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = parse_json(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def summarize_run(folder: Path) -> dict[str, Any]:
    """A RunSummary."""
    log, ended = inner_file(folder, LOG), _json(folder, SUMMARY)
    last: dict[str, dict[str, Any]] = {}
    updated = folder.stat().st_mtime
    if log is not None:
        updated = log.stat().st_mtime
        begin = max(0, log.stat().st_size - TAIL_BYTES)
        last = {str(entry.get("kind")): entry for entry in read_lines(log, begin, TAIL_BYTES)[0]}
    step, validation = last.get("step", {}), last.get("validation", {})
    return {
        "name": folder.name,
        "state": run_state(folder, ended),
        "step": _number(step.get("step", ended.get("step", 0)), int),
        "steps": _steps(folder),
        "loss": _number(step.get("loss", ended.get("training_loss"))),
        "validation": _number(validation.get("loss", ended.get("validation_loss"))),
        "updated": updated,
        "model": f"{folder.parent.name}/{folder.name}" if checkpoints(folder / CHECKPOINTS) else None,
    }


def _number(value: Any, *kinds: type) -> Any:
    """A number of a log; None for anything else, which a damaged file may have in its place."""
    return value if type(value) in (kinds or (int, float)) else None


def run_state(folder: Path, ended: dict[str, Any]) -> str:
    """ "running", or why it ended. A summary older than the lock is from before the run was resumed."""
    lock, summary = inner_file(folder, LOCK), inner_file(folder, SUMMARY)
    if lock is not None and (summary is None or summary.stat().st_mtime < lock.stat().st_mtime):
        return "running" if _is_alive(lock) else "stopped"
    return str(ended.get("reason", "finished" if ended else "stopped"))


def _is_alive(lock: Path) -> bool:
    """Whether the process named in the lock exists. Trying to take the lock could disturb a run that starts."""
    try:
        with lock.open("rb") as file:
            number = int(file.read(20))
        if number < 1 or os.name != "posix":  # on Windows, where runs have no lock, signal 0 is Ctrl-C
            return False
        os.kill(number, 0)
    except PermissionError:
        return True  # somebody else's
    except (ValueError, OverflowError, OSError):
        return False
    return True


def _steps(folder: Path) -> int | None:
    """The steps of the whole run, from its recipe."""
    try:
        steps = parse_toml(_text(folder, RECIPE)).get("train", {}).get("steps")
    except (ValueError, AttributeError):
        return None
    return steps if type(steps) is int else None


def read_samples(folder: Path, after: int) -> list[dict[str, Any]]:
    """The last RunSamples after a step."""
    found = []
    place = folder / SAMPLES
    if place.is_symlink() or not place.is_dir():
        return []
    for path in place.glob("step-*.txt"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and len(number) < 16 and int(number) > after and inner_file(place, path.name):
            found.append((int(number), path.name))
    chosen = sorted(found)[-MAX_SAMPLES:]
    return [{"step": step, "text": _text(place, name)[:MAX_SAMPLE_CHARACTERS]} for step, name in chosen]


# --- files ------------------------------------------------------------------------------------------------------------


def _text(folder: Path, name: str) -> str:
    path = inner_file(folder, name)
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = parse_json(_text(folder, name) or "{}", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
