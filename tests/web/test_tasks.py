"""Tasks: translation with its alignment, labels, answers in their passage, entities in their text, languages."""

from __future__ import annotations

import runpy

import pytest

from heedful.zoo import cards
from support.playground import exact

HUND = "Ein Hund läuft über die Straße."
PASSAGE = "Élise 👍 says that the Amazon is about 6,400 kilometres long and flows through Brazil."


def reply(said):
    return lambda route: route.fulfill(json=said)


def run_code(page, tmp_path, capsys):
    page.get_by_role("button", name="View code").click()
    file = tmp_path / "shown.py"
    file.write_text(page.get_by_role("dialog").locator("pre").inner_text(), encoding="utf-8")
    capsys.readouterr()
    runpy.run_path(str(file))
    return capsys.readouterr().out


def test_a_translation_and_its_alignment(open_tab, page, tmp_path, capsys):
    open_tab("tasks", model="translator", text=HUND)
    said = page.locator(".outcome").inner_text()
    assert said == exact("translator").translate(HUND, beams=4)
    source = page.get_by_role("group", name="Source").get_by_role("button")
    target = page.get_by_role("group", name="Translation").get_by_role("button")
    read = exact("translator").tokenizer.encode(HUND, add_special=True)
    assert source.count() == len(read) and "dog" in target.nth(1).inner_text()
    target.nth(1).hover()
    shades = [
        token.evaluate("e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)") for token in source.all()
    ]
    assert min(range(len(read)), key=lambda i: sum(shades[i])) == 1  # darkest at Hund
    assert run_code(page, tmp_path, capsys).strip() == said
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    assert page.get_by_text("out of its depth").count() == 0
    page.get_by_role("link", name="This translation head by head").click()
    page.locator("#panel-attention .answer").get_by_text(said).wait_for()  # and not another one, found greedily
    page.get_by_label("To write").fill("")
    page.get_by_text("Greedy: the likeliest token each time. Tasks follows several").wait_for()


def test_out_of_its_depth(open_tab, page):
    open_tab("tasks", model="translator", text="Die Relativitätstheorie wurde von Albert Einstein entwickelt.")
    page.get_by_role("note").get_by_text(cards()["translator"]).wait_for()
    open_tab("tasks", model="reader", text="Cats sleep most of the day.", question="Who wrote Faust?")
    page.get_by_text("Not in the passage.").wait_for()
    open_tab("images", model="digits-vit", image="0" * 784)
    page.get_by_text("A blank canvas has no digit").wait_for()
    assert page.get_by_role("list", name="Labels").count() == 0


def test_beams_are_kept_in_the_address(open_tab, page):
    open_tab("tasks", model="translator", text=HUND, beams=1)
    slider = page.get_by_role("slider", name="Beams")
    assert slider.input_value() == "1"
    slider.press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('beams=2')")


def test_a_recurrent_model_looks_along_the_other_diagonal(open_tab, page):
    open_tab("tasks", model="reversal", text="3 1 4 1 5 9 2 6")
    assert page.locator(".outcome").inner_text() == "6 2 9 5 1 4 1 3"


def test_labels_have_probabilities(open_tab, page, tmp_path, capsys):
    text = "A warm, funny and wise film."
    open_tab("tasks", model="sentiment", text=text)
    best = exact("sentiment").classify(text)[0]
    assert page.locator(".outcome").inner_text() == best.name
    row = page.get_by_role("list", name="Labels").get_by_role("listitem").first.inner_text().split()
    assert row[0] == best.name and abs(float(row[1]) - 100 * best.score) < 0.6
    assert run_code(page, tmp_path, capsys).startswith(best.name)


def test_an_answer_is_marked_in_its_passage(open_tab, page, tmp_path, capsys):
    question = "How long is the Amazon?"
    open_tab("tasks", model="reader", text=PASSAGE, question=question)
    span = exact("reader").answer(question, PASSAGE)
    assert page.locator("mark").inner_text() == span.text == PASSAGE[span.begin : span.end]
    assert page.get_by_label("The answer in the passage").inner_text() == PASSAGE
    assert span.text in run_code(page, tmp_path, capsys)
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    other = "Where does it flow?"
    page.get_by_label("Question").fill(other)
    page.locator("mark").get_by_text(exact("reader").answer(other, PASSAGE).text, exact=True).wait_for()
    page.get_by_role("textbox", name="Passage").fill("")
    page.get_by_text("Write a question, and a passage").wait_for()


def test_entities_are_marked_in_the_text(open_tab, page, tmp_path, capsys):
    text = "Marie Curie (👍) left Warsaw for Paris in 1891."
    open_tab("tasks", model="entities", text=text)
    found = [(span.text, span.label) for span in exact("entities").tag(text)]
    assert {("Marie Curie", "PER"), ("Warsaw", "LOC"), ("Paris", "LOC")} == set(found)
    marks = page.get_by_label("The text with its entities").locator("mark")
    assert [mark.evaluate("e => e.firstChild.data") for mark in marks.all()] == [text for text, _ in found]
    labels = [text.split() for text in marks.locator(".label").all_inner_texts()]  # each with its probability
    assert [label for label, *_ in labels] == [label for _, label in found]
    assert all(rest[-1] == "%" and float(rest[0]) > 50 for _, *rest in labels)
    colours = [mark.evaluate("e => getComputedStyle(e).borderBottomColor") for mark in marks.all()]
    assert colours[0] != colours[1] == colours[2]
    kinds = page.get_by_role("list", name="Kinds").get_by_role("listitem")
    assert sorted(kind.split() for kind in kinds.all_inner_texts()) == [
        ["LOC", "2"],
        ["ORG", "0"],
        ["PER", "1"],
    ]
    assert run_code(page, tmp_path, capsys).startswith("Marie Curie")


