"""Learn: every lesson in the page, its cells and its live views; exercises, progress, narrow screens.

Of the lessons that ran when the documentation was built, the page has the results, but for those of RUN_HERE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import pytest

from heedful.lessons import lesson_names, read_lesson
from support.browser import in_address
from support.built_lessons import keep_built
from support.serving import Server
from web.conftest import BUSY, PAGE, address, shipped_names

RUN_SECONDS = 300  # that the server gives to a lesson
RUN_HERE = {"attention-by-hand", "image-gpt", "tokens"}  # as in a clone whose documentation was never built
NAME = "attention-by-hand"
RIGHT = "def split_heads(x, n_heads):\n    return x.unflatten(-1, (n_heads, -1)).transpose(0, 1)\n\ncheck(split_heads)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All that ships, with answers to exercises, and a cache of its own."""
    if not PAGE.is_file():
        pytest.skip("the playground's page is not built: make page")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        keep_built(name for name in lesson_names() if name not in RUN_HERE)
    with Server(*shipped_names(), "--lazy", XDG_CACHE_HOME=str(cache)) as started:
        yield started


def has_run(page: Any) -> Any:
    """The page, once all cells of its lesson have run."""
    page.locator("article").wait_for()
    page.wait_for_function("() => !document.querySelector('.running')", timeout=1000 * RUN_SECONDS)
    return page


def live_view(page: Any) -> Any:
    """The frame of the view that is shown, once all in it is drawn."""
    frame = page.locator("iframe:visible").element_handle().content_frame()
    frame.get_by_role("heading", level=1).wait_for()
    frame.wait_for_function("busy => !document.querySelector(busy)", arg=BUSY, timeout=60_000)
    return frame


@pytest.mark.parametrize("name", lesson_names())
def test_a_lesson_runs_in_the_page_and_its_views_are_alive(open_tab, page, name):
    lesson = read_lesson(name)
    open_tab("learn", lesson=name)
    assert page.get_by_role("heading", level=1).inner_text() == lesson.title
    has_run(page)
    assert page.get_by_role("alert").count() == 0
    shown = [i for i, part in enumerate(lesson.parts) if part.kind == "code" and not part.tags]
    drawn = [i for i in shown if page.locator(f"[data-part='{i}'] :is(.output, img)").count()]
    assert drawn, "no cell shows anything"
    text = "".join(page.locator("article .markdown").all_inner_texts())
    assert "\\" not in text.replace("\\n", ""), "a formula that was not understood"
    for i, part in enumerate(lesson.parts):
        if part.kind != "view":
            continue
        page.locator(f"[data-part='{i}']").get_by_role("button", name="Try it").click()
        frame = live_view(page)
        assert frame.get_by_role("alert").count() == 0
        assert frame.get_by_text("not served here").count() == 0
        tab, _, query = part.title.removeprefix("#/").partition("?")
        assert frame.locator(f"#panel-{tab}").count() == 1
        wanted = dict(parse_qsl(query))
        said = dict(parse_qsl(frame.evaluate("(dispatchEvent(new Event('blur')), location.hash)").partition("?")[2]))
        assert said == said | {key: value for key, value in wanted.items() if key in said}
        assert said.get("model") == wanted.get("model")


def test_an_answer_is_told_what_is_wrong_and_a_right_one_is_remembered(open_tab, page):
    open_tab("learn", lesson=NAME)
    exercise = page.get_by_role("region", name="Exercise: split_heads")
    box = exercise.get_by_role("textbox")
    exercise.get_by_role("button", name="Check").click()
    exercise.get_by_text("✗ split_heads: not written yet").wait_for(timeout=60_000)
    box.fill(RIGHT.replace(".transpose(0, 1)", ""))
    box.press("Control+Enter")
    exercise.get_by_text("✗ split_heads: the shape is (T, H, D): heads come first").wait_for(timeout=60_000)
    box.fill(RIGHT)
    exercise.get_by_role("button", name="Check").click()
    exercise.get_by_text("✓ split_heads: right").wait_for(timeout=60_000)
    page.reload()
    exercise.get_by_text("Solved").wait_for()
    assert box.input_value() == RIGHT
    assert exercise.get_by_text("unflatten").count() == 0
    exercise.get_by_role("button", name="Show the solution").click()
    assert "def split_heads" in exercise.locator("pre").inner_text()
    exercise.get_by_role("button", name="Begin anew").click()
    assert "raise NotImplementedError" in box.input_value()
    page.get_by_role("link", name="All lessons").first.click()
    page.locator("li", has=page.get_by_role("link", name="Attention by hand")).get_by_text(
        "1 of 3 exercises solved"
    ).first.wait_for()


def test_the_box_indents_and_can_be_left_by_the_keyboard(open_tab, page):
    open_tab("learn", lesson=NAME)
    box = page.get_by_role("region", name="Exercise: split_heads").get_by_role("textbox")
    box.fill("")
    page.keyboard.type("def f():\nreturn 1")
    assert box.input_value() == "def f():\n    return 1"
    page.keyboard.press("Shift+Tab")
    assert box.input_value() == "def f():\nreturn 1"
    page.keyboard.press("Control+z")
    assert box.input_value() == "def f():\n    return 1"
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Check"


