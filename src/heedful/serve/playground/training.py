"""POST /api/train and /api/train/stop: a training on a text that the reader gives, by the recipe `minute`.

It is `heedful train` in a process of its own, one at a time, for the page that has the server's token, on this machine
(with --allow-training, on others too). All that it writes is in the runs folder: the run, and the text in .texts and a
cache, which are removed at its end. It stops when the server does, however that ends: its standard input is a pipe from
here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.serve.errors import ApiError
from heedful.serve.field_types import Text
from heedful.serve.options import Options
from heedful.serve.playground import access
from heedful.serve.playground.wire import PlaygroundModel, encode_response
from heedful.serve.request_schema import RequestBody
from heedful.train.run import Run

router = APIRouter()
RECIPE = "minute"
COMMAND = (sys.executable, "-m", "heedful", "train", RECIPE)
MIN_CHARACTERS, MAX_CHARACTERS = 2_000, 2_000_000
MAX_RUNS = 500  # in the folder, beyond which nothing new is begun from here
MAX_ERROR = 2000  # characters
PATIENCE = 10.0  # seconds to save and stop, before it is killed
TEXTS, CACHE = ".texts", ".cache"


class TrainRequest(RequestBody):
    """A text to learn, or the name of one that heedful makes, and a name for the run."""

    text: Text | None = None
    sample: Literal["text"] | None = None
    name: Annotated[Text, Field(max_length=100)] = "text"


class TrainingState(PlaygroundModel):
    """Whether a training can be started from the page, and the one that was."""

    allowed: bool
    reason: str = Field(description="Why not; empty if it is allowed")
    running: str | None = Field(description="The name of the run that is being trained from here")
    error: str = Field(description="Why the last one failed; empty if it did not")
    recipe: str
    min_characters: int
    max_characters: int


class TrainingProcess:
    """The one training that was started from the page."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.name: str | None = None  # while it runs
        self.error = ""
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, body: TrainRequest) -> str:
        """Start a training; the name of its run. ApiError if one is running already, or for a text that is too short
        or too long."""
        if self.name is not None:
            raise ApiError(409, f"{self.name} is being trained: wait for it, or stop it", code="training")
        if (body.text is None) == (body.sample is None):
            raise ApiError(400, "give either a text or the name of a sample", param="text")
        if body.text is not None:
            check_length(body.text)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", body.name).strip("-._")[:60] or "text"
        self.name = stem  # nobody else begins meanwhile
        try:
            folder = await asyncio.to_thread(self._prepare, stem, body.text)
            self.name, self.error = folder.name, ""
            await self._run(folder, f"sample:{body.sample}" if body.text is None else str(self._text_file(folder)))
        except OSError as problem:
            self.name = None
            raise ApiError(500, f"the training cannot begin: {problem.strerror or problem}") from None
        except BaseException:
            self.name = None
            raise
        return folder.name

    def _text_file(self, folder: Path) -> Path:
        return Path(self.options.runs) / TEXTS / f"{folder.name}.txt"

    def _prepare(self, stem: str, text: str | None) -> Path:
        """Choose the run's folder, which the training creates, and write the text."""
        root = Path(self.options.runs)
        if root.is_dir() and sum(1 for _ in root.iterdir()) > MAX_RUNS:
            raise ApiError(400, f"there are more than {MAX_RUNS} runs in {root}: delete some first")
        folder = Run.next_name(root, stem)
        file = self._text_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            file.write_text(text, encoding="utf-8")
        return folder

    async def _run(self, folder: Path, source: str) -> None:
        settings = "--set", f"data.source={json.dumps(source)}", "--out", str(folder), "--quiet", "--stop-on-eof"
        cache = Path(self.options.runs) / CACHE
        self._process = process = await asyncio.create_subprocess_exec(
            *COMMAND, *settings,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HEEDFUL_DATA_CACHE": str(cache), "NO_COLOR": "1"},
        )  # fmt: skip
        self._watch = asyncio.create_task(self._wait(process, cache, self._text_file(folder)))

    async def _wait(self, process: asyncio.subprocess.Process, cache: Path, text: Path) -> None:
        """Wait for its end, and keep what it said if it failed."""
        assert process.stderr is not None
        said = b""
        while part := await process.stderr.read(4096):
            said = (said + part)[-MAX_ERROR:]
        code = await process.wait()
        lines = said.decode("utf-8", "replace").strip().splitlines()
        if code > 0:
            self.error = (lines[-1] if lines else f"it ended with exit code {code}").removeprefix("heedful: ")
        self._process = self.name = None
        await asyncio.to_thread(shutil.rmtree, cache, ignore_errors=True)
        await asyncio.to_thread(text.unlink, missing_ok=True)

    async def stop(self) -> None:
        """Stop it with a checkpoint after its step, at the latest in PATIENCE seconds; nothing where none runs."""
        process, watch = self._process, self._watch
        if process is None or watch is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # --stop-on-eof: on Windows SIGTERM would end it without a checkpoint
        try:
            await asyncio.wait_for(asyncio.shield(watch), PATIENCE)
        except TimeoutError:
            process.kill()
            await watch


def check_length(text: str) -> None:
    """ApiError for a text that is too short to learn from, or too long for a minute."""
    n = len(text)
    if n < MIN_CHARACTERS:
        raise ApiError(
            400, f"the text has {n:,} characters, and it takes {MIN_CHARACTERS:,} to learn from: add some", param="text"
        )
    if n > MAX_CHARACTERS:
        raise ApiError(
            400, f"the text has {n:,} characters: at most {MAX_CHARACTERS:,} are read here; for more there is "
            "`heedful train FILE`", param="text",
        )  # fmt: skip


def refuse_training(http: HttpRequest) -> ApiError | None:
    """Why this client may not train; None if it may."""
    options: Options = http.app.state.options
    if not options.may_train:
        reason = "other machines can reach this server: start it with --allow-training to train from the page"
        return ApiError(403, reason, code="training_not_allowed")
    return access.refuse(http, others=options.allow_training)


def training_state(http: HttpRequest) -> dict[str, Any]:
    """A TrainingState."""
    training: TrainingProcess = http.app.state.training
    refusal = refuse_training(http)
    return {
        "allowed": refusal is None,
        "reason": "" if refusal is None else refusal.message,
        "running": training.name,
        "error": training.error,
        "recipe": RECIPE,
        "min_characters": MIN_CHARACTERS,
        "max_characters": MAX_CHARACTERS,
    }


@router.post("/api/train", response_model=TrainingState)
async def post_train(http: HttpRequest, body: TrainRequest) -> Response:
    """Start a training on a text; /api/runs/{name} follows it."""
    if refusal := refuse_training(http):
        raise refusal
    await http.app.state.training.start(body)
    return await encode_response(http, training_state(http))


@router.post("/api/train/stop", response_model=TrainingState)
async def post_train_stop(http: HttpRequest) -> Response:
    """Stop the training that was started from the page; what it has learned is saved."""
    if refusal := refuse_training(http):
        raise refusal
    await http.app.state.training.stop()
    return await encode_response(http, training_state(http))
