"""Warnings about a text that a model reads: Python's own, or collected for the client of a server.

Python's filters show a warning once, and are those of the whole process. A server answers many clients, each of which
is told of its own text every time: a ContextVar belongs to one thread or task.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_collected: ContextVar[list[str] | None] = ContextVar("_collected", default=None)


@contextmanager
def collect_warnings(into: list[str] | None = None) -> Iterator[list[str]]:
    """Within the block, what `warn` says in this thread, task, or threads that it starts by asyncio is appended to the
    list, once each, and not shown."""
    found: list[str] = [] if into is None else into
    before = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(before)


def collected_warnings() -> tuple[str, ...]:
    """What was collected so far."""
    return tuple(_collected.get() or ())


def repeat_warnings(messages: tuple[str, ...]) -> None:
    """Collect messages of a result that was cached; nothing where none are collected."""
    found = _collected.get()
    if found is not None:
        found.extend(message for message in messages if message not in found)


def warn(message: str, category: type[Warning]) -> None:
    """Warn, as of the caller's caller; within `collect_warnings` append the message there."""
    if _collected.get() is None:
        warnings.warn(message, category, stacklevel=3)
    else:
        repeat_warnings((message,))
