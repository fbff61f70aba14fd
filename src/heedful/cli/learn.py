"""`heedful learn`: the lessons, in the terminal, as a notebook, or in the playground."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.lessons import Lesson

PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The lesson, and its form."""
    parser.add_argument("lesson", nargs="?", metavar="NAME", help="a lesson; without one they are listed")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--all", action="store_true", help="print the whole lesson, without waiting for Enter")
    forms.add_argument(
        "--notebook", nargs="?", type=Path, const=Path(), metavar="FILE",
        help="write it as a Jupyter notebook (default: NAME.ipynb)",
    )  # fmt: skip
    forms.add_argument("--page", action="store_true", help="open it in the playground, beside the models that it uses")
    parser.add_argument("--restart", action="store_true", help="begin it anew, not where you stopped")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER",
        help="where its pictures and your answers go (default: lessons/NAME)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, metavar="N", help=f"of --page (default: {PORT}, or a free one)")


def run(options: argparse.Namespace) -> int:
    """List the lessons, or give one."""
    if options.lesson is None:
        given = [name for name in ("all", "notebook", "page", "restart", "folder", "port") if getattr(options, name)]
        if given or options.notebook is not None:
            raise ValueError("which lesson? `heedful learn` lists them; then give its name")
        from heedful.cli.lesson_list import print_lessons

        print_lessons()
        return 0
    lesson = find_lesson_named(options.lesson)
    if options.port is not None and not options.page:
        raise ValueError("--port is for --page")
    if options.notebook is not None:
        return write_notebook(lesson, options.notebook)
    if options.page:
        return open_lesson(lesson, options.port)
    # Cells have small tensors: on one thread they are as fast, give the numbers that the text tells, and do not wait
    # for cores that others use. Read when PyTorch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from heedful.cli.lesson_terminal import TerminalLesson, print_lesson

    folder = options.folder or Path("lessons") / lesson.name
    if options.all or sys.stdin is None or not sys.stdin.isatty():
        return print_lesson(lesson, folder)
    return TerminalLesson(lesson, folder, restart=options.restart).take()


def find_lesson_named(name: str) -> Lesson:
    """A lesson by its name; a ValueError says which there are."""
    from heedful.lessons import lesson_names, read_lesson
    from heedful.models.config import did_you_mean

    if name not in lesson_names():
        hint = did_you_mean(name, lesson_names())
        raise ValueError(f"there is no lesson {name!r}{hint}: `heedful learn` lists them")
    return read_lesson(name)


def write_notebook(lesson: Lesson, file: Path) -> int:
    """Write a lesson as a notebook; a file that is there stays as it is, since a student may have worked in it."""
    from heedful.lessons.notebook import notebook_text

    if file == Path():
        file = Path(f"{lesson.name}.ipynb")
    if file.is_dir():
        file = file / f"{lesson.name}.ipynb"
    if not file.suffix:
        file = file.with_suffix(".ipynb")
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(notebook_text(lesson))
    except FileExistsError:
        raise ValueError(f"{file} is there already: give another name, or remove it") from None
    print(f"{file}: open it with `jupyter lab {file}`, or upload it to a hosted notebook")
    return 0


def open_lesson(lesson: Lesson, port: int | None) -> int:
    """Serve the playground on this machine, with exercises, and open the lesson in it."""
    from heedful.serve.options import Options

    # The page remembers progress by its address, so that the usual port is better than any free one.
    port = port if port is not None else PORT if is_free(PORT) else 0
    from heedful.serve.server import serve

    page = f"#/learn?lesson={lesson.name}"
    return serve(Options(port=port, lazy=True, open=True, page=page))


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
