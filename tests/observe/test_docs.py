"""docs/inside.md: its Python runs, and its commands are commands."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

from heedful.cli import parse_arguments
from heedful.observe.views import VIEWS

PAGE = Path(__file__).parents[2] / "docs" / "inside.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    assert len(blocks) >= 4
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(file))
    assert "torch.Size([6, 1" in capsys.readouterr().out


def test_the_commands_exist():
    found = re.findall(r"^heedful .*$", TEXT, flags=re.M)
    assert len(found) >= 5
    for command in found:
        parse_arguments(shlex.split(command)[1:])
    for what in VIEWS:
        assert what in TEXT
