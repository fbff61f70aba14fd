"""The built documentation as `heedful serve` has it, in a browser that allows nothing but what its policy allows."""

from __future__ import annotations

import pytest

from heedful.serve.playground.docs import DOCUMENTATION_FOLDER

pytestmark = pytest.mark.skipif(
    not (DOCUMENTATION_FOLDER / "index.html").is_file(), reason="the documentation is not built: make docs"
)
PAGES = (
    "", "start.html", "families/transformer.html", "benchmarks.html", "api.html", "reference/commands.html",
    "reference/recipes.html", "source/nn/attention.html", "lessons/attention-by-hand.html", "project/architecture.html",
)  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_shown_whole(visit, server, width):
    page = visit(viewport={"width": width, "height": 800})
    for name in PAGES:
        page.goto(f"{server.url}/docs/{name}")
        page.get_by_role("heading", level=1).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        broken = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == [], name


def test_search_finds_pages_and_names(visit, server):
    page = visit()
    page.goto(f"{server.url}/docs/")
    page.get_by_role("textbox").first.fill("attention_rollout")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="heedful.observe.attention.attention_rollout").wait_for()


def test_a_lesson_leads_to_the_playground_of_the_same_server(visit, server):
    page = visit()
    page.goto(f"{server.url}/docs/lessons/attention-by-hand.html")
    link = page.locator("a.playground-link").first
    assert link.evaluate("link => link.href").startswith(f"{server.url}/#/")
    link.click()
    page.get_by_role("heading", level=1).wait_for()
    assert page.url.startswith(f"{server.url}/#/")