def test_a_server_that_runs_no_answers_says_how_one_is_started(open_tab, page, server):
    told = page.request.get(f"{server.url}/api/lessons").json()
    page.route("**/api/lessons", lambda route: route.fulfill(json=told | {"exercises": False, "reason": "no"}))
    open_tab("learn")
    page.get_by_text("does not check answers").wait_for()
    open_tab("learn", lesson=NAME)
    exercise = page.get_by_role("region", name="Exercise: split_heads")
    assert exercise.get_by_role("button", name="Check").is_disabled()
    assert exercise.locator(".command code").inner_text() == f"heedful learn {NAME} --page"


def test_the_printed_address_has_the_token_and_a_bare_one_says_what_to_do(browser, server):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    try:
        page.goto(address(server.url, "learn", lesson=NAME))
        exercise = page.get_by_role("region", name="Exercise: split_heads")
        exercise.get_by_text(re.compile("open the address that .?heedful serve.? printed")).wait_for()
        assert exercise.get_by_role("button", name="Check").is_disabled()
        page.goto(address(server.url, "runs"))
        page.get_by_text(re.compile("open the address that .?heedful serve.? printed")).wait_for()
        page.goto(f"{server.url}/?token={server.token}#/learn?lesson={NAME}")
        exercise.get_by_role("button", name="Check").wait_for()
        page.wait_for_function("() => !location.href.includes('token')")
        assert page.url.startswith(f"{server.url}/#/learn?lesson={NAME}")
        assert exercise.get_by_role("button", name="Check").is_enabled()
        other = context.new_page()  # another window, opened by a bare address
        other.goto(address(server.url, "learn", lesson=NAME))
        other.get_by_role("button", name="Check").first.wait_for()
        assert other.get_by_role("button", name="Check").first.is_enabled()
    finally:
        context.close()


def was_seen(page: Any, lesson: str, n_parts: int = 1) -> None:
    """Wait for the page to have noticed what is in its window, which it does after it was drawn."""
    known = "JSON.parse(localStorage.getItem('heedful-learn') ?? '{}')"
    page.wait_for_function(f"([name, n]) => {known}[name]?.seen >= n", arg=[lesson, n_parts])


def test_the_list_remembers_what_was_read(open_tab, page, server):
    open_tab("start")
    page.get_by_role("link", name="Learn how it works").click()
    first, second = (read_lesson(name) for name in lesson_names()[:2])
    page.get_by_role("link", name=f"Begin with {first.title}").click()
    was_seen(page, first.name)
    page.get_by_role("navigation", name="Lessons").scroll_into_view_if_needed()
    was_seen(page, first.name, len(first.parts))
    page.get_by_role("link", name=f"{second.title} →").click()
    page.get_by_role("heading", level=1, name=second.title).wait_for()
    was_seen(page, second.name)
    page.go_back()
    page.get_by_role("heading", level=1, name=first.title).wait_for()
    page.go_back()
    page.get_by_role("heading", level=1, name="Learn").wait_for()
    row = page.locator(".lesson", has=page.get_by_role("link", name=first.title, exact=True))
    row.get_by_text("Read").wait_for()
    page.get_by_role("link", name=f"Go on with {second.title}").wait_for()
    page.reload()
    row.get_by_text("Read").wait_for()


def test_a_link_has_the_position_and_the_view_follows_it(open_tab, page):
    lesson = read_lesson("tokens")
    views = [i for i, part in enumerate(lesson.parts) if part.kind == "view"]
    open_tab("learn", lesson="tokens", part=views[-1])
    has_run(page)
    page.wait_for_function("at => document.querySelector(`[data-part='${at}'] .now`)", arg=views[-1])
    assert page.locator(f"[data-part='{views[-1]}']").is_visible()
    frame = live_view(page)
    frame.get_by_label("Text", exact=True).fill("My own words")
    page.locator("[data-part='0']").scroll_into_view_if_needed()
    page.wait_for_function("at => document.querySelector(`[data-part='${at}'] .now`)", arg=views[0])
    assert int(in_address(page, "part") or 0) < views[0]
    page.locator(f"[data-part='{views[-1]}']").get_by_role("button", name="Try it").click()
    frame = live_view(page)
    assert frame.get_by_label("Text", exact=True).input_value() == "My own words"
    frame.get_by_label("Model").first.select_option("tiny")
    page.wait_for_timeout(400)
    page.locator("aside a:visible", has_text="Open in its tab").click()
    page.locator("#panel-steps h1").wait_for()
    assert page.get_by_label("Text", exact=True).input_value() == "My own words"
    assert page.get_by_label("Model").first.input_value() == "tiny"


def test_on_a_narrow_screen_the_view_is_below_its_text(visit, open_tab):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    open_tab("learn", on=page, lesson="distillation")  # with a table
    assert page.locator("iframe").count() == 0
    page.get_by_role("button", name="Try it").first.click()
    assert live_view(page).evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Close").click()
    assert page.locator("iframe").count() == 0


def test_a_lesson_that_does_not_exist(page, server, problems):
    page.goto(address(server.url, "learn", lesson="../<b>x</b>", part="x"))
    page.get_by_role("alert").wait_for()
    page.get_by_role("link", name="All lessons").click()
    page.get_by_role("link", name="Begin with").wait_for()
    assert all("404" in said for said in problems)
    problems.clear()
