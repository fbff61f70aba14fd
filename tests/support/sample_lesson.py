"""A lesson of a few lines, which stands for those that ship."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heedful.lessons import lesson

SOURCE = '''---
title: A sample
chapter: Before Transformers
order: 10
about: a lesson of the tests
kernelspec: {name: python3, display_name: Python 3}
---
# A sample
A *lesson* with a formula, $\\frac{QK^\\top}{\\sqrt{d}}$.

```{code-cell} python
import math
from heedful.lessons import check
print("hello from the cell")
```

Then a picture:

```{code-cell} python
from matplotlib import pyplot as plt

def half(x):
    return x / 2

SIZE = 3
plt.figure(figsize=(2, 1))
plt.plot([1, 2, SIZE]);
```

```{view} #/attention?model=tiny&text=To%20be
Look at the diagonal.
```

## Exercise: double
Write `doubled_in_tests`.

```{code-cell} python
:tags: [exercise]
def doubled_in_tests(x):
    """Twice x."""
    raise NotImplementedError

check(doubled_in_tests)
```

```{code-cell} python
:tags: [solution, hide-input]
def doubled_in_tests(x):
    return 2 * x

check(doubled_in_tests)
```

```{code-cell} python
6 * 7
```

## Questions
```{dropdown} Why?
Because of $x_1$.
```

## Read on
A paper, section 3.
'''
# A child process of the server that knows the check of the sample.
CHILD = """
import os
from heedful.lessons import checking, child

def check_doubled_in_tests(answer):
    checking.require(answer(2) == 4, f"twice 2 is 4, not {answer(2)}")

checking.found_check = lambda name: check_doubled_in_tests
os._exit(child.do_job())
"""


@contextmanager
def lessons_in(folder: Path, **sources: str) -> Iterator[Path]:
    """Only these lessons, in a folder, in place of those that ship."""
    folder.mkdir(exist_ok=True)
    for name, source in (sources or {"sample": SOURCE}).items():
        folder.joinpath(f"{name.replace('_', '-')}.md").write_text(source, encoding="utf-8")
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "FOLDER", folder)
        yield folder
    forget()


def forget() -> None:
    lesson.lesson_names.cache_clear()
    lesson.read_lesson.cache_clear()
