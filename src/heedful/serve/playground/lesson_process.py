"""Child processes that run the cells of lessons and the answers to exercises, with bounds on time, memory and output.

At most one lesson and one answer run at a time; a few more may wait. A child is killed, with all that it has started,
at the end of its time and when its client disconnects. After an answer a new child is started ahead, since importing
PyTorch takes longer than most checks: the next try has it at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Literal

from heedful.serve.errors import Overloaded

COMMAND = (sys.executable, "-m", "heedful.lessons.child")
MAX_EVENT_BYTES = 2**25
MAX_WAITING = 8  # requests, for one kind of job
START_SECONDS = 120  # for the imports
LESSON_SECONDS, LESSON_MEMORY = 300, 4 * 2**30
ANSWER_SECONDS, ANSWER_MEMORY = 20, 2 * 2**30
SPARE_SECONDS = 600  # that a child is kept which nobody needs
# What a child has of the server's environment: where programs, libraries, models and caches are, and no secrets.
ENVIRONMENT = frozenset(
    {
        *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "MPLCONFIGDIR", "CC"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
        *("HEEDFUL_KERNELS", "HEEDFUL_MODELS", "HEEDFUL_DATA", "HEEDFUL_DATA_CACHE"),
        # Windows
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "TEMP", "TMP", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "COMSPEC"),
        *("PATHEXT", "NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE", "PROGRAMFILES", "PROGRAMDATA"),
    }
)


Kind = Literal["lesson", "answer"]
Events = AsyncIterator[dict[str, Any]]


class ChildFailed(Exception):
    """A child that ended before its job did, or took too long; the message is for the student."""


class LessonProcesses:
    """The children of a server."""

    def __init__(self) -> None:
        self._places: dict[Kind, asyncio.Lock] = {"lesson": asyncio.Lock(), "answer": asyncio.Lock()}
        self._n_waiting: dict[Kind, int] = {"lesson": 0, "answer": 0}
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def check_queue(self, kind: Kind) -> None:
        """Overloaded if too many wait already."""
        if self._n_waiting[kind] >= MAX_WAITING:
            raise Overloaded("too many wait for a lesson's cells to run here: try again later")

    @asynccontextmanager
    async def place(self, kind: Kind) -> AsyncIterator[None]:
        """Wait until no other job of a kind runs."""
        self.check_queue(kind)
        self._n_waiting[kind] += 1
        try:
            await self._places[kind].acquire()
        finally:
            self._n_waiting[kind] -= 1
        try:
            yield
        finally:
            self._places[kind].release()

    def lesson(self, cells: list[dict[str, Any]]) -> AbstractAsyncContextManager[Events]:
        """The events of cells as they end."""
        return self._child({"cells": cells}, LESSON_SECONDS, LESSON_MEMORY)

    async def check_answer(self, exercise: str, source: str, before: str) -> dict[str, Any]:
        """Whether an answer is right, and what is wrong with it."""
        job = {"exercise": exercise, "source": source, "before": before}
        try:
            async with self._child(job, ANSWER_SECONDS, ANSWER_MEMORY) as events:
                async for event in events:
                    if not (isinstance(event.get("right"), bool) and isinstance(event.get("text"), str)):
                        break  # the answer has written this itself
                    return {"right": event["right"], "text": event["text"]}
        finally:
            self._start_spare()
        raise ChildFailed("it ended without a word")

    async def stop(self) -> None:
        """End the child that waits for a job."""
        if self._expiry is not None:
            self._expiry.cancel()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.cancel()
            with suppress(asyncio.CancelledError, ChildFailed, OSError):
                await end_child(await spare)

    def _start_spare(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._spare is None:
            self._spare = asyncio.create_task(start_child())
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(SPARE_SECONDS, lambda: loop.create_task(self.stop()))

    async def _take_child(self) -> asyncio.subprocess.Process:
        spare, self._spare = self._spare, None
        if spare is not None:
            with suppress(ChildFailed, OSError):
                process = await spare
                if process.returncode is None:
                    return process
        return await start_child()

    @asynccontextmanager
    async def _child(self, job: dict[str, Any], seconds: int, memory: int) -> AsyncIterator[Events]:
        """The events of a job, in a child that does not survive this block."""
        process = await self._take_child()
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="heedful-lesson-")
        try:
            limits = {"folder": folder, "seconds": seconds, "memory": memory}
            assert process.stdin is not None
            with suppress(ConnectionError):  # it has ended: reading says so
                process.stdin.write(json.dumps(job | limits).encode("ascii") + b"\n")
                await process.stdin.drain()
            yield read_events(process, seconds)
        finally:
            await end_child(process)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def start_child() -> asyncio.subprocess.Process:
    """A child that has imported what takes long, and waits for its job."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=MAX_EVENT_BYTES,
        start_new_session=True,  # a process group of its own, which `end_child` kills
        env=child_environment(),
    )
    try:
        await next_event(process, asyncio.get_running_loop().time() + START_SECONDS)
    except BaseException:
        await end_child(process)
        raise
    return process


def child_environment() -> dict[str, str]:
    """The environment of a child: one thread, as `heedful learn` has it, and no accelerator, whose driver asks for more
    than an answer may."""
    kept = {name: value for name, value in os.environ.items() if name.upper() in ENVIRONMENT}
    return {"OMP_NUM_THREADS": "1"} | kept | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


async def end_child(process: asyncio.subprocess.Process) -> None:
    """Kill a child and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)  # also where it has ended itself, and left others behind
        else:
            process.kill()
    await asyncio.shield(process.wait())


async def read_events(process: asyncio.subprocess.Process, seconds: float) -> Events:
    """What a child tells, until it ends. ChildFailed if that is not with exit code 0, or not in time."""
    end = asyncio.get_running_loop().time() + seconds
    try:
        while (event := await next_event(process, end)) is not None:
            yield event
    except TimeoutError:
        raise ChildFailed(f"stopped after {seconds} seconds: is there a loop that does not end?") from None


async def next_event(process: asyncio.subprocess.Process, end: float) -> dict[str, Any] | None:
    """The next line of a child, None after its last; ChildFailed where it broke off."""
    assert process.stdout is not None
    async with asyncio.timeout_at(end):
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise ChildFailed(f"stopped: its output is larger than {MAX_EVENT_BYTES // 2**20} MB") from None
        if line.endswith(b"\n"):
            return parse_event(line)
        code = await process.wait()
    if code == 0 and not line:
        return None
    raise ChildFailed(f"the process ended with {_end_in_words(code)}: did it need more memory than it may have?")


def parse_event(line: bytes) -> dict[str, Any]:
    """What a line of a child says; ChildFailed for what it does not write itself."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise ChildFailed("stopped: its output was damaged")
    return event


def _end_in_words(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
