"""Runs a lesson's cells: what they print, the value of their last expression, the figures that they draw.

The cells are the package's own, or what a student types as the answer to an exercise on their own machine.
"""

from __future__ import annotations

import ast
import io
import linecache
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 100_000  # of what a cell prints and shows


@dataclass(frozen=True)
class CellOutput:
    """What a cell printed and showed (`text`), its figures as PNG files, and the traceback if it failed."""

    text: str = ""
    figures: tuple[bytes, ...] = ()
    error: str = ""


class BoundedText(io.StringIO):
    """The first characters that are written; the others are dropped, and `getvalue` says so."""

    def __init__(self, most: int = MAX_CHARACTERS) -> None:
        super().__init__()
        self.left, self.n_dropped = most, 0

    def write(self, text: str) -> int:
        """Keep what there is room for."""
        kept = text[: self.left]
        self.left -= len(kept)
        self.n_dropped += len(text) - len(kept)
        super().write(kept)
        return len(text)

    def getvalue(self) -> str:
        """What was kept."""
        return super().getvalue() + (f"\n... {self.n_dropped:,} more characters\n" if self.n_dropped else "")


class CellRunner:
    """Runs cells one after another in one namespace, as a notebook does; `names` are there from the beginning."""

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.namespace: dict[str, Any] = {**(names or {}), "__name__": "__main__"}
        self.n_run = 0

    def run(self, source: str) -> CellOutput:
        """Run a cell; an exception becomes its `error`."""
        import matplotlib

        matplotlib.use("agg")
        self.n_run += 1
        name = f"<cell {self.n_run}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
        printed = BoundedText()
        error = ""
        value = None
        with redirect_stdout(printed):
            try:
                value = self._execute(source, name)
                if value is not None and not is_figure(value) and (shown := repr(value)):
                    print(shown)
            except (Exception, SystemExit) as problem:  # exit() ends the cell, not the lesson
                error = short_traceback(problem)
        try:
            figures = take_figures(value)
        except Exception as problem:  # a figure can be too large, or have labels that are no formulas
            figures, error = (), error or short_traceback(problem)
        return CellOutput(printed.getvalue(), figures, error)

    def _execute(self, source: str, name: str) -> Any:
        """Run the statements; the value of the last one if it is an expression and no semicolon follows it.

        Without this module's own __future__ imports: a name that is missing in an annotation fails in a notebook too.
        """
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
            exec(compile(tree, name, "exec", dont_inherit=True), self.namespace)
            return None
        exec(compile(ast.Module(tree.body[:-1], []), name, "exec", dont_inherit=True), self.namespace)
        return eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.namespace)


def short_traceback(problem: BaseException) -> str:
    """A traceback with the lines of cells alone."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith("<cell")]
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(problem)]).rstrip()[-MAX_CHARACTERS:]


def is_figure(value: Any) -> bool:
    """Whether a cell's value is a figure, which is shown and not printed."""
    from matplotlib.figure import Figure

    return isinstance(value, Figure)


def take_figures(value: Any = None) -> tuple[bytes, ...]:
    """The open figures of matplotlib, and the cell's value if it is another one, as PNG files; they are closed."""
    from matplotlib import pyplot

    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    if is_figure(value) and not any(figure is value for figure in figures):
        figures.append(value)
    files = []
    try:
        for figure in figures:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
            files.append(file.getvalue())
    finally:
        pyplot.close("all")
    return tuple(files)
