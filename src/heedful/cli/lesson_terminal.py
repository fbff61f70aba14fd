"""A lesson in the terminal: text, code and its output, step by step; exercises in a file, questions with answers.

A step ends with something to look at: a cell's output, a view, a question. Cells run once, in order; going back shows
them again. Where stdin is no terminal, the whole lesson is printed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from heedful.cli.lesson_screen import LessonFolder, Screen
from heedful.lessons import Lesson, lesson_names
from heedful.lessons.answers import judge_answer
from heedful.lessons.execute import CellOutput, CellRunner
from heedful.lessons.lesson import Part, exercise_name
from heedful.lessons.progress import Progress, read_progress, write_progress
from heedful.text.plural import counted

EDITORS = ("nano", "vim", "vi", "notepad")
GO_ON = "Enter goes on, b goes back, q stops"


def steps_of(lesson: Lesson) -> list[list[int]]:
    """The parts of each step: texts, and the part after them. A solution is shown in its exercise's step."""
    steps: list[list[int]] = [[]]
    for i, part in enumerate(lesson.parts):
        if "solution" not in part.tags:
            steps[-1].append(i)
            if part.kind != "text":
                steps.append([])
    return [step for step in steps if step]


class LessonCells:
    """The cells of a lesson, each run when its output is first asked for, after those before it."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson, self.runner = lesson, CellRunner()
        self.outputs: dict[int, CellOutput] = {}

    def output(self, part: int) -> CellOutput:
        """What the cell that is a part of the lesson showed. Exercises and solutions are not run here."""
        for i, each in enumerate(self.lesson.parts[: part + 1]):
            if each.kind == "code" and not {"exercise", "solution"} & set(each.tags) and i not in self.outputs:
                self.outputs[i] = self.runner.run(each.text)
        return self.outputs[part]

    def number(self, part: int) -> int:
        """Which cell of the lesson it is, counted from 1."""
        return sum(each.kind == "code" for each in self.lesson.parts[: part + 1])

    def solve(self, solution: Part) -> str:
        """What a solution's check says, after the cells so far."""
        return judge_answer(exercise_name(solution), solution.text, self.runner.namespace).text


def print_lesson(lesson: Lesson, folder: Path, cells: LessonCells | None = None) -> int:
    """Print a whole lesson, with solutions and answers; the exit code is 1 if a cell fails."""
    screen, cells = Screen(LessonFolder(folder, lesson)), cells or LessonCells(lesson)
    for i, part in enumerate(lesson.parts):
        if part.kind == "text":
            screen.text(part.text)
        elif part.kind == "view":
            screen.view(part)
        elif part.kind == "question":
            screen.question(part, answer=False)
            screen.question(part, answer=True)
        elif "solution" in part.tags:
            screen.note("\nA solution:")
            screen.code(part.text)
            screen.lines(cells.solve(part), "  | ")
        else:
            screen.code(part.text)
            if "exercise" not in part.tags:
                screen.output(cells.number(i), cells.output(i))
    failed = [output for output in cells.outputs.values() if output.error]
    return 1 if failed else 0


