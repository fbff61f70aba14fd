"""Write: continuations at the caret, chosen with the keyboard or by touch."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
from xml.etree import ElementTree

import pytest

import heedful
from heedful.cli import main
from support.stuck import STUCK

TEXT = "To be, or not to be"


UNHURRIED = {"seconds": 10}  # a busy machine must have all three ready


def suggested(page, n=3):
    """The continuations, once all are there."""
    page.locator("[role=listbox][aria-label=Continuations][aria-busy=false]").wait_for()
    options = page.get_by_role("listbox", name="Continuations").get_by_role("option")
    assert page.get_by_role("listbox", name="Continuations").evaluate(
        "e => e.scrollHeight <= e.clientHeight"
    )  # no row cut
    assert options.count() == n
    return options


def press_tab_at_the_end(page):
    page.get_by_label("Text").focus()
    page.keyboard.press("Control+End")
    page.keyboard.press("Tab")


def test_tab_offers_three_and_enter_accepts_one(visit, open_tab, page):
    open_tab("write", model="shakespeare", text=TEXT, **UNHURRIED)
    press_tab_at_the_end(page)
    options = suggested(page)
    said = [re.sub(r"[\s…⏎]+", " ", option.text_content()).strip() for option in options.all()]
    assert len(set(said)) == 3
    assert all(re.search(r"[\d.<]+ % per token, ?(1 in .+|[\d.]+ %) as a whole$", one) for one in said)
    page.keyboard.press("ArrowDown")
    assert options.nth(1).get_attribute("aria-selected") == "true"
    assert page.get_by_label("Text").get_attribute("aria-activedescendant") == options.nth(1).get_attribute("id")
    page.keyboard.press("Enter")
    text = page.get_by_label("Text").input_value()
    assert text.startswith(TEXT) and said[1].startswith(" ".join(text.removeprefix(TEXT).split()))
    assert page.get_by_role("listbox").count() == 0
    assert page.evaluate("document.activeElement.ariaLabel") == "Text"
    page.wait_for_function("text => new URLSearchParams(location.hash.split('?')[1]).get('text') === text", arg=text)
    assert page.locator(".mirror .marked").inner_text().strip() == text.removeprefix(TEXT).strip()
    page.wait_for_function("() => location.hash.includes('wrote=')")
    again = visit()
    again.goto(page.url)  # and who wrote what
    again.locator(".mirror .marked").wait_for()
    assert again.locator(".mirror .marked").inner_text() == page.locator(".mirror .marked").inner_text()
    page.keyboard.press("Control+z")
    assert page.get_by_label("Text").input_value() == TEXT
    assert page.locator(".mirror .marked").count() == 0


def test_the_percentage_is_the_mean_of_the_models_own_probabilities(open_tab, page):
    open_tab("write", model="shakespeare", text=TEXT, temperature=0.5, top_p=0.8, **UNHURRIED)
    press_tab_at_the_end(page)
    shown = suggested(page).first.locator("b").inner_text()
    page.keyboard.press("Enter")
    text = page.get_by_label("Text").input_value()
    [result] = heedful.load("shakespeare").complete(text, max_tokens=1, logprobs=0, echo=True)
    scores = [score.logprob for score in result.prompt_scores[len(TEXT) :]]  # a token is a letter
    mean = 100 * math.exp(sum(scores) / len(scores))
    assert float(shown.removesuffix(" %")) == pytest.approx(mean, abs=2)  # bfloat16, read at once or one by one


def test_tab_again_offers_three_more_and_escape_lets_go(open_tab, page):
    open_tab("write", model="shakespeare", text=TEXT, temperature=1.2, **UNHURRIED)
    press_tab_at_the_end(page)
    suggested(page)
    page.keyboard.press("Tab")
    options = suggested(page, 6)
    assert options.nth(3).get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowUp")
    assert options.nth(2).get_attribute("aria-selected") == "true"
    page.keyboard.press("Escape")
    assert page.get_by_role("listbox").count() == 0
    assert page.get_by_label("Text").input_value() == TEXT
    page.keyboard.press("Tab")  # nobody is kept in the text
    assert page.get_by_role("listbox").count() == 0
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_a_click_accepts_at_the_caret_and_typing_dismisses(open_tab, page):
    open_tab("write", model="shakespeare", text="My lord, come here.", **UNHURRIED)
    page.get_by_label("Text").focus()
    page.keyboard.press("Control+Home")
    for _ in "My lord":
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    suggested(page).nth(2).click()
    text = page.get_by_label("Text").input_value()
    assert text.startswith("My lord") and text.endswith(", come here.") and len(text) > len("My lord, come here.")
    page.keyboard.press("Tab")
    suggested(page)
    page.keyboard.type("x")
    assert page.get_by_role("listbox").count() == 0
    assert len(page.get_by_label("Text").input_value()) == len(text) + 1


def test_what_is_ready_when_the_time_is_over_is_shown(visit, open_tab):
    page = visit()
    page.add_init_script(STUCK)
    open_tab("write", on=page, text=TEXT, seconds=0.3)
    press_tab_at_the_end(page)
    options = suggested(page)
    assert [option.locator(".words").inner_text() for option in options.all()] == [
        "w00 w01",
        "w10 w11",
        "w20 w21",
    ]
    assert options.first.locator("b").inner_text() == "37 %"  # exp(-1)
    page.keyboard.press("Enter")
    assert page.get_by_label("Text").input_value() == TEXT + " w00 w01"


def test_a_blank_page_asks_for_a_word(open_tab, page):
    open_tab("write", model="shakespeare", text=TEXT, **UNHURRIED)
    page.get_by_role("button", name="Blank page").click()
    page.keyboard.press("Tab")
    page.get_by_text("Write a word first").wait_for()
    page.keyboard.type("The")
    page.keyboard.press("Tab")
    suggested(page)


def test_a_text_longer_than_the_model_can_read(open_tab, page):
    open_tab("write", model="tiny", text=TEXT * 30, length=8, **UNHURRIED)
    press_tab_at_the_end(page)
    suggested(page)
    page.get_by_text("tiny reads 32 tokens at once: the last 24 before the caret were read.").wait_for()


def test_by_touch_on_a_narrow_screen(visit, open_tab):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    open_tab("write", on=page, model="shakespeare", text="What light through yonder window breaks", **UNHURRIED)
    page.get_by_role("button", name="Suggest").tap()
    options = suggested(page)
    box = page.locator(".popup").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_text("Tap a continuation to take it").wait_for()
    assert page.locator("kbd:visible").count() == 0  # nothing is said of keys
    options.first.tap()
    assert len(page.get_by_label("Text").input_value()) > len("What light through yonder window breaks")


def test_an_error_is_said_where_it_is_looked_for(open_tab, page, problems):
    open_tab("write", model="shakespeare", text=TEXT, **UNHURRIED)
    page.route(re.compile("/v1/completions"), lambda route: route.abort())
    press_tab_at_the_end(page)
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    page.keyboard.press("Escape")
    assert all("Failed to load resource" in said for said in problems)
    problems.clear()


@pytest.mark.parametrize("language", ["Python", "Command line"])
def test_the_code_that_is_shown_runs(open_tab, page, tmp_path, capsys, language):
    open_tab("write", model="tiny", text='"To be\'s"\n$HOME \\ ', length=5)
    page.get_by_role("button", name="View code").click()
    page.get_by_role("tab", name=language).click()
    code = page.get_by_role("dialog").locator("pre").inner_text()
    if language == "Python":
        (tmp_path / "code.py").write_text(code)
        runpy.run_path(str(tmp_path / "code.py"))
        assert capsys.readouterr().out.count("% per token: ") == 3
    else:
        assert main(shlex.split(code)[1:]) == 0
        assert len(json.loads(capsys.readouterr().out)["choices"]) == 3


def test_what_was_offered_can_be_saved(open_tab, page):
    open_tab("write", model="shakespeare", text=TEXT, **UNHURRIED)
    press_tab_at_the_end(page)
    suggested(page)
    page.keyboard.press("Enter")
    saved = {}
    for item in ("Numbers (CSV)", "Text (TXT)", "Drawing (SVG)"):
        page.get_by_role("button", name="Save").click()
        with page.expect_download() as got:
            page.get_by_role("menuitem", name=item).click()
        saved[item] = got.value.path().read_text(encoding="utf-8")
    assert saved["Numbers (CSV)"].startswith("before,continuation,tokens,per_token,logprob,accepted")
    assert saved["Numbers (CSV)"].count(",true") == 1
    assert saved["Text (TXT)"] == page.get_by_label("Text").input_value()
    drawn = "".join(ElementTree.fromstring(saved["Drawing (SVG)"]).itertext())
    text = "".join(saved["Text (TXT)"].split()).replace("\u200b", "")
    assert "".join(drawn.split()) == f"{text}Write,shakespeare"  # its caption
    assert 'fill="rgb(251, 234, 223)"' in saved["Drawing (SVG)"]  # what the model wrote is tinted
