"""How the parts of a lesson look in the terminal, and where its pictures and exercises are kept."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from heedful.lessons.execute import CellOutput
from heedful.lessons.formulas import readable_formulas
from heedful.lessons.lesson import Lesson, Part
from heedful.lessons.notebook import PLAYGROUND

WIDTH = 100  # columns at most: longer lines are hard to read
MARK = ".heedful-lesson"  # in a folder that is a lesson's


class LessonFolder:
    """The folder of a lesson's pictures and of a student's answers. It is made when something is written."""

    def __init__(self, path: Path, lesson: Lesson) -> None:
        self.path, self.lesson = path, lesson
        if path.is_dir() and any(path.iterdir()) and not (path / MARK).is_file():
            raise ValueError(f"{path} has files that are not of a lesson: give another folder by --folder")

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MARK).write_text(f"{self.lesson.name}\n", encoding="utf-8")

    def write_figures(self, cell: int, figures: tuple[bytes, ...]) -> list[Path]:
        """Write the figures of a cell as PNG files."""
        paths = [self.path / f"figure-{cell}{f'-{i}' if i > 1 else ''}.png" for i in range(1, len(figures) + 1)]
        for path, figure in zip(paths, figures, strict=True):
            self._make()
            path.write_bytes(figure)
        return paths

    def exercise_file(self, exercise: str) -> Path:
        """The file in which an exercise is answered; it is written once, and then the student's."""
        path = self.path / f"{self.lesson.name}-{exercise}.py"
        if not path.exists():
            self._make()
            path.write_text(exercise_text(self.lesson, exercise, path.name), encoding="utf-8")
        return path


def exercise_text(lesson: Lesson, exercise: str, name: str) -> str:
    """The file that a student completes: the imports of the lesson, and the exercise."""
    cell = lesson.exercises[exercise]
    imports: list[str] = []
    for each in lesson.cells:
        if each is cell:
            break
        found = [node for node in ast.parse(each.text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        imports += [ast.unparse(node) for node in found]
    about = (
        f"# {lesson.title}: write `{exercise}`.\n# Save this file and press Enter in the lesson, or run: python {name}"
    )
    return f"{about}\n\n" + "\n".join(dict.fromkeys(imports)) + f"\n\n\n{cell.text}\n"


class Screen:
    """Prints the parts of a lesson; in colour where a terminal shows it."""

    def __init__(self, folder: LessonFolder) -> None:
        # The file is named, since cells run while sys.stdout is another.
        console = Console(file=sys.stdout, highlight=False)
        width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        self.console = Console(file=sys.stdout, highlight=False, width=width)
        self.folder = folder

    @property
    def colours(self) -> bool:
        """Whether somebody reads this on a terminal."""
        return self.console.is_terminal

    def text(self, markdown: str) -> None:
        """Print Markdown, with its formulas readable."""
        self.console.print()
        self.console.print(Markdown(readable_formulas(markdown), code_theme="ansi_dark"))

    def code(self, source: str) -> None:
        """Print a cell's source."""
        self.console.print()
        if self.colours:
            self.console.print(Padding(Syntax(source, "python", theme="ansi_dark", word_wrap=True), (0, 0, 0, 2)))
        else:
            self.lines(source, "    ")

    def lines(self, text: str, before: str, style: str = "") -> None:
        """Print lines as they are, however long."""
        for line in text.rstrip("\n").splitlines():
            self.console.print(Text(before + line, style=style), soft_wrap=True)

    def output(self, cell: int, output: CellOutput) -> None:
        """Print what a cell showed, and save its figures."""
        if output.text.strip():
            self.console.print()
            self.lines(output.text, "  │ " if self.colours else "  | ")
        for path in self.folder.write_figures(cell, output.figures):
            link = Text(str(path), style=f"underline link {path.resolve().as_uri()}")
            self.console.print(Text("  picture: ", style="cyan") + link, soft_wrap=True)
        if output.error:
            self.lines(output.error, "  ", style="red")

    def view(self, part: Part) -> None:
        """Print where a claim can be tried."""
        where = f"{PLAYGROUND}{part.title}"
        self.text(part.text)
        self.note(f"Try it: {where}")
        self.note(f"        while `heedful learn {self.folder.lesson.name} --page` or `heedful serve` runs")

    def question(self, part: Part, answer: bool) -> None:
        """Print a question, or its answer."""
        self.text(part.text if answer else f"**{part.title}**")

    def note(self, text: str, style: str = "cyan") -> None:
        """Print a line of our own."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print what is at the beginning of a lesson."""
        self.console.print(Panel(Text(text), expand=False, border_style="cyan"))

    def rule(self, text: str) -> None:
        """Print a line across, between steps."""
        self.console.print()
        self.console.rule(Text(text, style="dim"), style="dim")
