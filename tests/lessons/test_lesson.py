"""A lesson's file as parts, its cells as a notebook runs them, and what `check` says of answers."""

from __future__ import annotations

import pytest
import torch

from heedful.lessons import checking, lesson_names, read_lesson
from heedful.lessons.execute import CellRunner
from heedful.lessons.lesson import parse_lesson

SOURCE = """---
title: A title
chapter: A chapter
order: 7
about: what it is about
kernelspec: {name: python3, display_name: Python 3}
---
# A title
Some *text*.

```python
not_a_cell()
```

```{code-cell} python
x = 1
```

```{view} #/attention?model=tiny&text=To%20be
Look there.
```

```{code-cell} python
:tags: [exercise]

def f(): ...
```

````{dropdown} Why?
Because.

```python
x
```
````
The end.
"""


def test_the_parts_of_a_lesson():
    lesson = parse_lesson("a-title", SOURCE)
    assert (lesson.name, lesson.title, lesson.chapter, lesson.order) == ("a-title", "A title", "A chapter", 7)
    assert [part.kind for part in lesson.parts] == ["text", "code", "view", "code", "question", "text"]
    text, code, view, exercise, question, last = lesson.parts
    assert text.text.startswith("# A title") and "not_a_cell" in text.text
    assert code.text == "x = 1" and not code.tags
    assert (view.title, view.text) == ("#/attention?model=tiny&text=To%20be", "Look there.")
    assert exercise.text == "def f(): ..." and exercise.tags == ("exercise",)
    assert question.title == "Why?" and question.text.startswith("Because.") and "```python" in question.text
    assert last.text == "The end."


def test_a_lesson_that_lacks_its_title_says_so():
    with pytest.raises(ValueError, match="nothing about its title"):
        parse_lesson("x", SOURCE.replace("title: A title\n", ""))


@pytest.mark.parametrize("name", ["nothing", "../lesson", ""])
def test_an_unknown_lesson_names_those_there_are(name):
    with pytest.raises(ValueError, match="There is no lesson"):
        read_lesson(name)


def test_cells_share_names_and_show_what_they_compute():
    runner = CellRunner()
    assert runner.run("import torch\nx = torch.arange(3)\nprint('hello')").text == "hello\n"
    assert runner.run("x.sum()").text == "tensor(3)\n"
    assert runner.run("x.sum();").text == ""
    shown = runner.run("from matplotlib import pyplot as plt\nplt.plot([1, 2]);")
    assert [figure[:4] for figure in shown.figures] == [b"\x89PNG"]
    returned = runner.run("from matplotlib.figure import Figure\nFigure()")
    assert [figure[:4] for figure in returned.figures] == [b"\x89PNG"] and not returned.text
    assert len(runner.run("plt.figure()").figures) == 1
    failed = runner.run("y = 1\nx / 'a'")
    assert "TypeError" in failed.error and "x / 'a'" in failed.error and "execute.py" not in failed.error
    assert "SyntaxError" in runner.run("def").error
    assert "NameError" in runner.run("def f(x: Missing): ...").error  # as a notebook has it
    assert runner.run("y").text == "1\n"


def test_check_says_what_is_wrong(monkeypatch, capsys):
    def checked(answer):
        checking.require_close(answer(torch.ones(2)), torch.tensor([2.0, 2.0]), "it should double")

    monkeypatch.setattr(checking, "found_check", lambda name: checked)

    def double(x):
        return 2 * x

    assert checking.check(double)
    answers = {
        "it returned None": lambda x: None,
        "not a tensor": lambda x: 2,
        "shape": lambda x: x[:1],
        "finite": lambda x: x / 0,
        "it should double (1 at [0], should be 2)": lambda x: x,
        "it raised ZeroDivisionError": lambda x: 1 / 0,
    }
    for said, answer in answers.items():
        assert not checking.check(answer)
        assert said in capsys.readouterr().out.splitlines()[-1]


def test_an_unknown_exercise_is_an_error():
    def no_such_exercise(): ...

    with pytest.raises(ValueError, match="keeps the name"):
        checking.found_check("no_such_exercise")


def test_lessons_are_found():
    assert all(read_lesson(name).title for name in lesson_names())
