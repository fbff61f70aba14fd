"""The pages of `heedful show` and `heedful fill` in a real browser, from a file and without a network."""

from __future__ import annotations

import re

import pytest

from heedful.cli import main
from heedful.observe.attention import alignment, attention_weights
from heedful.observe.inputs import text_input
from heedful.observe.lens import hidden_states, logit_lens
from heedful.observe.similarity import cosine_similarity
from support.playground import exact

EVIL = "the <script>alert(1)</script> & king"


@pytest.fixture
def shown(browser, tmp_path, problems):
    """shown("tiny", "To be", what="lens"): the page that the command writes, opened."""
    contexts = []

    def open(*arguments: str, dark: bool = False, width: int = 1100, command: str = "show"):
        file = tmp_path / f"page{len(contexts)}.html"
        assert main([command, *arguments, "--out", str(file)]) == 0
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: said.type in ("error", "warning") and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or problems.append(asked.url))
        page.goto(file.as_uri())
        return page

    yield open
    for context in contexts:
        context.close()
    assert problems == []


PAGES = {
    "attention": ("bert-books", EVIL),
    "heads": ("bert-books", EVIL),
    "rollout": ("bert-books", EVIL),
    "alignment": ("translator", "Ein Mann fährt mit dem Fahrrad auf der Straße."),
    "ablation": ("tiny", "To be, or not"),
    "lens": ("bert-books", EVIL),
    "embeddings": ("bert-books", EVIL),
    "projection": ("bert-books", EVIL),
    "tokens": ("shakespeare", EVIL),
    "positions": ("bert-books",),
}


@pytest.mark.parametrize("what", PAGES)
def test_a_page_draws_its_numbers_and_fits_a_phone(shown, what):
    for dark, width in ((False, 1100), (True, 390)):
        page = shown(*PAGES[what], "--what", what, dark=dark, width=width)
        assert page.get_by_role("heading", level=1).is_visible()
        assert page.locator("svg, .tokens li").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("script:has-text('alert(1)')").count() <= 1  # in the numbers, as text


def test_attention_is_read_by_mouse_and_keys(shown):
    page = shown("bert-books", "the king was old", "--what", "heads")
    bert = exact("bert-books")
    maps = attention_weights(bert.model, text_input(bert.model, bert.tokenizer, "the king was old"))
    assert page.locator("#overview button").count() == sum(len(weights) for weights in maps.values())
    page.get_by_role("button", name="encoder.2.self, head 3").click()
    assert page.locator("#overview button[aria-pressed=true]").count() == 1
    assert page.get_by_label("layer").evaluate("e => e.selectedOptions[0].text") == "encoder.2.self"
    heat = page.locator("#heat svg")
    heat.focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    weight = maps["encoder.2.self.weights"][3, 1, 1]
    told = page.locator("#heat .told")
    assert told.inner_text() == f"“the” → “the”: {weight:.4f}"
    page.get_by_role("button", name="head 3", exact=True).click()  # none chosen: all of them
    weight = maps["encoder.2.self.weights"][:, 1, 1].mean()
    heat.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert float(told.inner_text().split(": ")[1]) == pytest.approx(float(weight), abs=2e-4)
    page.locator("#lines").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#told").inner_text().startswith("“the” looks at ")
    page.keyboard.press("Escape")
    assert page.locator("#told").inner_text() == ""
    page.locator("#lines text").filter(has_text="king").first.hover()
    assert page.locator("#told").inner_text().startswith("“king” looks at ")
    assert page.locator("#lines line").count() >= 1


def test_matrices_are_read_cell_by_cell(shown):
    text = "the king was old"
    bert = exact("bert-books")
    reading = text_input(bert.model, bert.tokenizer, text)
    page = shown("bert-books", text, "--what", "embeddings")
    assert page.locator(".view").count() == 3
    last = page.locator(".view").last
    box = last.locator("image").first.bounding_box()
    n = len(reading.tokens)
    page.mouse.move(box["x"] + 2.5 * box["width"] / n, box["y"] + 1.5 * box["height"] / n)
    expected = cosine_similarity(hidden_states(bert.model, reading.batch)[-1, 0])[1, 2]
    assert last.locator(".told").inner_text() == f"“the” → “king”: {expected:.4f}"
    page = shown("bert-books", text, "--what", "lens")
    page.locator(".view svg").focus()
    page.keyboard.press("ArrowDown")
    found = logit_lens(bert.model, reading.batch)
    told = page.locator(".told").inner_text()
    assert f"{found.probabilities[-1, 0, 0]:.4f}" in told and told.count("%") == 5
    assert page.locator("table td").count() == found.final.numel() + len(found.layers)


def test_positions_are_fifty_rows_of_the_encoding(shown, tmp_path):
    from heedful.models.registry import FAMILIES
    from heedful.nn.position import Sinusoidal
    from heedful.weights.save import save

    kind = FAMILIES["transformer"].load()
    settings = dict(d_model=128, n_heads=4, d_ff=64, vocab_size=50)
    known = {k: v for k, v in settings.items() if k in kind.config_class.__dataclass_fields__}
    model = kind.create(kind.config_class(**known))
    assert isinstance(model.position, Sinusoidal)
    save(model, tmp_path / "model")
    page = shown(str(tmp_path / "model"), "--what", "positions")
    page.locator(".view svg").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert re.fullmatch(r"position 1 → dimension 2: 0\.7617", page.locator(".told").inner_text())  # sin(1/10000^(1/64))
    assert "50 rows and 128 columns" in page.locator(".view svg").get_attribute("aria-label")


def test_the_report_of_a_template_says_whose_words(shown):
    page = shown("[bert-books|tiny]: the [man|woman] is _", command="fill", dark=True, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    heads = page.locator("th").all_inner_texts()
    assert "bert-books: the man is _" in heads and "log p above the mean, tiny" in heads
    assert "bert-books / man" in page.locator("figure").inner_text() or page.locator("figure svg").count() == 1


def test_the_reversal_looks_from_right_to_left(shown):
    page = shown("reversal", "3 1 4 1 5 9", "--what", "alignment")
    page.locator("#heat svg").focus()
    found = []
    for place in range(6):
        page.keyboard.press("Escape")
        for _ in range(place + 1):
            page.keyboard.press("ArrowDown")
        for _ in range(5 - place):
            page.keyboard.press("ArrowRight")
        found.append(float(page.locator("#heat .told").inner_text().split(": ")[1]))
    loaded = exact("reversal")
    weights = alignment(loaded.model, text_input(loaded.model, loaded.tokenizer, "3 1 4 1 5 9"))[:6]
    assert found == pytest.approx(weights.flip(1).diagonal().tolist(), abs=1e-4)
    assert sum(found) / 6 > 0.45  # of a row that adds up to 1, where even would be 0.17
