"""GET /api/lessons and /api/lessons/{name}, POST .../run and .../check: lessons for the tab Learn.

`run` runs a lesson's own cells, `check` a student's answer to an exercise, each in a child process with limits.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.lessons.lesson import Lesson, lesson_names, read_lesson
from heedful.serve.errors import ApiError, abbreviate
from heedful.serve.options import Options
from heedful.serve.playground.wire import PlaygroundModel, encode_response

router = APIRouter()


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


@router.get("/api/lessons", response_model=LessonsResponse)
async def get_lessons(http: HttpRequest) -> Response:
    """All lessons, in the order of the course."""
    lessons = [summarize_lesson(read_lesson(name)) for name in lesson_names()]
    reason = exercises_refusal(http)
    return await encode_response(http, {"lessons": lessons, "exercises": not reason, "reason": reason})


@router.get("/api/lessons/{name}", response_model=LessonResponse)
async def get_lesson(http: HttpRequest, name: str) -> Response:
    """One lesson, with its parts."""
    lesson = find_lesson(name)
    parts = [
        {"kind": part.kind, "text": part.text, "title": part.title, "tags": list(part.tags)} for part in lesson.parts
    ]
    content = {**summarize_lesson(lesson), "parts": parts, "exercises": list(lesson.exercises)}
    return await encode_response(http, content)


def find_lesson(name: str) -> Lesson:
    """A lesson by its name; ApiError 404 if there is none."""
    if name not in lesson_names():
        raise ApiError(404, f"no lesson is called {abbreviate(name)}", param="name", code="lesson_not_found")
    return read_lesson(name)


def summarize_lesson(lesson: Lesson) -> dict[str, Any]:
    """A LessonSummary."""
    about = {"name": lesson.name, "title": lesson.title, "chapter": lesson.chapter, "about": lesson.about}
    return {**about, "n_exercises": len(lesson.exercises), "models": lesson.models}


def exercises_refusal(http: HttpRequest) -> str:
    """Why this server does not run answers; empty if it does."""
    options: Options = http.app.state.options
    if options.exercises:
        return ""
    return "this server runs no answers to exercises: start it with --exercises, or use `heedful learn NAME --page`"