def test_the_model_follows_the_task_and_the_task_the_model(open_tab, page):
    open_tab("tasks", model="translator")
    model = page.get_by_label("Model").first
    for task, name in [
        ("Answer", "reader"),
        ("Classify", "sentiment"),
        ("Tag", "entities"),
        ("Language", "languages"),
        ("Classify", "sentiment"),  # and not the classifier that is already there
        ("Translate", "translator"),
    ]:
        page.get_by_role("radio", name=task, exact=True).check()
        page.wait_for_function("name => document.querySelector('header select').value === name", arg=name)
    model.select_option("reader")
    page.get_by_label("Question").wait_for()
    assert page.get_by_role("radio", name="Answer", exact=True).is_checked()


def test_the_language_is_what_the_classifier_says(open_tab, page, tmp_path, capsys):
    open_tab("tasks", task="language", sample="Der Hund läuft über die Straße.")
    assert page.locator(".outcome").inner_text() == "German"
    assert page.locator("header select").input_value() == "languages"
    assert run_code(page, tmp_path, capsys).strip() == "German"
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("textbox", name="Text").fill("El perro cruza la calle corriendo.")
    page.locator(".outcome").get_by_text("Spanish", exact=True).wait_for()
    page.get_by_label("Asked").select_option("bert-books")  # which is no classifier, but one is served
    page.get_by_role("button", name="Ask languages instead").wait_for()
    assert page.get_by_text("No classifier of languages is served").count() == 0
    page.get_by_role("button", name="Ask languages instead").click()
    page.locator(".outcome").get_by_text("Spanish", exact=True).wait_for()


LONG = "A warm, funny and wise film. " * 30


@pytest.mark.parametrize(
    "given",
    [
        {"model": "sentiment", "text": LONG},
        {"task": "language", "sample": LONG, "text": "another"},
        {"task": "language", "sample": LONG, "detector": "bert-books"},
    ],
)
def test_a_text_that_is_too_long_keeps_its_end(open_tab, page, given):
    open_tab("tasks", **given)
    page.get_by_role("alert").get_by_text("are read here: shorten it.").wait_for()
    assert page.locator(".outcome").count() == 0
    page.get_by_role("button", name="Keep its end").click()
    page.locator(".outcome").wait_for()
    kept = page.get_by_role("textbox", name="Text").input_value()
    assert LONG.endswith(kept) and 200 < len(kept) < len(LONG)


def without(page, server, *names):
    """The page is told that some of the models are not served."""
    served = page.request.get(f"{server.url}/api/models").json()
    served["models"] = [model for model in served["models"] if model["id"] not in names]
    page.route("**/api/models", reply(served))


def test_a_language_is_guessed_by_a_prompt_and_said_to_be(open_tab, page, server, tmp_path, capsys):
    without(page, server, "languages")
    open_tab("tasks", task="language", sample="Der [Hund] läuft.")
    page.get_by_text("No classifier of languages is served here").wait_for()
    page.get_by_text("what it says is a guess").wait_for()
    assert page.get_by_role("button", name="Ask languages instead").count() == 0
    names = page.get_by_role("list", name="Languages").get_by_role("listitem").all_inner_texts()
    assert len(names) == 8 and "German" in "".join(names)
    assert names[0].split()[0] in run_code(page, tmp_path, capsys)


def test_a_task_without_a_model_says_what_to_serve(open_tab, page, server):
    without(page, server, "sentiment", "entities")
    open_tab("tasks", task="classify")
    page.get_by_text("heedful serve sentiment").wait_for()
    page.get_by_role("radio", name="Tag", exact=True).check()
    page.get_by_text("heedful serve entities").wait_for()
    assert page.get_by_role("button", name="View code").count() == 0


def test_neighbours_of_words(open_tab, page, tmp_path, capsys):
    open_tab("tasks", model="bert-books", task="neighbours", words="king - man + woman")
    found = exact("bert-books").neighbours("king - man + woman", 12)
    assert page.locator(".outcome").inner_text() == found[0].word == "queen"
    rows = page.get_by_role("list", name="Nearest words").get_by_role("listitem")
    assert rows.count() == 12 and rows.nth(1).inner_text().split()[0] == found[1].word
    assert run_code(page, tmp_path, capsys).startswith("queen")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("textbox", name="Words").fill("London")
    page.locator(".outcome").get_by_text(exact("bert-books").neighbours("London", 1)[0].word, exact=True).wait_for()
    page.get_by_role("slider", name="Layer").press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('depth=1')")
