"""How far a student is in each lesson, kept in a file of the user's folder."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heedful.paths import user_folder


@dataclass
class Progress:
    """Of one lesson: the part to go on with, the exercises that were solved, and whether the end was reached."""

    part: int = 0
    solved: list[str] = field(default_factory=list)
    finished: bool = False


def progress_file() -> Path:
    """The file with the progress in all lessons."""
    return user_folder() / "lessons.json"


def read_progress() -> dict[str, Progress]:
    """The progress in each lesson that was begun; nothing of a file that is damaged."""
    try:
        found = json.loads(progress_file().read_text(encoding="utf-8"))
        return {str(name): _checked(entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _checked(entry: dict[str, Any]) -> Progress:
    part, solved, finished = entry["part"], entry["solved"], entry["finished"]
    if type(part) is not int or part < 0 or not all(isinstance(name, str) for name in solved):
        raise ValueError("this is no progress")
    return Progress(part, list(solved), bool(finished))


def write_progress(name: str, progress: Progress) -> None:
    """Keep the progress in a lesson; a folder that cannot be written is no reason to stop one."""
    everything = read_progress() | {name: progress}
    file = progress_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".lessons-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({name: asdict(one) for name, one in everything.items()}, out, indent=1)
        os.replace(temporary, file)
