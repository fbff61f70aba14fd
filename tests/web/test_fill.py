"""Fill in: one sentence, two and templates, on masked and causal models; the numbers are the library's."""

from __future__ import annotations

import csv
import io
import re
import runpy

import pytest

from support.playground import exact

SHIP = "The ship sailed across the sea to a distant island."
TEMPLATE = "In [summer|winter] the [fields|streets] are _."


def params(page):
    page.evaluate("() => void dispatchEvent(new Event('blur'))")  # whoever leaves the window finds it written
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")


def settled(page):
    page.wait_for_function("() => !document.querySelector('.notice.loading, [aria-busy=true]')")
    return page


def choose(page, name):
    page.get_by_role("radio", name=name, exact=True).check()


def bars(page, name):
    rows = page.get_by_role("list", name=name).get_by_role("button")
    return {row.locator(".name").inner_text(): row.locator(".value").inner_text() for row in rows.all()}


def strokes(page):
    """The colours of the points in the large chart."""
    drawn = page.locator(".chart svg path").all()
    return [path.get_attribute("stroke") + path.get_attribute("d")[:30] for path in drawn]


def run_code(page, tmp_path, capsys):
    """What the Python of "View code" prints."""
    page.get_by_role("button", name="View code").click()
    file = tmp_path / "shown.py"
    file.write_text(page.get_by_role("dialog").locator("pre").inner_text(), encoding="utf-8")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    capsys.readouterr()
    runpy.run_path(str(file))
    return capsys.readouterr().out


def saved(page, name):
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name=name).click()
    return download.value.path().read_bytes()


def test_a_clicked_token_becomes_the_blank(open_tab, page, tmp_path, capsys):
    open_tab("fill", model="bert-books", text=SHIP)
    tokens = page.get_by_role("group", name="Tokens")
    assert tokens.get_by_role("button", pressed=True).inner_text() == "island"
    tokens.get_by_role("button", name="sea").click()
    page.wait_for_function("() => location.hash.includes('blank=6')")
    settled(page)
    found = bars(page, "Likeliest words")
    word, chance = exact("bert-books").fill(SHIP.replace("sea", "_")).top(k=1)[0]
    assert next(iter(found)) == word
    assert abs(float(found[word].split()[0]) - 100 * chance) < 0.6
    assert run_code(page, tmp_path, capsys).splitlines()[0].split()[0] == word


def test_a_word_is_read_in_the_sentence_and_put_into_it(open_tab, page):
    open_tab("fill", model="bert-books", text=SHIP)
    first = page.get_by_role("list", name="Likeliest words").get_by_role("button").first
    word = first.locator(".name").inner_text()
    first.hover()
    page.get_by_role("group", name="Tokens").get_by_role("button", pressed=True).get_by_text(word).wait_for()
    first.click()
    page.wait_for_function("text => document.querySelector('textarea').value === text", arg=f"{SHIP[:-7]}{word}.")


def test_a_causal_model_reads_what_stands_before(open_tab, page):
    open_tab("fill", model="shakespeare", text="To be, or not", blank=4)
    assert next(iter(bars(page, "Likeliest words"))) == "e"
    before = bars(page, "Likeliest words")
    page.get_by_label("Text").fill("To be quite sure")  # what follows the blank does not count
    page.get_by_role("group", name="Tokens").get_by_text("q", exact=True).wait_for()
    assert bars(settled(page), "Likeliest words") == before


def test_two_sentences(open_tab, page):
    open_tab("fill", model="bert-books", mode="two", first="He worked as a _.", second="She worked as a _.")
    filled = exact("bert-books").fill("[He|She] worked as a _.", n=200)
    page.get_by_text(f"{len(filled.words)} words; probability at the mask").wait_for()
    ratios = filled.extremes(filled.log_ratio(1, 0))
    assert list(bars(page, "Likelier with She worked as a _."))[:3] == [word for word, _ in ratios[:3]]
    assert list(bars(page, "Likelier with He worked as a _."))[:3] == [word for word, _ in ratios[::-1][:3]]
    labels = page.locator(".chart .word").all_text_contents()
    assert {"man", "girl", "nurse"} <= {*labels}
    likelihoods = strokes(page)
    choose(page, "Differences")
    page.get_by_text("mean of both").wait_for()
    assert strokes(page) != likelihoods and params(page)["chart"] == "differences"


