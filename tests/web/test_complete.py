"""Complete: a text that goes on in its own box, its probabilities, and the tree of what else it might have become."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import runpy
import shlex

import pytest

import heedful
from heedful.cli import main
from support.stuck import STUCK

TEXT = "To be, or not to be"


def text_of(page) -> str:
    return page.get_by_label("Text", exact=True).input_value()


def go_on(page, button="Continue"):
    page.get_by_role("button", name=button).click()
    page.get_by_role("button", name="Continue").and_(page.locator(":enabled")).wait_for()


def tokens_of(page):
    listbox = page.get_by_role("listbox", name="Tokens and their probabilities")
    listbox.wait_for()
    return listbox.get_by_role("option")


def shown_text(page) -> str:
    """What the tokens spell."""
    return page.evaluate(
        """() => [...document.querySelectorAll('[role=listbox] [role=option]')]
            .map(token => [...token.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join('')).join('')"""
    )


def test_the_text_goes_on_in_the_same_box_as_the_api_says(open_tab, page, server):
    open_tab("complete", model="shakespeare", text=TEXT, seed=5, length=30, temperature=0.9, top_k=10)
    page.get_by_text("19 of 256 tokens").wait_for()
    go_on(page)
    how = {"model": "shakespeare", "seed": 5, "max_tokens": 30, "temperature": 0.9, "top_k": 10}
    reply = page.request.post(f"{server.url}/v1/completions", data={**how, "prompt": TEXT})
    wanted = reply.json()["choices"][0]["text"]
    assert text_of(page) == TEXT + wanted
    page.get_by_text("49 of 256 tokens").wait_for()
    page.wait_for_function(
        "text => new URLSearchParams(location.hash.split('?')[1]).get('text') === text", arg=TEXT + wanted
    )
    page.get_by_role("button", name="Undo").click()
    assert text_of(page) == TEXT
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Again").and_(page.locator(":enabled")).wait_for()
    assert text_of(page) == TEXT + wanted  # the seed is the same


def test_stop_keeps_what_has_come(visit, open_tab):
    page = visit()
    page.add_init_script(STUCK)
    open_tab("complete", on=page, text=TEXT)
    for stop in (
        lambda: page.get_by_role("button", name="Stop").click(),
        lambda: page.keyboard.press("Escape"),
    ):
        before = text_of(page)
        page.get_by_role("button", name="Continue").click()
        page.wait_for_function("() => document.querySelector('textarea').value.endsWith('w02')")
        stop()
        page.get_by_role("button", name="Continue").wait_for()
        assert text_of(page) == before + " w00 w01 w02"


def test_prompts_to_start_from(open_tab, page, server):
    served = page.request.get(f"{server.url}/api/models").json()
    for model in served["models"]:
        model["parameters"] *= 100  # as if it could learn from examples in its prompt
    page.route("**/api/models", lambda route: route.fulfill(json=served))
    open_tab("complete", model="shakespeare")
    names = page.get_by_label("Start from").locator("option").all_inner_texts()[1:]
    assert names == [
        "Story",
        "Question and answer",
        "Classification by examples",
        "Translation",
        "Language detection",
    ]
    for name in names:
        page.get_by_label("Start from").select_option(name)
        text = text_of(page)
        assert len(text) > 40
        few = name != "Story"
        page.wait_for_function("few => location.hash.includes('stop=') === few", arg=few)
        assert page.get_by_role("button", name="Remove ⏎").count() == few
    go_on(page)
    assert text_of(page).startswith(text)
    assert "\n" not in text_of(page).removeprefix(text)


def test_a_small_model_is_offered_what_it_goes_on_with_and_silence_is_explained(open_tab, page):
    open_tab("complete", model="shakespeare", length=5)
    names = page.get_by_label("Start from").locator("option:enabled").all_inner_texts()
    assert len(names) > 2 and page.get_by_label("Start from").locator("option:disabled").count() == 5
    for name in names:
        page.get_by_label("Start from").select_option(name)
        text = text_of(page)
        go_on(page)
        assert len(text_of(page)) > len(text), name
    text = "Q: Who wrote Hamlet?\nA: William Shakespeare.\n\nQ: What is the largest planet?\nA:"
    open_tab("complete", model="shakespeare", length=5, text=text, temperature=0, stop='["\\n"]')
    go_on(page)
    page.get_by_text("wrote nothing before the stop sequence “⏎”").wait_for()


def test_probabilities_are_the_models_own(open_tab, page):
    open_tab("complete", model="shakespeare", text=TEXT, probabilities="true")
    tokens = tokens_of(page)
    said = [token.get_attribute("aria-label") for token in tokens.all()]
    [result] = heedful.load("shakespeare").complete(TEXT, max_tokens=1, logprobs=5, echo=True)
    for label, letter, score in zip(said, TEXT, result.prompt_scores, strict=True):
        chance = None if score is None else math.exp(score.logprob)
        number = re.search(r", (?:< )?([\d.]+) %$", label)
        assert label[0] == letter.replace(" ", "·")
        assert (number is None) == (chance is None)
        if number and chance and chance > 0.0001:
            assert float(number[1]) == pytest.approx(100 * chance, rel=0.06)
    tokens.nth(4).hover()  # "e" after "To b"
    others = page.get_by_role("group", name="Alternatives to e")
    top = [(i, math.exp(p)) for i, p in result.prompt_scores[4].top]
    assert others.get_by_role("button").count() >= len(top)
    first = others.get_by_role("button").first.locator(".value").inner_text()
    assert float(first.removesuffix(" %")) == pytest.approx(100 * top[0][1], abs=2)


def test_an_alternative_branches_and_the_tree_can_be_walked(open_tab, page):
    open_tab("complete", model="shakespeare", text=TEXT, length=12, temperature=0, probabilities="true")
    tokens_of(page)
    go_on(page)
    first = shown_text(page)
    assert len(first) == len(TEXT) + 12
    tokens_of(page).nth(len(TEXT) + 3).hover()
    other = page.locator(".alternatives button:enabled").nth(1)
    letter = other.locator(".name").inner_text().replace("·", " ").replace("⏎", "\n")
    other.click()
    page.wait_for_function("n => document.querySelectorAll('[role=treeitem]').length === n", arg=4)
    page.get_by_role("button", name="Continue").wait_for()
    second = shown_text(page)
    assert second != first
    assert second.startswith(first[: len(TEXT) + 3] + letter) and len(second) == len(TEXT) + 4 + 12
    # prompt, what both begin with, the two ends: by keys alone
    tree = page.get_by_role("tree", name="Branches").get_by_role("treeitem")
    page.locator("[role=treeitem][tabindex='0']").focus()
    assert tree.nth(3).get_attribute("aria-selected") == "true"
    for key, place, text in [
        ("ArrowUp", 2, first),
        ("ArrowLeft", 1, first[: len(TEXT) + 3]),
        ("Home", 0, TEXT),
        ("ArrowRight", 1, first[: len(TEXT) + 3]),
        ("End", 3, second),
    ]:
        page.keyboard.press(key)
        tree.nth(place).and_(page.locator("[aria-selected=true]:focus")).wait_for()
        page.wait_for_function(
            "text => new URLSearchParams(location.hash.split('?')[1]).get('text') === text", arg=text
        )
    page.get_by_role("button", name="The branch before").click()
    page.get_by_text("1 of 2").wait_for()
    page.locator("[role=treeitem][tabindex='0']").focus()
    page.keyboard.press("Delete")
    page.wait_for_function("n => document.querySelectorAll('[role=treeitem]').length === n", arg=3)


def test_a_link_reopens_the_tree(visit, open_tab, page):
    open_tab("complete", model="shakespeare", text=TEXT, length=10, n=3, seed=1, probabilities="true")
    tokens_of(page)
    go_on(page)
    page.get_by_role("button", name="The next branch").click()
    page.wait_for_function("() => location.hash.includes('tree=%5B2%2C')")  # the second answer is shown
    tree = page.get_by_role("treeitem")
    again = visit()
    again.goto(page.url)
    again.get_by_role("treeitem").nth(3).wait_for()
    assert again.get_by_role("treeitem").all_inner_texts() == tree.all_inner_texts()
    chosen = [item.get_attribute("aria-selected") for item in again.get_by_role("treeitem").all()]
    assert chosen == ["false", "false", "true", "false"]
    tokens_of(again)
    assert shown_text(again) == shown_text(page)
    again.get_by_role("button", name="Undo").click()  # it is walked in as before
    tokens_of(again)
    assert shown_text(again) == TEXT
    again.get_by_role("button", name="Forget all").click()
    again.wait_for_function("() => !location.hash.includes('tree=')")


@pytest.mark.parametrize("tree", ["nonsense", '[0,[],[5,0,"x"]]', '[9,["m"],[-1,2,"x"]]', "[[[", "{}", "null"])
def test_a_tree_that_makes_no_sense_is_none(open_tab, page, tree):
    open_tab("complete", model="tiny", text="To be", tree=tree)
    assert text_of(page) == "To be" and page.get_by_role("treeitem").count() == 0
    page.wait_for_function("() => !location.hash.includes('tree=')")


def test_a_tree_too_large_for_a_link_leaves_the_branch_that_is_shown(visit, open_tab, page):
    branches = [[-1, 0, "To be"], *([0, 1, f" or {i} " + "x" * 500] for i in range(30))]
    open_tab("complete", model="tiny", text="To be", tree=json.dumps([4, ["tiny"], *branches]))
    page.get_by_text("too many for a link").wait_for()
    page.wait_for_function("() => location.hash.length < 3000")
    again = visit()
    again.goto(page.url)
    again.get_by_role("treeitem").nth(1).wait_for()
    assert again.get_by_role("treeitem").count() == 2
    assert " or 3 " in again.get_by_role("treeitem").nth(1).inner_text()


def test_branching_by_the_keyboard(open_tab, page):
    open_tab("complete", model="tiny", text="To be", length=4, probabilities="true")
    tokens_of(page)
    page.get_by_role("listbox", name="Tokens and their probabilities").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_role("group", name="Alternatives to b").wait_for()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.activeElement.closest('.alternatives')")
    letter = page.locator(":focus .name").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.activeElement.getAttribute('role') === 'listbox'")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.closest('.alternatives')")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('[role=listbox] [role=option]').length === 8")
    assert shown_text(page).startswith("To " + letter)


def test_several_answers_are_branches(open_tab, page):
    open_tab("complete", model="shakespeare", text=TEXT, length=10, n=3)
    go_on(page)
    assert page.get_by_role("treeitem").count() == 4
    texts = set()
    for _ in range(3):
        texts.add(text_of(page))
        page.get_by_role("button", name="The next branch").click()
    assert len(texts) > 1 and all(text.startswith(TEXT) and len(text) == len(TEXT) + 10 for text in texts)
    page.get_by_role("treeitem").first.click()
    assert text_of(page) == TEXT


def test_a_link_brings_all_settings_back_within_their_limits(open_tab, page):
    open_tab(
        "complete", model="shakespeare", text="O", temperature=9, length=100000, stop='["\\n", "END"]', top_p=0.5,
        top_k=7, frequency=0.5, presence=-0.5, n=2, seed=11,
    )  # fmt: skip
    with page.expect_request(re.compile("/v1/completions")) as asked:
        page.get_by_role("button", name="Continue").click()
    sent = json.loads(asked.value.post_data)
    assert {key: sent[key] for key in ("temperature", "stop", "top_p", "top_k", "n", "seed")} == {
        "temperature": 2, "stop": ["\n", "END"], "top_p": 0.5, "top_k": 7, "n": 2, "seed": 11,
    }  # fmt: skip
    assert (sent["frequency_penalty"], sent["presence_penalty"], sent["max_tokens"]) == (0.5, -0.5, 255)
    page.get_by_role("button", name="Continue").wait_for()


def test_more_text_than_fits_and_letters_that_are_not_known(open_tab, page):
    open_tab("complete", model="tiny", text="é" + TEXT * 4, length=8, probabilities="true")
    page.get_by_text("1 unknown to this model").wait_for()
    tokens_of(page)
    go_on(page)
    page.get_by_text("tiny reads 32 tokens at once: of the 77 before the answer it read the last 24.").wait_for()
    assert len(shown_text(page)) == 77 + 8
    page.get_by_role("button", name="Edit the text").click()
    page.keyboard.press("Control+End")
    page.keyboard.type(" my lord")
    assert text_of(page).endswith(" my lord")


def test_errors_are_said_and_tried_again(open_tab, page, problems):
    open_tab("complete", model="shakespeare", text=TEXT, length=5)
    page.route(
        re.compile("/v1/completions"),
        lambda route: route.fulfill(status=500, json={"error": {"message": "it broke"}}),
    )
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("alert").get_by_text("It broke.").wait_for()
    assert text_of(page) == TEXT
    page.unroute(re.compile("/v1/completions"))
    go_on(page, "Try again")
    assert len(text_of(page)) == len(TEXT) + 5
    problems.clear()


@pytest.mark.parametrize("how", [{}, {"n": 2, "seed": 1}, {"probabilities": "true", "stop": '["\\n"]', "top_k": 5}])
def test_the_code_that_is_shown_runs(open_tab, page, server, tmp_path, capsys, how):
    open_tab("complete", model="tiny", text='"To be\'s"\n$HOME \\', length=5, temperature=0.5, **how)
    page.get_by_role("button", name="View code").click()
    code = {}
    for language in ("Python", "Command line", "curl"):
        page.get_by_role("tab", name=language).click()
        code[language] = page.get_by_role("dialog").locator("pre").inner_text()
    (tmp_path / "code.py").write_text(code["Python"])
    runpy.run_path(str(tmp_path / "code.py"))
    assert capsys.readouterr().out
    assert main(shlex.split(code["Command line"])[1:]) == 0
    body = json.loads(shlex.split(code["curl"])[-1])
    reply = page.request.post(f"{server.url}/v1/completions", data=body)
    assert reply.ok and len(reply.json()["choices"]) == how.get("n", 1)


def test_tokens_and_text_can_be_saved(open_tab, page):
    open_tab("complete", model="shakespeare", text=TEXT)
    saved = {}
    for item in ("Numbers (CSV)", "Text (TXT)"):
        page.get_by_role("button", name="Save").click()
        with page.expect_download() as got:
            page.get_by_role("menuitem", name=item).click()
        saved[item] = got.value.path().read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(saved["Numbers (CSV)"])))
    assert "".join(row["text"] for row in rows) == saved["Text (TXT)"] == TEXT
    assert all(0 < float(row["probability"]) <= 1 and row["alternative_5"] for row in rows[1:])


def test_markup_that_a_model_writes_stays_text(visit, open_tab):
    page = visit()
    page.add_init_script(STUCK.replace("` w${index}${i}`", "'<img src=x onerror=window.hit=1>'"))
    open_tab("complete", on=page, text=TEXT)
    page.get_by_role("button", name="Continue").click()
    page.wait_for_function("() => document.querySelector('textarea').value.includes('<img')")
    page.get_by_role("button", name="Stop").click()
    assert page.evaluate("window.hit") is None and page.locator("main img").count() == 0
