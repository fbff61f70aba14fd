"""RESULTS.md: every command that it quotes exists, with its flags, and so does every file."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from heedful.cli import COMMANDS, parse_arguments

ROOT = Path(__file__).parents[1]
TEXT = re.sub(r"```.*?```", "", (ROOT / "RESULTS.md").read_text(encoding="utf-8"), flags=re.DOTALL)
CODE = sorted({" ".join(code.split()) for code in re.findall(r"`([^`]+)`", TEXT)})
SCRIPTS = [c for c in CODE if re.match(r"([A-Z_]+=\S+ )*(python )?benchmarks/\S+\.py", c)]
OURS = [c for c in CODE if re.match(r"heedful [a-z]", c)]


def flags(script: Path) -> set[str]:
    """The options that a script, or what it imports beside it, adds to a parser."""
    found: set[str] = set()
    for path in (script, *(ROOT / "benchmarks/peers").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return found


def test_there_are_commands():
    assert len(SCRIPTS) > 15 and len(OURS) > 5
    for line in TEXT.splitlines():
        told = "benchmarks/" in line or "heedful eval" in line
        assert told or not re.search(r"BLEU|exact, F1", line), line


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_quoted_script_exists_and_has_the_flags(command):
    words = [w for w in shlex.split(command) if not re.match(r"[A-Z_]+=", w) and w != "python"]
    assert (ROOT / words[0]).is_file()
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= flags(ROOT / words[0])


@pytest.mark.parametrize("command", OURS)
def test_a_quoted_command_exists_and_has_the_flags(command, capsys):
    _, name, *rest = shlex.split(command)
    assert name in COMMANDS
    with pytest.raises(SystemExit):
        parse_arguments([name, "--help"])
    said = capsys.readouterr().out
    assert all(word.partition("=")[0] in said for word in rest if word.startswith("--"))


def test_quoted_files_and_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for code in CODE:
        if re.fullmatch(r"(tests|benchmarks|docs|models)/[\w/.-]+", code):
            assert (ROOT / code).exists() or (ROOT / "src/heedful" / code).exists(), code
        if re.fullmatch(r"make [a-z]+", code):
            assert re.search(rf"^{code.split()[1]}:", makefile, re.MULTILINE), code
