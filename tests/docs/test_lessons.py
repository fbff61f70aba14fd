"""The lessons as pages of the documentation, which run when it is built, and as notebooks: the same cells."""

from __future__ import annotations

import nbformat
import pytest
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

from heedful.lessons import lesson_names, read_lesson
from heedful.lessons.notebook import INSTALL, notebook_text
from support.documents import ROOT

SHORT_LESSON, N_PICTURES = "attention-by-hand", 3


def code_cells(notebook: nbformat.NotebookNode) -> list[tuple[str, list[str]]]:
    """The code of the cells that run, with their tags."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(cell.source.strip("\n"), list(cell.metadata.get("tags", []))) for cell in cells]


@pytest.mark.parametrize("name", lesson_names())
def test_a_page_and_a_notebook_run_the_same_cells(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from extension.pages import lesson_page

    lesson = read_lesson(name)
    written = [(cell.text, list(cell.tags)) for cell in lesson.cells]
    page = read_myst_markdown_notebook(lesson_page(name))
    assert page.metadata.kernelspec.name == "python3"
    assert code_cells(page) == written
    notebook = nbformat.reads(notebook_text(lesson), as_version=4)
    nbformat.validate(notebook)
    (install, _), *rest = code_cells(notebook)
    assert install == INSTALL and rest == written


def test_a_notebook_runs(tmp_path):
    notebook = nbformat.reads(notebook_text(read_lesson(SHORT_LESSON)), as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.get("name") == "stderr" or output.output_type == "error"] == []
    shown = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == N_PICTURES
    assert all("image/png" in data for data in shown if "<Figure" in data.get("text/plain", ""))
