"""`heedful learn`: the list, a lesson step by step, progress that is remembered, exercises in files, notebooks."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.cli.lesson_terminal import find_editor
from heedful.lessons import checking
from heedful.lessons.formulas import unicode_formula
from support.sample_lesson import SOURCE, lessons_in

RIGHT = "def doubled_in_tests(x):\n    return x + x\n"


@pytest.fixture(autouse=True)
def sample(tmp_path, monkeypatch):
    """A sample lesson and another, in an empty folder, with a student who types nothing yet."""

    def check_doubled_in_tests(answer):
        checking.require(answer(2) == 4, f"twice 2 is 4, not {answer(2)}")

    monkeypatch.setattr(checking, "found_check", lambda name: check_doubled_in_tests)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    for name in ("VISUAL", "EDITOR", "PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    other = SOURCE.replace("order: 10", "order: 11").replace("A sample", "Another").replace("doubled_", "other_")
    with lessons_in(tmp_path / "course", sample=SOURCE, another=other):
        yield


@pytest.fixture
def learn(monkeypatch, capsys):
    """`heedful learn ...` in a terminal where a student types these lines; gives what was printed."""

    def learned(*arguments: str, typed: list[str | Exception]) -> str:
        lines = iter(typed)

        def line(prompt: str = "") -> str:
            found = next(lines)
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr("builtins.input", line)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        assert main(["learn", *arguments]) == 0
        assert list(lines) == [], "the lesson ended before the student did"
        return capsys.readouterr().out

    return learned


def test_the_list_says_what_there_is_and_what_to_do(capsys):
    assert main(["learn"]) == 0
    out = capsys.readouterr().out
    assert "Before Transformers" in out and "a lesson of the tests" in out and "heedful learn sample begins" in out


def test_a_lesson_step_by_step(learn):
    out = learn("sample", typed=["", "", "", "n", "", "", "", ""])
    assert (
        out.index("A sample") < out.index("hello from the cell") < out.index("Look at the diagonal") < out.index("42")
    )
    assert "QKᵀ / √d" in out and "Because of" in out and "heedful learn another" in out
    assert Path("lessons/sample/figure-2.png").read_bytes().startswith(b"\x89PNG")
    assert "done, 0 of 1 solved" in learn(typed=[])


def test_it_goes_on_where_one_stopped(learn):
    assert "hello from the cell" in learn("sample", typed=["", "", "q"])
    assert "heedful learn sample goes on" in learn(typed=[])
    later = learn("sample", typed=["", "q"])
    assert "hello from the cell" not in later and "Look at the diagonal" in later
    assert "hello from the cell" in learn("sample", "--restart", typed=["q"])
    assert "Stopped." in learn("sample", typed=[EOFError()])
    assert "Stopped." in learn("sample", typed=[KeyboardInterrupt()])


def test_an_exercise_is_written_in_a_file_and_checked(learn):
    file = Path("lessons/sample/sample-doubled_in_tests.py")
    assert "not written yet" in learn("sample", typed=["", "", "", "", "q"])
    assert "import math" in file.read_text()
    file.write_text("def doubled_in_tests(x):\n    return 3 * x\n")
    assert "twice 2 is 4, not 6" in learn("sample", typed=["", "q"])
    file.write_text(RIGHT)
    assert "✓ doubled_in_tests: right" in learn("sample", typed=["", "q"])
    assert file.read_text() == RIGHT
    assert "1 of 1 solved" in learn(typed=[])
    assert "return 2 * x" in learn("sample", "--restart", typed=["", "", "", "s", "b", "q"])


def test_without_a_terminal_the_whole_lesson_is_printed(capsys):
    assert main(["learn", "sample", "--folder", "here"]) == 0
    out = capsys.readouterr().out
    assert "hello from the cell" in out and "✓ doubled_in_tests: right" in out and "Because of" in out
    assert Path("here/figure-2.png").is_file()


def test_a_cell_that_fails_is_an_error(tmp_path, capsys):
    with lessons_in(tmp_path / "broken", sample=SOURCE.replace("6 * 7", "6 / 0")):
        assert main(["learn", "sample", "--all"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    assert main(["learn", "sample", "--all", "--folder", "mine"]) == 2
    assert "files that are not of a lesson" in capsys.readouterr().err


def test_a_notebook_is_written_once(capsys):
    assert main(["learn", "sample", "--notebook"]) == 0
    cells = json.loads(Path("sample.ipynb").read_text())["cells"]
    assert [cell["cell_type"] for cell in cells].count("code") == 6  # with the one that installs heedful
    assert main(["learn", "sample", "--notebook"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["learn", "sample", "--notebook", "other"]) == 0 and Path("other.ipynb").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sampel"], "did you mean sample?"),
        (["../sample"], "there is no lesson"),
        (["--all"], "which lesson?"),
        (["--notebook"], "which lesson?"),
        (["sample", "--port", "1"], "--port is for --page"),
    ],
)
def test_mistakes_are_told(arguments, said, capsys):
    assert main(["learn", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_damaged_progress_is_no_progress(tmp_path, capsys):
    (tmp_path / "share/heedful").mkdir(parents=True)
    (tmp_path / "share/heedful/lessons.json").write_text('{"sample": {"part": -3}}')
    assert main(["learn"]) == 0
    assert "heedful learn sample begins" in capsys.readouterr().out


def test_the_editor_is_the_students(monkeypatch):
    assert find_editor() == []
    monkeypatch.setenv("EDITOR", f"{sys.executable} -m editor")
    assert find_editor() == [sys.executable, "-m", "editor"]


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"h_t = \tanh(W x_t + U h_{t-1} + b)", "hₜ = tanh(W xₜ + U hₜ₋₁ + b)"),
        (r"\frac{QK^\top}{\sqrt{d}}", "QKᵀ / √d"),
        (r"-\sum_i y_i \log \hat{y}_i", "-Σᵢ yᵢ log ŷᵢ"),
    ],
)
def test_formulas_can_be_read_in_a_terminal(tex, text):
    assert unicodedata.normalize("NFC", unicode_formula(tex)) == text
