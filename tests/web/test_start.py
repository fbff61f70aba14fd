"""Start: six cards, each computed by a model that is served, and the coach that they open with."""

from __future__ import annotations

from urllib.parse import quote

from support.browser import address, in_address, settled
from support.playground import exact

GUIDE = "Guide"
SCRIPT = """# My lesson

---
open: #/fill?model=bert-books&text=The%20cat%20sat.
until: text contains dog

Write **dog**, <b>not</b> cat.

---

The end of [it](#/write?model=tiny).
"""


def guide(page):
    return page.get_by_role("region", name=GUIDE)


def test_the_page_opens_on_six_cards_that_were_computed(open_tab, page):
    open_tab()
    cards = page.locator(".cards > li")
    assert cards.count() == 6 and cards.get_by_role("link").count() == 6
    assert page.get_by_text("Not computed here").count() == 0
    best = exact("bert-books").fill("She drank a glass of _.").top(k=1)[0][0]
    first = cards.first.get_by_role("list", name="Likeliest words").first
    assert first.get_by_role("listitem").first.inner_text().split()[0] == best
    assert cards.nth(1).get_by_role("img").get_attribute("aria-label").endswith("6 2 9 5 1 4 1 3")
    models = page.get_by_role("region", name="Models on this server")
    models.get_by_role("link", name="reader").click()
    settled(page)
    assert page.get_by_label("Model").first.input_value() == "reader"
    assert guide(page).count() == 0


def test_a_card_opens_its_tab_with_a_coach_that_goes_on_by_itself_and_by_keys(open_tab, page):
    open_tab()
    page.get_by_role("link", name="Change one word").click()
    settled(page)
    guide(page).get_by_text("Every word here is a button").wait_for()
    page.get_by_role("button", name="wine", exact=True).first.click()
    guide(page).get_by_text("Done").wait_for()
    guide(page).get_by_text("In the text, change").wait_for()  # the next step, which comes by itself
    page.wait_for_function("location.hash.includes('coach_step=2')")  # the address follows a moment later
    page.reload()
    guide(page).get_by_text("In the text, change").wait_for()
    guide(page).focus()
    page.keyboard.press("ArrowRight")
    guide(page).get_by_text("choose Two sentences").wait_for()
    page.keyboard.press("ArrowLeft")
    guide(page).get_by_text("In the text, change").wait_for()
    assert in_address(page, "coach") == "one-word" and in_address(page, "coach_step") == "2"
    page.keyboard.press("Escape")
    guide(page).wait_for(state="detached")
    assert in_address(page, "coach") is None and in_address(page, "blank") is not None
    page.go_back()
    page.get_by_role("heading", name="Start").wait_for()


def test_a_link_carries_a_script_that_a_teacher_wrote(page, server):
    page.goto(f"{server.url}/#/?coach={quote(SCRIPT)}")
    guide(page).get_by_text("Write dog, <b>not</b> cat.").wait_for()
    page.locator("#panel-fill h1").wait_for()  # where the first step begins
    settled(page)
    assert page.get_by_label("Text", exact=True).input_value() == "The cat sat."
    page.get_by_label("Text", exact=True).fill("The dog sat.")
    guide(page).get_by_role("link", name="it").click()
    page.locator("#panel-write h1").wait_for()
    guide(page).get_by_text("The end of it.").wait_for()  # a link leaves the coach where it is
    guide(page).get_by_role("button", name="Edit").click()
    box = page.get_by_role("dialog").get_by_label("Script")
    assert box.input_value() == SCRIPT
    box.fill(SCRIPT.replace("The end", "until: nonsense\n\nThe end"))
    page.get_by_role("dialog").get_by_text("Not understood").wait_for()
    box.fill(SCRIPT.replace("The end", "The finish"))
    page.get_by_role("dialog").get_by_role("button", name="Use it").click()
    guide(page).get_by_text("The finish").wait_for()
    assert "The finish" in (in_address(page, "coach") or "")
    guide(page).get_by_role("button", name="Finish").click()
    page.get_by_role("heading", name="Start").wait_for()
    assert "coach" not in address(page)


def test_cards_without_a_model_say_what_they_need(open_tab, page, server):
    served = page.request.get(f"{server.url}/api/models").json()
    served["models"] = [model for model in served["models"] if model["id"] == "tiny"]
    page.route("**/api/models", lambda route: route.fulfill(json=served))
    open_tab("start")
    assert page.get_by_text("and none is served here").count() == 4
    assert page.locator(".cards > li").first.get_by_role("link").inner_text() == "Inside one prediction"
    assert page.locator(".cards").get_by_role("link").count() == 2