def test_numbers_and_pictures_are_saved(open_tab, page):
    open_tab("fill", model="bert-books", mode="two", first="He is _.", second="She is _.", n=30)
    rows = list(csv.DictReader(io.StringIO(saved(page, "Numbers").decode())))
    filled = exact("bert-books").fill("[He|She] is _.")
    assert [row["word"] for row in rows] == filled.words
    assert [float(row["She is _."]) for row in rows] == pytest.approx(filled.probabilities[1].tolist(), rel=1e-2)
    picture = saved(page, "Drawing").decode()
    assert "stroke-linecap" in picture and filled.words[0] in picture
    assert saved(page, "Picture").startswith(b"\x89PNG")


def test_a_template_has_a_chart_for_every_pair(open_tab, page):
    open_tab("fill", model="bert-books", mode="template", template=TEMPLATE, n=30)
    page.get_by_text("4 sentences").wait_for()
    charts = page.locator(".multiple")
    assert charts.count() == 6
    titles = [" ".join(text.split()) for text in charts.locator(".title").all_inner_texts()]
    assert titles[0] == "fields ↔ streets, summer" and titles[1] == "summer ↔ winter, fields"
    before = strokes(page)
    charts.nth(1).click()
    assert charts.nth(1).get_attribute("aria-pressed") == "true" and params(page)["pair"] == "0-2"
    assert strokes(page) != before
    page.get_by_role("heading", name="Likelier with winter").wait_for()


def test_a_word_is_shown_in_every_chart_at_once(open_tab, page):
    open_tab("fill", model="bert-books", mode="template", template=TEMPLATE)
    row = page.get_by_role("list", name="Likelier with streets").get_by_role("button").first
    word = row.locator(".name").inner_text()
    row.hover()
    assert page.locator(".ring").count() == 7
    assert set(page.locator(".word.strong").all_text_contents()) == {word}
    page.mouse.move(5, 5)
    assert page.locator(".ring").count() == 0
    page.locator(".multiple").nth(3).scroll_into_view_if_needed()
    small = page.locator(".multiple .scatter").nth(3).bounding_box()
    page.mouse.move(small["x"] + small["width"] / 2, small["y"] + small["height"] / 2)
    assert page.locator(".ring").count() == 7
    page.get_by_label("Find a word").fill(word.upper())
    page.mouse.move(5, 5)
    assert set(page.locator(".word.strong").all_text_contents()) == {word}


def test_the_keys_walk_along_the_words(open_tab, page):
    open_tab("fill", model="bert-books", mode="two", n=30)
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowDown")
    first = page.locator(".word.strong").text_content()
    assert first == next(iter(bars(page, "Likelier with The train stopped at the _.")))
    page.keyboard.press("Enter")
    assert params(page)["word"] == first


def test_thousands_of_words_are_a_canvas(open_tab, page):
    open_tab("fill", model="bert-books", mode="two", n=5000)
    assert page.locator(".chart canvas").count() == 1 and page.locator(".chart svg path").count() == 0
    inked = """() => {
      const canvas = document.querySelector('.chart canvas')
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
      return data.filter((value, i) => i % 4 === 3 && value > 0).length
    }"""
    assert page.evaluate(inked) > 5000
    choose(page, "All")
    page.wait_for_function("() => location.hash.includes('n=0')")
    settled(page)
    page.get_by_text(re.compile(r"6,\d\d\d words")).wait_for()


def test_a_bracket_of_two_models_compares_them(open_tab, page, problems):
    open_tab("fill", mode="template", template="[shakespeare|tiny]: My lord, _")
    page.get_by_role("heading", name="Likelier with tiny").wait_for()
    page.get_by_text("by shakespeare and tiny").wait_for()
    axes = page.locator(".chart .axis").all_text_contents()
    assert axes == ["My lord, _ (shakespeare)", "My lord, _ (tiny)"]
    page.get_by_role("textbox", name="Template").fill("[shakespeare|tidy]: My lord, _")
    page.get_by_role("alert").get_by_text("'tidy' is none (near it: tiny)").wait_for()
    assert all("Failed to load resource" in said for said in problems)
    problems.clear()


def test_a_mistake_is_explained_and_the_chart_stays(open_tab, page, problems):
    open_tab("fill", model="bert-books", mode="template", template=TEMPLATE, n=30)
    page.get_by_role("textbox", name="Template").fill("In [summer|winter the fields are _.")
    page.get_by_role("alert").get_by_text("is not closed").wait_for()
    assert page.locator(".multiple").count() == 6
    page.get_by_role("textbox", name="Template").fill("A <b>[big|small]</b> _.")
    page.get_by_role("alert").wait_for(state="detached")
    assert page.locator(".chart b").count() == 0
    assert all("Failed to load resource" in said for said in problems)
    problems.clear()


