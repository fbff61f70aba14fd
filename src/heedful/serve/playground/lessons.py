"""GET /api/lessons and /api/lessons/{name}, POST .../run and .../check: lessons for the tab Learn.

`run` runs a lesson's own cells, `check` a student's answer to an exercise, each in a child process with limits, for the
page that has the server's token. What the cells showed when they were last run is there for everybody.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heedful.lessons.answers import context_of
from heedful.lessons.lesson import Lesson, lesson_names, read_lesson
from heedful.lessons.results import keep_results, kept_results
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, abbreviate
from heedful.serve.event_stream import COMMENT, DONE, HEADERS, KEEP_ALIVE
from heedful.serve.field_types import Text
from heedful.serve.options import Options
from heedful.serve.playground import access
from heedful.serve.playground.docs import has_documentation
from heedful.serve.playground.lesson_process import ChildFailed, LessonProcesses
from heedful.serve.playground.wire import PlaygroundModel, ShortText, encode_response
from heedful.serve.request_schema import RequestBody

router = APIRouter()
R = TypeVar("R")


class LessonSummary(PlaygroundModel):
    """A lesson, its chapter, and what it is about."""

    name: str
    title: str
    chapter: str
    about: str
    n_exercises: int
    models: list[str] = Field(description="Those that its views open")


class LessonsResponse(PlaygroundModel):
    """All lessons, in the order of the course."""

    lessons: list[LessonSummary]
    exercises: bool = Field(description="Whether this server runs answers to exercises")
    reason: str = Field(description="Why not; empty if it does")
    command: str = Field(description="What opens the lesson NAME on one that does")
    documentation: bool = Field(description="Whether the documentation is at /docs/")


class LessonPart(PlaygroundModel):
    """A piece of a lesson. text: Markdown with formulas. code: a cell, with its tags (exercise, solution, hide-input).
    view: `title` is an address of this page, `text` what to see there. question: `title` asks, `text` answers."""

    kind: Literal["text", "code", "view", "question"]
    text: str
    title: str
    tags: list[str]


class LessonResponse(LessonSummary):
    """A lesson with all its parts, in the order of the page."""

    parts: list[LessonPart]
    exercises: list[str] = Field(description="The functions to write, in the order of the exercises")


class CellEvent(PlaygroundModel):
    """What a cell printed and showed, its figures as PNG files in base64, and the traceback if it failed."""

    cell: int = Field(description="The cell's index among the parts of the lesson")
    text: str
    figures: list[str]
    error: str


class LessonEnd(PlaygroundModel):
    """The last event of a lesson that is run."""

    done: Literal[True]
    error: str = Field(description="Why it was stopped; empty if all cells have run")


class ExerciseRequest(RequestBody):
    """An answer to an exercise: Python code with the function that the exercise asks for."""

    exercise: Annotated[Text, Field(max_length=200)]
    source: ShortText


class ExerciseResponse(PlaygroundModel):
    """Whether an answer is right, and what it and its check printed."""

    right: bool
    text: str


LESSON_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events: the data of each is a CellEvent, at last a LessonEnd and `[DONE]`",
        "content": {
            "text/event-stream": {"schema": {"anyOf": [CellEvent.model_json_schema(), LessonEnd.model_json_schema()]}}
        },
    }
}


@router.get("/api/lessons", response_model=LessonsResponse)
async def get_lessons(http: HttpRequest) -> Response:
    """All lessons, in the order of the course."""
    lessons = [summarize_lesson(read_lesson(name)) for name in lesson_names()]
    refusal = refuse_answers(http)
    reason = "" if refusal is None else refusal.message
    about = {"exercises": refusal is None, "reason": reason, "command": exercises_command()}
    return await encode_response(http, {"lessons": lessons, **about, "documentation": has_documentation()})


@router.get("/api/lessons/{name}", response_model=LessonResponse)
async def get_lesson(http: HttpRequest, name: str) -> Response:
    """One lesson, with its parts."""
    lesson = find_lesson(name)
    parts = [
        {"kind": part.kind, "text": part.text, "title": part.title, "tags": list(part.tags)} for part in lesson.parts
    ]
    content = {**summarize_lesson(lesson), "parts": parts, "exercises": list(lesson.exercises)}
    return await encode_response(http, content)


@router.post("/api/lessons/{name}/run", response_class=Response, responses=LESSON_STREAM)
async def post_lesson_run(http: HttpRequest, name: str) -> Response:
    """A stream of what the lesson's own cells show, each as it ends. Exercises are left out; solutions are run, and
    show nothing. What was run once is kept on the disk."""
    processes: LessonProcesses = http.app.state.lesson_processes
    lesson = find_lesson(name)
    kept = await asyncio.to_thread(kept_results, lesson)
    if kept is None and (refusal := refuse_cells(http)):
        raise refusal
    processes.check_queue("lesson")
    return LessonStream(lesson, processes, kept)


@router.post("/api/lessons/{name}/check", response_model=ExerciseResponse)
async def post_lesson_check(http: HttpRequest, name: str, body: ExerciseRequest) -> Response:
    """Check an answer to an exercise. It is run after the imports and definitions of the lesson."""
    if refusal := refuse_answers(http):
        raise refusal
    lesson = find_lesson(name)
    if body.exercise not in lesson.exercises:
        known = ", ".join(lesson.exercises)
        raise ApiError(
            400, f"{abbreviate(body.exercise)} is no exercise of {name}, which has {known}", param="exercise"
        )
    processes: LessonProcesses = http.app.state.lesson_processes
    judged = await unless_disconnected(check_answer(processes, lesson, body), http.receive)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if judged is None else await encode_response(http, judged)


async def check_answer(processes: LessonProcesses, lesson: Lesson, body: ExerciseRequest) -> dict[str, Any]:
    """An ExerciseResponse."""
    async with processes.place("answer"):
        try:
            return await processes.check_answer(body.exercise, body.source, context_of(lesson, body.exercise))
        except ChildFailed as problem:
            return {"right": False, "text": f"✗ {body.exercise}: {problem}\n"}


class LessonStream(Response):
    """The cells of a lesson as server-sent events; they are stopped when the client disconnects."""

    def __init__(self, lesson: Lesson, processes: LessonProcesses, kept: list[dict[str, Any]] | None) -> None:
        super().__init__()
        self.lesson, self.processes, self.kept = lesson, processes, kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come."""
        await unless_disconnected(self._stream(send), receive)

    async def _stream(self, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def write_event(event: dict[str, Any]) -> None:
            await write(f"data: {json.dumps(event)}\n\n".encode())

        async def write_comments() -> None:
            while True:  # a proxy would close a connection on which nothing comes for long
                await asyncio.sleep(KEEP_ALIVE)
                await write(COMMENT)

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        comments, error = asyncio.create_task(write_comments()), ""
        try:
            async with self.processes.place("lesson"):
                await self._run(write_event)
        except ChildFailed as problem:
            error = str(problem)
        finally:
            comments.cancel()
        await write_event({"done": True, "error": error})
        await write(DONE.encode(), more=False)

    async def _run(self, write_event: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Write what the cells showed when they were last run, or run them."""
        if self.kept is not None:
            for event in self.kept:
                await write_event(event)
            return
        found = list[dict[str, Any]]()
        async with self.processes.lesson(own_cells(self.lesson)) as events:
            async for event in events:
                found.append(event)
                await write_event(event)
        if not any(event["error"] for event in found):
            await asyncio.to_thread(keep_results, self.lesson, found)


def own_cells(lesson: Lesson) -> list[dict[str, Any]]:
    """The cells that a child runs."""
    return [
        {"cell": i, "source": part.text, "shown": "solution" not in part.tags}
        for i, part in enumerate(lesson.parts)
        if part.kind == "code" and "exercise" not in part.tags
    ]


async def unless_disconnected(work: Coroutine[Any, Any, R], receive: Receive) -> R | None:
    """What a coroutine returns; None if the client disconnects before that, and it is cancelled."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def find_lesson(name: str) -> Lesson:
    """A lesson by its name; ApiError 404 if there is none."""
    if name not in lesson_names():
        raise ApiError(404, f"no lesson is called {abbreviate(name)}", param="name", code="lesson_not_found")
    return read_lesson(name)


def summarize_lesson(lesson: Lesson) -> dict[str, Any]:
    """A LessonSummary."""
    about = {"name": lesson.name, "title": lesson.title, "chapter": lesson.chapter, "about": lesson.about}
    return {**about, "n_exercises": len(lesson.exercises), "models": lesson.models}


def refuse_answers(http: HttpRequest) -> ApiError | None:
    """Why this client's answers are not run; None if they are."""
    options: Options = http.app.state.options
    if not options.may_run_answers:
        reason = "this server does not run answers: start it with --exercises, or use `heedful learn NAME --page`"
        return ApiError(403, reason, code="exercises_not_allowed")
    return access.refuse(http, others=bool(options.exercises))


def refuse_cells(http: HttpRequest) -> ApiError | None:
    """Why a lesson's own cells are not run for this client; None if they are."""
    options: Options = http.app.state.options
    if not options.may_run_cells:
        reason = "other machines can reach this server: start it with --exercises to run the cells of lessons"
        return ApiError(403, reason, code="lessons_not_run")
    return access.refuse(http, others=bool(options.exercises))


def exercises_command() -> str:
    """What opens a lesson on a server that runs answers; with a relative path where this one was started by one."""
    program = Path(sys.argv[0])  # absolute where a shell has found it by its name
    typed = program.name == "heedful" and not program.is_absolute()
    return f"{shlex.quote(str(program)) if typed else 'heedful'} learn NAME --page"
