"""The list of `heedful learn`: chapters and lessons, and how far one is."""

from __future__ import annotations

from itertools import groupby

from heedful.lessons import Lesson, lesson_names, read_lesson
from heedful.lessons.progress import Progress, read_progress


def print_lessons() -> None:
    """Print the lessons by chapter, with the progress in each, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    progress = read_progress()
    lessons = [read_lesson(name) for name in lesson_names()]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True, style="green")
    for chapter, members in groupby(lessons, key=lambda lesson: lesson.chapter):
        table.add_row(f"[cyan]{chapter}[/cyan]") if chapter else None
        for lesson in members:
            table.add_row(f"  {lesson.name}", lesson.about, progress_in_words(lesson, progress.get(lesson.name)))
    console = Console(highlight=False)
    console.print(table)
    ahead = next_lesson(lessons, progress)
    console.print()
    if ahead is None:
        console.print("You have been through all of them. heedful learn NAME opens one again.")
    else:
        verb = "goes on" if ahead.name in progress else "begins"
        console.print(f"[bold]heedful learn {ahead.name}[/bold] {verb}; --page opens it in the playground, --notebook "
                      "writes it for Jupyter.")  # fmt: skip


def progress_in_words(lesson: Lesson, progress: Progress | None) -> str:
    """ "done", or how far; and how many of the exercises are solved."""
    if progress is None:
        return ""
    far = "done" if progress.finished else f"{100 * progress.part // len(lesson.parts)} %"
    n = len(lesson.exercises)
    solved = len(set(progress.solved) & set(lesson.exercises))
    return f"{far}, {solved} of {n} solved" if n else far


def next_lesson(lessons: list[Lesson], progress: dict[str, Progress]) -> Lesson | None:
    """The lesson to go on with: the first that was begun and not finished, else the first that was not begun."""
    begun = [lesson for lesson in lessons if lesson.name in progress and not progress[lesson.name].finished]
    new = [lesson for lesson in lessons if lesson.name not in progress]
    return next(iter(begun + new), None)
