"""How the page gets into the package: when it is made anew, and from what."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The build step, about a tree of its own: the page as old as its source."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    web, page = tmp_path / "web", tmp_path / "page"
    for path in (
        web / "src" / "main.ts",
        web / "package.json",
        web / "node_modules" / "x.js",
        page / "index.html",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        os.utime(path, (1000, 1000))
    monkeypatch.setattr(module, "WEB", web)
    monkeypatch.setattr(module, "PAGE", page)
    return module


def test_a_page_no_older_than_its_sources_is_kept(hook):
    assert hook.is_fresh() and hook.build() is False


def test_a_changed_source_makes_it_old_but_no_installed_package_does(hook):
    os.utime(hook.WEB / "node_modules" / "x.js", (2000, 2000))
    assert hook.is_fresh()
    os.utime(hook.WEB / "src" / "main.ts", (2000, 2000))
    assert not hook.is_fresh()


def test_a_page_without_sources_is_kept_and_neither_is_an_error(hook):
    shutil.rmtree(hook.WEB)  # as in a package that others made
    assert hook.build() is False
    shutil.rmtree(hook.PAGE)
    with pytest.raises(SystemExit, match="no built page"):
        hook.build()


def test_a_build_that_fails_says_what_npm_said_and_how_to_do_without(hook, monkeypatch):
    program = hook.WEB / "npm"
    program.write_text("#!/bin/sh\necho no such version\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(hook, "npm", lambda: _given(str(program)))
    with pytest.raises(SystemExit, match=r"(?s)npm ci.*no such version.*HEEDFUL_PAGE=skip"):
        hook.build(force=True)


@pytest.mark.parametrize(
    ("version", "enough"),
    [("v18.20.1", False), ("v20.18.0", False), ("v20.19.0", True), ("v21.5.0", False), ("v24.1.0", True)],
)
def test_only_a_node_that_can_build_it_is_used(hook, tmp_path, version, enough):
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
    node.chmod(0o755)
    assert hook.new_enough(str(node)) is enough
    assert not hook.new_enough(None)


def test_what_it_is_built_with_is_exact_and_names_no_registry():
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    wanted = package["dependencies"] | package["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values()), wanted
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not any("resolved" in entry for entry in lock["packages"].values())
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)


def test_no_text_is_ever_put_in_as_markup():
    sources = [*WEB.glob("src/**/*.svelte"), *WEB.glob("src/**/*.ts"), WEB / "index.html"]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        for word in (
            "{@html",
            "innerHTML",
            "outerHTML",
            "document.write",
            "eval(",
            "new Function",
            "insertAdjacentHTML",
        ):
            assert word not in text, f"{path} has {word}"
        assert not re.search(r"https?://(?!www\.w3\.org|127\.0\.0\.1|localhost|example)", text), f"{path} names a site"


def test_git_ignores_what_is_built():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    paths = ["web/node_modules/x", "src/heedful/serve/page/index.html"]
    found = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True).stdout
    assert found.split() == paths


def _given(program):
    from contextlib import nullcontext

    return nullcontext((program, dict(os.environ)))
