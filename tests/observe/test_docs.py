"""docs/inside.md: its Python runs, and its commands are commands."""

from __future__ import annotations

from heedful.cli import parse_arguments
from heedful.observe.views import VIEWS
from support.documents import blocks, commands, read

PAGE = "docs/inside.md"


def test_the_examples_run(capsys):
    found = blocks(PAGE, "python")
    assert len(found) >= 4
    exec(compile("\n".join(found), PAGE, "exec"), {})
    assert "torch.Size([6, 1" in capsys.readouterr().out


def test_the_commands_exist():
    found = [
        words for code in (*blocks(PAGE), *blocks(PAGE, "sh")) for words in commands(code) if words[0] == "heedful"
    ]
    assert len(found) >= 5
    for words in found:
        parse_arguments(words[1:])
    for what in VIEWS:
        assert what in read(PAGE)
