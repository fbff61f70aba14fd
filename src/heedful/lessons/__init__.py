"""Lessons: the lectures as texts that run.

A lesson is one MyST Markdown file in this folder: text, code cells, live views, exercises, questions. The same file is
a page of the documentation, a Jupyter notebook, a lesson in the terminal (`heedful learn`) and one in the playground.

    lesson      a lesson's file, parsed into its parts
    execute     runs the cells: what they print, show and draw
    results     what the cells showed, kept on the disk
    answers     a student's answer, run and checked
    child       the process in which a server runs cells, with its limits (limits) and sandbox (sandbox)
    checking    `check(answer)`: what is wrong with the answer to an exercise
    checks/     the exercises of each lesson
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heedful.lessons.lesson import Lesson, lesson_names, read_lesson

if TYPE_CHECKING:
    from heedful.lessons.checking import Wrong, check

__all__ = ["Lesson", "Wrong", "check", "lesson_names", "read_lesson"]


def __getattr__(name: str) -> Any:
    """`check` and `Wrong` need PyTorch, which the list of lessons does not."""
    if name in ("Wrong", "check"):
        from heedful.lessons import checking

        return getattr(checking, name)
    raise AttributeError(f"heedful.lessons has no {name!r}; it has {', '.join(__all__)}")