def test_a_link_reopens_the_comparison(visit, open_tab, page):
    open_tab("fill", model="bert-books", mode="template", template=TEMPLATE)
    page.locator(".multiple").nth(2).click()
    choose(page, "Differences")
    choose(page, "1,000")
    settled(page)
    assert params(page)["n"] == "1000"
    again = visit()
    again.goto(page.url)
    again.get_by_role("heading", level=1).wait_for()
    again.locator(".multiple").nth(2).and_(again.locator("[aria-pressed=true]")).wait_for()
    assert again.get_by_label("Differences").is_checked() and again.get_by_label("1,000").is_checked()
    assert again.get_by_role("textbox", name="Template").input_value() == TEMPLATE


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "two", "first": "He ran _.", "second": "She ran _."},
        {"mode": "two", "first": "He's a _ man.", "second": 'Her "friend" is _.'},
        {"mode": "template", "template": "[shakespeare|tiny]: My [lord|king], _"},
    ],
)
def test_the_code_runs(open_tab, page, tmp_path, capsys, given):
    open_tab("fill", model="bert-books", **given)
    assert len(run_code(page, tmp_path, capsys).splitlines()) >= 4


def test_a_text_that_is_too_long_is_not_asked(open_tab, page):
    open_tab("fill", model="tiny", text="To be, or not to be, that is the question")
    page.get_by_text("41 tokens, and at most 32 are read here: shorten it").wait_for()
    page.get_by_role("button", name="Keep its end").click()
    page.get_by_role("group", name="Tokens: choose the blank").wait_for()
    assert page.get_by_label("Text", exact=True).input_value() == "to be, that is the question"
    page.get_by_label("Text", exact=True).fill("To be " * 3400 + "the end")  # as by a paste: not cut silently
    page.get_by_text("20,407 characters, and at most 20,000 are read here: its end was kept").wait_for()
    assert page.get_by_label("Text", exact=True).input_value().endswith("the end")
    page.get_by_role("button", name="Keep its beginning").click()
    assert page.get_by_label("Text", exact=True).input_value().startswith("To be To be")


def test_of_a_sentence_that_is_too_long_the_end_is_kept_where_the_blank_stays(open_tab, page, problems):
    def told(what, has, **given):
        open_tab("fill", model="bert-books", n=30, **given)
        page.get_by_role("alert").get_by_text(f"{what} has {has} tokens, and at most 128 are read here").wait_for()
        assert not page.get_by_role("button", name="Try again").count()
        return page.get_by_role("button", name="Keep its end")

    very = "very " * 200
    assert not told("The text", 206, mode="template", template=f"[She|He] was {very}_.").count()
    assert not told("The text", 208, mode="two", first=f"She was _, {very}tired.", second="He was a _.").count()
    told("The second sentence", 206, mode="two", first="He was a _.", second=f"She was {very}_.").click()
    page.get_by_role("alert").wait_for(state="detached")
    page.get_by_role("list", name="Likelier with").first.wait_for()
    assert page.get_by_label("Second sentence").input_value().endswith("very _.")
    problems.clear()  # the server's 400


def test_groups_are_compared_with_intervals_and_the_report_saved(open_tab, page):
    open_tab("fill", model="bert-books", mode="groups")
    page.get_by_label("Sentences, a line each").fill("The {JOB} said that _ was tired.")
    page.get_by_label("Values of other places").fill("JOB: nurse, judge, soldier")
    page.get_by_text("6 sentences").wait_for()
    settled(page)
    groups, fill = {"he": ["he"], "she": ["she"]}, {"JOB": ["nurse", "judge", "soldier"]}
    (result,) = exact("bert-books").bias("The {JOB} said that _ was tired.", groups=groups, fill=fill).results
    rows = page.get_by_role("table", name="The differences with their intervals").get_by_role("row").all()
    assert [row.get_by_role("rowheader").inner_text() for row in rows] == [r.name for r in result.contrasts[0].rows]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save the report as a page").click()
    assert b"Bias report of bert-books" in download.value.path().read_bytes()


def test_a_classifier_has_groups_alone(open_tab, page):
    open_tab("fill", model="sentiment")
    settled(page)
    assert page.get_by_role("radio").count() == 0
    page.get_by_role("table", name="The difference between the groups").wait_for()
