"""What the cells of a lesson showed, kept in the user's cache: the second reader has it at once.

A file belongs to the text of a lesson and a version of heedful; a newer one takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from heedful import __version__
from heedful.lessons.lesson import Lesson
from heedful.paths import cache_folder

MAX_BYTES = 2**26  # of a file


def results_file(lesson: Lesson) -> Path:
    """Where the results of a lesson are kept."""
    text = json.dumps([__version__, *[[cell.text, *cell.tags] for cell in lesson.cells]])
    return cache_folder() / "lessons" / f"{lesson.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"


def kept_results(lesson: Lesson) -> list[dict[str, Any]] | None:
    """The events that `keep_results` was given; None where there are none, or the file is damaged."""
    try:
        file = results_file(lesson)
        if file.stat().st_size > MAX_BYTES:
            return None
        *events, end = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    complete = isinstance(end, dict) and end == {"n": len(events)}
    return events if complete and all(map(_is_event, events)) else None


def _is_event(event: Any) -> bool:
    kinds = {"cell": int, "text": str, "figures": list, "error": str}
    return isinstance(event, dict) and {name: type(value) for name, value in event.items()} == kinds


def keep_results(lesson: Lesson, events: list[dict[str, Any]]) -> None:
    """Keep what the cells showed, in place of what older ones did; nothing where the cache cannot be written."""
    file = results_file(lesson)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.writelines(json.dumps(event) + "\n" for event in [*events, {"n": len(events)}])
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
        for old in file.parent.glob(f"{lesson.name}.*.jsonl"):
            if old != file:
                old.unlink()
