"""The documents: their links lead somewhere, and lists in them are complete."""

from __future__ import annotations

import re

import pytest

from heedful.cli import COMMANDS
from heedful.models.registry import FAMILIES
from heedful.observe.views import VIEWS
from support.documents import ROOT, documents, read


@pytest.mark.parametrize("page", [*documents(), "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_paths_lead_somewhere(page):
    text = read(page)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        generated = target.startswith("reference/")  # of the documentation, from parsers and files
        assert generated or target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"`((?:src|docs|tests|benchmarks)/[^`*\s]*)`", text):
        assert "NAME" in target or (ROOT / target).exists(), target


@pytest.mark.parametrize("page", documents())
def test_commands_in_the_text_are_commands(page):
    named = re.findall(r"`heedful ([a-z-]+)[^`]*`", read(page))
    assert set(named) <= COMMANDS.keys()


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 150


def test_every_view_is_told():
    assert [view for view in VIEWS if view not in read("docs/inside.md")] == []


def test_every_family_has_a_page():
    families = {path.stem for path in (ROOT / "docs/families").glob("*.md")} - {"index"}
    listed = set(re.findall(r"\]\((\w+)\.md\)", read("docs/families/index.md")))
    assert families == listed == set(FAMILIES)
