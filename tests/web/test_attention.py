"""The tab Attention: what it draws is what the library computes, and the same for every way to look at it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heedful
from heedful.observe import attention as look
from heedful.observe.capture import capture
from heedful.observe.inputs import ModelInput, text_input
from support.browser import address, in_address, n_lines, settled, table, until

TO_BE = "To be, or not to be"
SHIP = "The ship sailed across the sea."
HUND = "Ein Hund läuft über die Straße."
DIGITS = "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4"


def reading_of(name: str, text: str) -> tuple[Any, ModelInput]:
    loaded = heedful.load(name, dtype=torch.float32)
    return loaded.model, text_input(loaded.model, loaded.tokenizer, text)


def strongest_link(name: str, text: str, layer: int, head: int) -> str:
    """The largest weight of a head between two different words, as the page says it."""
    model, inputs = reading_of(name, text)
    weights = next(iter(look.attention_weights(model, inputs, layer=layer).values()))[head]
    inner = weights[1:-1, 1:-1].fill_diagonal_(0)  # without [CLS] and [SEP]
    row, column = divmod(int(inner.argmax()), inner.shape[1])
    return f"“{inputs.tokens[1 + row]}” to “{inputs.tokens[1 + column]}”, {100 * inner.max():.0f} %"


def weights_of(rows: list[dict[str, str]], shape: tuple[int, ...]) -> Tensor:
    found = torch.zeros(shape)
    for row in rows:
        found[int(row["head"]), int(row["from"]), int(row["to"])] = float(row["weight"])
    return found


def pixels(page: Any, rows: int, columns: int) -> Tensor:
    """The colours (rows, columns, 4) in the middle of the cells of the heatmap, as they are drawn."""
    found = page.locator(".heatmap canvas").evaluate(
        """(canvas, [rows, columns]) => {
            // Cells are square and end at the right and at the bottom, a pixel before the edge; the first column is
            // never empty, so that they begin where a column of pixels is painted for more than half of its height.
            const whole = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
            const painted = (x, y) => whole.data[4 * (y * canvas.width + x) + 3] > 0
            const runs = (x, n = 0) => n < canvas.height - 3 && painted(x, canvas.height - 3 - n) ? runs(x, n + 1) : n
            let left = 0
            while (runs(left) < 0.5 * canvas.height) left++
            const side = (canvas.width - 1 - left) / columns
            const top = canvas.height - 1 - side * rows
            const out = []
            for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
                const [x, y] = [Math.floor(left + (c + 0.4) * side), Math.floor(top + (r + 0.4) * side)]
                out.push(...whole.data.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 4))
            }
            return out
        }""",
        [rows, columns],
    )
    return torch.tensor(found).view(rows, columns, 4)


# --- what is drawn is so ----------------------------------------------------------------------------------------------


def test_reversal_looks_along_the_anti_diagonal(open_tab, page):
    open_tab("attention", model="reversal", text=DIGITS, view="matrix")
    model, reading = reading_of("reversal", DIGITS)
    expected = look.alignment(model, reading)
    assert page.get_by_text(" ".join(reading.targets[:-1])).is_visible()
    torch.testing.assert_close(weights_of(table(page), (1, 21, 20))[0], expected, atol=1e-6, rtol=0)
    colours = pixels(page, 21, 20)[:20, :, :3].sum(dim=-1)  # dark is strong
    away = (colours.argmin(dim=1) - torch.arange(19, -1, -1)).abs()
    assert away.max() <= 1 and (away == 0).sum() >= 16


def test_a_causal_model_shows_nothing_above_the_diagonal(open_tab, page):
    open_tab("attention", model="shakespeare", text=TO_BE, view="matrix", layer=4)
    alpha = pixels(page, 19, 19)[..., 3]
    below = torch.ones(19, 19).tril().bool()
    assert (alpha[below] == 255).all() and (alpha[~below] == 0).all()
    rows = table(page)
    assert {row["layer"] for row in rows} == {"4"}
    assert all(int(row["to"]) <= int(row["from"]) for row in rows)


@pytest.mark.parametrize(
    ("name", "text", "which", "kind", "layer"),
    [
        ("shakespeare", TO_BE, "self", "decoder", 3),
        ("bert-books", SHIP, "self", "encoder", 1),
        ("translator", HUND, "cross", "cross", 2),
        ("translator", HUND, "encoder", "encoder", 0),
        ("translator", HUND, "self", "decoder", 1),
    ],
)
def test_the_numbers_are_the_librarys(open_tab, page, name, text, which, kind, layer):
    model, reading = reading_of(name, text)
    expected = next(iter(look.attention_weights(model, reading, kind, layer).values()))
    open_tab("attention", model=name, text=text, which=which, layer=layer)
    weights = weights_of(table(page), tuple(expected.shape))
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)  # the server sums in another order
    shown = [page.locator(f".{side} .token") for side in ("from", "to")]
    assert [tokens.count() for tokens in shown] == list(expected.shape[1:])
    row = 2
    shown[0].nth(row).hover()
    mean = expected.mean(dim=0)[row]
    best = int(mean.argmax())
    page.locator("[data-said]", has_text=" looks at: ").wait_for(state="attached")
    said = page.locator("[data-said]").text_content()
    assert f"{shown[1].nth(best).inner_text()} {round(100 * float(mean[best]))} %" in said


def test_all_layers_of_an_alignment_are_the_librarys(open_tab, page):
    model, reading = reading_of("translator", HUND)
    open_tab("attention", model="translator", text=HUND, view="matrix")
    page.get_by_role("radio", name="all", exact=True).click()
    until(page, lambda: in_address(page, "all") == "true")
    page.get_by_role("application", name="the mean of all layers").wait_for()
    maps = torch.stack(list(look.attention_weights(model, reading, "cross").values()))  # (L, H, T, S)
    rows = table(page)
    assert len(rows) == maps.numel()
    total = sum(float(row["weight"]) for row in rows if row["from"] == "1" and row["to"] == "1")
    assert total / 16 == pytest.approx(float(look.alignment(model, reading)[1, 1]), abs=1e-6)


def test_a_query_against_its_keys(open_tab, page):
    model, reading = reading_of("bert-books", SHIP)
    name = "encoder.2.self"
    with torch.no_grad(), capture(model, [f"{name}.*"]) as acts:
        model(reading.batch)
    open_tab("attention", model="bert-books", text=SHIP, view="neuron", layer=2, head=3, token=4)
    weights, scores = acts[f"{name}.weights"][0, 3, 4], acts[f"{name}.scores"][0, 3, 4]
    rows = page.get_by_role("group", name="Keys, products, scores and weights").get_by_role("listitem")
    assert rows.count() == len(reading.tokens)
    best = int(weights.argmax())
    assert f"{float(scores[best]):.3g}" in rows.nth(best).inner_text()
    assert f"{round(100 * float(weights[best]))} %" in rows.nth(best).inner_text()
    saved = table(page)
    query = torch.tensor([float(saved[0][f"k{i}"]) for i in range(64)])
    torch.testing.assert_close(query, acts[f"{name}.queries"][0, 3, 4], atol=1e-5, rtol=1e-5)
    for i, row in enumerate(saved[1:]):
        products = sum(float(row[f"qk{d}"]) for d in range(64))
        assert products / 8 == pytest.approx(float(scores[i]), abs=1e-3)
        assert float(row["weight"]) == pytest.approx(float(weights[i]), abs=1e-5)
    page.get_by_role("switch", name="Strongest first").check()
    until(page, lambda: rows.first.inner_text().startswith(reading.tokens[best]))


@pytest.mark.parametrize(
    ("name", "text", "which", "half"),
    [("bert-books", SHIP, "self", "encoder"), ("translator", HUND, "encoder", "encoder")],
)
def test_rollout(open_tab, page, name, text, which, half):
    model, reading = reading_of(name, text)
    expected = look.attention_rollout(model, reading, half)[2]
    open_tab("attention", model=name, text=text, which=which, view="rollout", layer=2)
    found = torch.tensor([[float(x) for x in list(row.values())[1:]] for row in table(page)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


# --- what one can do --------------------------------------------------------------------------------------------------


def test_heads_by_click_and_double_click(open_tab, page):
    open_tab("attention", model="shakespeare", text=TO_BE, layer=5)
    squares = page.get_by_role("group", name="Heads", exact=True).get_by_role("button", name=re.compile(r"Head \d"))
    on = lambda: [i for i in range(6) if squares.nth(i).get_attribute("aria-pressed") == "true"]  # noqa: E731
    page.mouse.move(0, 0)
    everything = n_lines(page)
    assert on() == list(range(6)) and everything > 0
    squares.nth(1).click()
    page.mouse.move(0, 0)
    until(page, lambda: n_lines(page) < everything)
    assert on() == [0, 2, 3, 4, 5] and in_address(page, "off") == "[1]"
    squares.nth(2).dblclick()
    assert on() == [2]
    squares.nth(2).dblclick()
    assert on() == list(range(6))
    squares.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+Enter")
    assert on() == [1]
    page.get_by_role("button", name="show all").click()
    assert len(on()) == 6


def test_a_token_has_its_lines_alone(open_tab, page):
    open_tab("attention", model="shakespeare", text=TO_BE, layer=5)
    everything = n_lines(page)
    tokens = page.locator(".from .token")
    tokens.nth(3).hover()
    until(page, lambda: n_lines(page) <= 4 * 6)  # it sees four tokens
    page.mouse.move(0, 0)
    until(page, lambda: n_lines(page) == everything)
    tokens.nth(0).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    page.locator("[data-said]", has_text="is looked at by").wait_for(state="attached")
    page.keyboard.press("Enter")  # holds it
    until(page, lambda: (in_address(page, "token"), in_address(page, "side")) == ("2", "to"))
    page.keyboard.press("Escape")
    until(page, lambda: in_address(page, "token") is None)


def test_the_top_of_the_attention(open_tab, page):
    open_tab("attention", model="shakespeare", text=TO_BE, layer=4, off="[0,1,2,3,5]", top=50)
    model, reading = reading_of("shakespeare", TO_BE)
    weights = look.attention_weights(model, reading, "decoder", 4)["decoder.4.self.weights"][4]
    largest = weights.sort(dim=-1, descending=True).values
    needed = ((largest.cumsum(dim=-1) - largest) < 0.5 - 1e-6).sum()  # as many as make half of each row
    assert n_lines(page) == int(needed)


def test_a_masked_token_is_read_no_more(open_tab, page):
    open_tab("attention", model="translator", text=HUND, layer=1)
    before = page.locator(".answer .hint").locator("..").inner_text()
    page.locator(".to .token").nth(1).dblclick()
    page.get_by_text("Hund” is hidden from the model.").wait_for()
    until(page, lambda: page.locator(".answer .hint").locator("..").inner_text() != before)
    assert in_address(page, "masked") == "[1]"
    assert all(row["to"] != "1" for row in table(page))  # nobody looks at it
    page.get_by_role("button", name="Show it again").click()
    until(page, lambda: page.locator(".answer .hint").locator("..").inner_text() == before)


def test_bert_reads_a_mask(open_tab, page):
    open_tab("attention", model="bert-books", text=SHIP)
    page.locator(".from .token").nth(2).focus()
    page.keyboard.press("m")
    page.get_by_text("“ship” is hidden from the model.").wait_for()
    struck = page.locator(".to .token.struck")  # the word itself, though the model reads [MASK]
    assert struck.all_inner_texts() == ["ship"]
    page.get_by_label("Text", exact=True).fill("Another text.")  # masks are of the text that was
    page.locator(".to .token").nth(1).get_by_text("another").wait_for()
    until(page, lambda: in_address(page, "masked") is None)
    assert page.locator(".struck").count() == 0
    page.get_by_role("switch", name="Hide special tokens").check()
    until(page, lambda: page.locator(".to .token").first.inner_text() == "another")
    open_tab("attention", model="bert-books", text=SHIP, view="rollout", masked="[2]")
    page.get_by_text("“ship” is hidden from the model.").wait_for()
    assert page.locator(".token.struck").all_inner_texts() == ["ship"]
    assert page.locator(".token.struck").evaluate("e => getComputedStyle(e).opacity") == "1"  # to be read, too


def test_rollout_without_a_masked_token(open_tab, page):
    model, reading = reading_of("shakespeare", TO_BE)
    expected = look.attention_rollout(model, reading)[3]
    open_tab("attention", model="shakespeare", text=TO_BE, view="rollout", layer=3)
    matrix = lambda: torch.tensor([[float(x) for x in list(row.values())[1:]] for row in table(page)])  # noqa: E731
    torch.testing.assert_close(matrix(), expected, atol=1e-6, rtol=0)
    page.get_by_role("group", name="The text").get_by_role("button").nth(4).dblclick()
    page.get_by_text(" is hidden from the model.").wait_for()
    page.locator(".token.struck").wait_for()
    settled(page)
    found = matrix()
    others = [i for i in range(19) if i != 4]
    assert (found[others, 4] == 0).all() and (expected[5:, 4] > 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(19), atol=1e-5, rtol=0)
    page.get_by_role("group", name="The text").get_by_role("button").nth(4).press("m")
    page.get_by_text(" is hidden from the model.").wait_for(state="detached")
    settled(page)
    torch.testing.assert_close(matrix(), expected, atol=1e-6, rtol=0)


def test_it_opens_on_a_telling_head_and_the_others_are_a_click_away(visit, open_tab, page, server):
    page.goto(f"{server.url}/#/attention")
    page.locator("canvas[data-lines]").wait_for()
    assert in_address(page, "model") == "bert-books"  # words, and not characters
    strongest = strongest_link("bert-books", "The ship sailed across the sea to a distant island.", 3, 0)
    assert page.get_by_text(f"Layer 3, head 0. The strongest link here: {strongest}").is_visible()
    assert page.get_by_role("radio", name="3", exact=True).is_checked()
    assert page.locator(".head[aria-pressed=true]").count() == 1
    page.get_by_role("button", name="show all").click()
    until(page, lambda: page.locator(".head[aria-pressed=true]").count() == 4)
    assert page.get_by_role("radio", name="3", exact=True).is_checked()
    page.locator(".to .token").nth(2).click()  # by touch, too, a held token can be hidden
    page.get_by_role("button", name="Hide “ship” from the model").click()
    page.get_by_text("“ship” is hidden from the model.").wait_for()


def test_every_head_and_one_opened(open_tab, page):
    open_tab("attention", model="shakespeare", text=TO_BE, view="model")
    thumbnails = page.get_by_role("grid", name="Every layer and head").get_by_role("button")
    assert thumbnails.count() == 36
    thumbnails.first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.locator("canvas[data-lines]").wait_for()
    assert page.get_by_role("radio", name="1", exact=True).is_checked()
    pressed = page.locator(".head[aria-pressed=true]")
    assert pressed.count() == 1 and pressed.get_attribute("aria-label") == "Head 2"


def test_a_link_reopens_it(visit, open_tab, page):
    open_tab("attention", model="bert-books", text=SHIP)
    page.get_by_role("radio", name="2", exact=True).click()
    page.get_by_role("button", name="Head 1").click()
    page.locator(".from .token").nth(3).click()
    until(page, lambda: in_address(page, "token") == "3")
    again = visit()
    again.goto(address(page))
    again.locator("canvas[data-lines]").wait_for()
    for seen in (page, again):
        assert seen.get_by_role("radio", name="2", exact=True).is_checked()
        assert seen.get_by_role("button", name="Head 1").get_attribute("aria-pressed") == "false"
        assert seen.locator(".from .token[aria-pressed=true]").inner_text() == "sailed"


def test_a_text_that_it_cannot_read(open_tab, page, problems):
    open_tab("attention", model="shakespeare", text="words " * 100)
    assert "shorten" in page.get_by_role("alert").inner_text()
    page.get_by_role("button", name="Keep its end").click()
    page.locator("canvas[data-lines]").wait_for()
    problems[:] = [said for said in problems if "400" not in said]  # which the console tells, too


def test_the_drawing_is_saved_as_lines(open_tab, page):
    open_tab("attention", model="reversal", text=DIGITS)
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as found:
        page.get_by_role("menuitem", name="Drawing (SVG)").click()
    drawing = Path(found.value.path()).read_text(encoding="utf-8")
    assert drawing.count("<path") >= 4 and drawing.count("<text") == 45 and "<image" not in drawing
    assert page.locator("body > svg").count() == 0


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ({"model": "bert-books", "text": '"A"\nship', "masked": "[3]", "off": "[0]"}, "Size([4, 6, 6])"),
        ({"model": "shakespeare", "text": "To be", "masked": "[1]", "layer": 0}, "torch.Size([6, 5, 5])"),
        ({"model": "shakespeare", "text": "To be", "view": "neuron", "token": 3}, "tensor([0."),
        ({"model": "translator", "text": HUND, "masked": "[1]"}, "decoder.3.cross.weights"),
        ({"model": "translator", "text": HUND, "view": "matrix", "all": "true"}, "' dog'"),
        ({"model": "reversal", "text": "3 1 4", "view": "model"}, "Size([1, 4, 3])"),
        (
            {"model": "translator", "text": HUND, "view": "matrix", "all": "true", "masked": "[1]"},
            "tensor([[",
        ),
        ({"model": "bert-books", "text": SHIP, "view": "rollout"}, "tensor([["),
        ({"model": "bert-books", "text": SHIP, "view": "rollout", "masked": "[2]"}, "tensor([["),
        (
            {"model": "shakespeare", "text": "abc", "view": "rollout", "masked": "[0]", "layer": 5},
            "[0.0000,",
        ),
    ],
)
def test_the_code_runs(open_tab, page, tmp_path, capsys, asked, printed):
    open_tab("attention", **asked)
    page.get_by_role("button", name="View code").click()
    script = tmp_path / "code.py"
    script.write_text(page.get_by_role("dialog").locator("pre").first.inner_text(), encoding="utf-8")
    runpy.run_path(str(script))
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("view", ["heads", "model", "neuron", "matrix", "rollout"])
def test_narrow_screens_do_not_scroll_sideways(visit, open_tab, view):
    narrow = visit(viewport={"width": 390, "height": 844})
    page = open_tab("attention", model="bert-books", text=SHIP, view=view, on=narrow)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