class TerminalLesson:
    """A student's way through a lesson."""

    def __init__(self, lesson: Lesson, folder: Path, *, restart: bool) -> None:
        self.lesson, self.folder = lesson, LessonFolder(folder, lesson)
        self.screen, self.cells, self.steps = Screen(self.folder), LessonCells(lesson), steps_of(lesson)
        self.progress = read_progress().get(lesson.name, Progress())
        if restart or self.progress.finished:
            self.progress.part = 0

    def take(self) -> int:
        """Go through the steps until the end, or until the student stops."""
        self._greet()
        at = next((n for n, step in enumerate(self.steps) if step[-1] >= self.progress.part), 0)
        while at < len(self.steps):
            self.progress.part = self.steps[at][0]
            write_progress(self.lesson.name, self.progress)
            try:
                move = self._step(at)
            except (EOFError, KeyboardInterrupt):
                self.screen.console.print()
                move = None
            if move is None:
                self.screen.note(f"Stopped. `heedful learn {self.lesson.name}` goes on from here.")
                return 0
            at = max(0, at + move)
        self._finish()
        return 0

    def _greet(self) -> None:
        n = len(self.lesson.exercises)
        self.screen.heading(
            f"{self.lesson.chapter} › {self.lesson.title}: {self.lesson.about}\n"
            f"{counted(len(self.steps), 'step')}, {counted(n, 'exercise')}. {GO_ON}.\n"
            f"Pictures and exercises go to {self.folder.path}."
        )
        if self.progress.part:
            self.screen.note("It goes on where you stopped; --restart begins anew. The cells before are run again.")

    def _finish(self) -> None:
        self.progress.part, self.progress.finished = 0, True
        write_progress(self.lesson.name, self.progress)
        solved, names = set(self.progress.solved) & set(self.lesson.exercises), lesson_names()
        after = names[names.index(self.lesson.name) + 1 :] if self.lesson.name in names else ()
        self.screen.rule("the end")
        self.screen.note(f"You have solved {len(solved)} of {counted(len(self.lesson.exercises), 'exercise')}.")
        if after:
            self.screen.note(f"Next: heedful learn {after[0]}")

    def _step(self, at: int) -> int | None:
        """Show a step and ask; by how many steps to move, None to stop."""
        self.screen.rule(f"{at + 1} of {len(self.steps)}")
        *texts, last = [(i, self.lesson.parts[i]) for i in self.steps[at]]
        for _, part in texts:
            self.screen.text(part.text)
        index, part = last
        if part.kind == "text":
            self.screen.text(part.text)
        elif part.kind == "view":
            self.screen.view(part)
        elif part.kind == "question":
            self.screen.question(part, answer=False)
            if (move := self._ask("Enter shows the answer, b goes back, q stops")) != 1:
                return move
            self.screen.question(part, answer=True)
        elif "exercise" in part.tags:
            return self._exercise(index, exercise_name(part))
        else:
            self.screen.code(part.text)
            with self._waiting():
                output = self.cells.output(index)
            self.screen.output(self.cells.number(index), output)
        return self._ask(GO_ON)

    def _waiting(self) -> AbstractContextManager[object]:
        return self.screen.console.status("running") if self.screen.colours else nullcontext()

    def _ask(self, text: str) -> int | None:
        """Wait for Enter, b or q."""
        return {"": 1, "b": -1, "q": None}[self._choice(text, ("", "b", "q"))]

    def _choice(self, text: str, known: Sequence[str]) -> str:
        """What the student types, until it is known."""
        while True:
            self.screen.console.print()
            typed = self.screen.console.input(f"[dim]{text} ›[/dim] ").strip().lower()
            if typed in known:
                return typed

    # --- exercises ----------------------------------------------------------------------------------------------------

    def _exercise(self, index: int, exercise: str) -> int | None:
        """Show an exercise and check its file as often as the student likes."""
        self.screen.code(self.lesson.parts[index].text)
        file, editor = self.folder.exercise_file(exercise), find_editor()
        self.screen.note(f"\nWrite it in {file}, with any editor, and save it.")
        opens = f"e edits it ({editor[0]}), " if editor else ""
        text = f"Enter checks it, {opens}s shows the solution, n goes on, b goes back, q stops"
        while True:
            typed = self._choice(text, ("", "e", "s", "n", "b", "q") if editor else ("", "s", "n", "b", "q"))
            if typed == "":
                if self._check(index, exercise, file):
                    return self._ask(GO_ON)
            elif typed == "e":
                subprocess.run([*editor, str(file)], check=False)
            elif typed == "s":
                self.screen.code(self.lesson.solutions[exercise].text)
            else:
                return {"n": 1, "b": -1, "q": None}[typed]

    def _check(self, index: int, exercise: str, file: Path) -> bool:
        """Check the answer in a file; Ctrl-C stops one that does not end."""
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            self.screen.note(f"{file} cannot be read: {problem}", style="red")
            return False
        try:
            with self._waiting():
                cells = [i for i, part in enumerate(self.lesson.parts[:index]) if part.kind == "code" and not part.tags]
                if cells:
                    self.cells.output(cells[-1])  # where the lesson was resumed here
                judged = judge_answer(exercise, source, self.cells.runner.namespace)
        except KeyboardInterrupt:
            self.screen.note("\nStopped: is there a loop that does not end?", style="red")
            return False
        self.screen.lines(judged.text, "  ", style="green" if judged.right else "red")
        if judged.right and exercise not in self.progress.solved:
            self.progress.solved.append(exercise)
            write_progress(self.lesson.name, self.progress)
        return judged.right


def find_editor() -> list[str]:
    """The command of the student's editor; nothing if there is none."""
    for given in (os.environ.get("VISUAL"), os.environ.get("EDITOR"), *EDITORS):
        command = shlex.split(given) if given else []
        if command and shutil.which(command[0]):
            return command
    return []
