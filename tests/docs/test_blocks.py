"""README.md and docs/: every code block runs, in the order of its page; see reader.py."""

from __future__ import annotations

import io

import pytest

from docs.reader import ADDRESS, Reader
from support.documents import documents, fenced, read

EXECUTED = {"sh", "python"}
DATA = {"json", "toml", "yaml", "text", "markdown"}
PAGES = [page for page in documents() if EXECUTED & {block.language for block in fenced(page)}]
# What a page says that its code prints.
PRINTED = {
    "README.md": ["dog", "queen", "torch.Size([1, 4, 10, 10])"],
    "docs/generation.md": ["124439808", "174,604,259,328", "XdXac"],
    "docs/inside.md": ["torch.Size([6, 1"],
    "docs/jobs.md": ["queen", "[Paris](LOC)", "A dog", "torch.Size([2, 1, 8, 8])", '"pixel": 63'],
}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page, workspace, request, monkeypatch, capsys, record_property):
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a command that would ask for prompts gets none
    reader = Reader(page, request.getfixturevalue("server") if ADDRESS in read(page) else ADDRESS)
    for block in fenced(page):
        reader.follow(block)
    printed = capsys.readouterr().out
    assert [text for text in PRINTED.get(page, []) if text not in printed] == []
    record_property("documents", dict(reader.done))


@pytest.mark.parametrize("page", documents())
def test_every_block_has_a_language(page):
    """So that none is left out: what is neither run nor data is a directive of the documentation."""
    unknown = [block for block in fenced(page) if block.language not in EXECUTED | DATA]
    assert [block for block in unknown if not block.language.startswith("{")] == []
