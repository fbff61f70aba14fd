"""Step by step: every number of a forward pass is the model's own, and says what it was computed from."""

from __future__ import annotations

import csv
import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.generate.sampling import keep_top_k, keep_top_p
from heedful.observe.capture import capture
from heedful.observe.inputs import text_input
from support.playground import exact
from support.serving import Server, saved

TEXT = "To be, or not"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The tiny model that ships, and one whose tokens are merged of bytes."""
    if not (Path(heedful.__file__).parent / "serve" / "page" / "index.html").is_file():
        pytest.skip("the playground's page is not built: make page")
    with Server("tiny", saved(tmp_path_factory.mktemp("models") / "merged")) as started:
        yield started


@pytest.fixture(scope="module")
def acts():
    loaded = exact("tiny")
    with torch.no_grad(), capture(loaded.model, ["*"]) as found:
        loaded.model(text_input(loaded.model, loaded.tokenizer, TEXT).batch)
    return found


def value(text: str) -> float:
    return float(text.replace("−", "-").replace(" %", "e-2").removeprefix("< "))


def near(text: str, number: float) -> bool:
    """Three digits are shown."""
    return abs(value(text) - number) <= 6e-3 * abs(number) + 1e-6


def hover(page: Any, step: str, row: int, column: int, *, click: bool = False) -> None:
    canvas = page.locator(f"[data-step={step}] canvas")
    canvas.scroll_into_view_if_needed()
    rows, columns = (int(n) for n in page.locator(f"[data-step={step}] .shape").inner_text().split(" × "))
    box = canvas.bounding_box()
    at = {
        "x": 1 + (column + 0.5) * (box["width"] - 2) / columns,
        "y": 1 + (row + 0.5) * (box["height"] - 2) / rows,
    }
    canvas.click(position=at) if click else canvas.hover(position=at)


def params(page: Any) -> dict[str, str]:
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")


def test_a_cell_says_what_it_was_computed_from(open_tab, page, acts):
    open_tab("steps", model="tiny", text=TEXT, layer=1, head=1)
    panel = page.get_by_role("region", name="This step")
    query, key = acts["decoder.1.self.queries"][0, 1, 8], acts["decoder.1.self.keys"][0, 1, 3]
    hover(page, "scores", 8, 3)
    assert panel.get_by_role("heading").inner_text() == "Scores"
    assert panel.locator(".where").inner_text() == "r → b"
    assert near(panel.locator(".cell strong").inner_text(), float(query @ key))
    shown = [[cell.inner_text() for cell in row.locator("td").all()] for row in panel.locator("tbody tr").all()]
    for texts, numbers in zip(shown, (query, key, query * key), strict=True):
        assert all(near(text, x) for text, x in zip(texts, numbers.tolist(), strict=True))
    for step, name in (("weights", "weights"), ("heads_out", "heads")):
        hover(page, step, 12, 2)
        number = float(acts[f"decoder.1.self.{name}"][0, 1, 12, 2])
        assert near(panel.locator(".cell strong").inner_text(), number)
        assert value(panel.locator(".formula").inner_text().split("= ")[1]) == value(
            panel.locator(".cell strong").inner_text()
        )
    hover(page, "masked", 3, 9)
    assert panel.locator(".cell strong").inner_text() == "−∞"
    assert "may not look" in panel.inner_text()


def test_norms_sums_and_activations_add_up(open_tab, page, acts):
    open_tab("steps", model="tiny", text=TEXT, layer=0)
    panel = page.get_by_role("region", name="This step")
    block = exact("tiny").model.decoder.blocks[0]
    hover(page, "normed", 5, 7)
    formula = panel.locator(".formula").inner_text()
    assert near(formula.split("× ")[1].split(" ")[0], float(block.attention_norm.weight[7].detach()))
    hover(page, "q", 5, 3)  # of the first head
    columns = panel.locator("thead th").all_inner_texts()  # the largest terms first
    matrix = panel.locator("tbody tr").nth(1).locator("td[title]").all_inner_texts()
    assert len(matrix) >= 8 and columns[-1] == "bias"
    for column, text in zip(columns, matrix, strict=False):
        assert near(text, float(block.attention.query.weight[3, int(column)].detach()))
    bias = panel.locator("tbody tr").nth(2).locator("td").last.inner_text()
    assert near(bias, float(block.attention.query.bias[3].detach()))
    hover(page, "residual", 4, 1)
    before, after = acts["decoder.0.before"][0, 4, 1], acts["decoder.0.self.output"][0, 4, 1]
    assert near(panel.locator(".formula").inner_text().split("= ")[1], float(before + after))
    hover(page, "activated", 4, 20)
    assert panel.locator(".formula").inner_text().startswith("GELU(")
    assert near(panel.locator(".cell strong").inner_text(), float(acts["decoder.0.feedforward.hidden"][0, 4, 20]))


def test_the_choice_reuses_the_logits(open_tab, page, acts):
    asked = []
    open_tab("steps", model="tiny", text=TEXT)
    page.on("request", lambda request: "/api/" in request.url and asked.append(request.url))
    page.get_by_label("Temperature", exact=True).focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    for name, number in (("Top-k", "6"), ("Top-p", "0.9")):
        page.get_by_label(name, exact=True).fill(number)
    logits = acts["logits"][:, -1] / 1.5
    kept = keep_top_p(keep_top_k(logits, 6), 0.9).softmax(-1)[0]
    rows = page.get_by_role("region", name="The choice").locator("tbody tr:not(.more)")
    order = logits[0].argsort(descending=True).tolist()
    for i, (row, id) in enumerate(zip(rows.all(), order, strict=False)):
        cells = row.locator("td:not([aria-hidden])").all_inner_texts()
        assert near(cells[0], float(acts["logits"][0, -1, id])) and near(cells[1], float(logits[0, id]))
        if i < 6:
            assert abs(value(cells[2]) - logits.softmax(-1)[0, id]) < 6e-3
        if kept[id] > 0:
            assert abs(value(cells[3]) - float(kept[id])) < 6e-3
        else:
            assert "cut" in cells[3]
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_text("One token is left: at temperature 0").wait_for()
    assert asked == []
    before = page.get_by_label("Text", exact=True).input_value()
    page.get_by_role("button", name="Write it, go on").click()
    page.get_by_text("14 of 32 tokens").wait_for()
    assert [url for url in asked if url.endswith("/weights")] == []  # those it has
    assert page.get_by_label("Text", exact=True).input_value() == before + exact("tiny").generate(
        TEXT, max_tokens=1, temperature=0
    )


def test_a_link_and_the_keyboard(visit, open_tab, page):
    open_tab("steps", model="tiny", text=TEXT)
    hover(page, "weights", 6, 2, click=True)
    page.wait_for_function("() => location.hash.includes('cell=')")
    assert json.loads(params(page)["cell"]) == [6, 2] and params(page)["step"] == "weights"
    again = visit()
    again.goto(page.url)
    again.locator(".explained .where").wait_for()
    assert again.locator(".explained .where").inner_text() == page.locator(".explained .where").inner_text()
    page.mouse.move(5, 5)
    page.get_by_role("button", name="The step after").click()
    assert page.get_by_role("region", name="This step").get_by_role("heading").inner_text() == "Weighted sum"
    page.locator("[data-step=q] canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.locator(".explained .where").inner_text() == "o · number 0"


def test_the_merges_of_a_word_and_a_text_that_is_too_long(open_tab, page):
    open_tab("steps", model="merged", text="the young cat likes")
    page.get_by_text("the merges of 4 words").click()
    words = page.locator(".words ol")
    words.nth(3).wait_for()
    assert words.count() == 4
    for word in words.all():
        steps = [line.locator("span").all_inner_texts() for line in word.locator("li").all()]
        assert len({"".join(pieces) for pieces in steps}) == 1
        assert [len(pieces) for pieces in steps] == sorted((len(p) for p in steps), reverse=True)
    assert "".join(words.nth(1).locator("li").last.locator("span").all_inner_texts()) == "·young"
    page.get_by_label("Text", exact=True).fill("the young cat " * 40)
    page.get_by_text("a text of at most 64 tokens").wait_for()  # the map is there, and not every number
    page.get_by_label("Text", exact=True).fill("the young cat " * 400)
    page.get_by_role("alert").get_by_text("are read here: shorten it").wait_for()
    page.get_by_role("button", name="Keep its end").click()
    page.locator("canvas[data-tiles]:not([data-tiles='0'])").wait_for()
    assert page.get_by_label("Text", exact=True).input_value().endswith("young cat ")


def tile(page: Any, nth: int) -> None:
    """Walk to a step of the map and open it."""
    page.locator("canvas[data-tiles]").focus()
    page.keyboard.press("ArrowRight")
    for _ in range(nth):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")


def test_the_whole_pass_is_one_picture_and_a_step_of_it_opens(open_tab, page):
    open_tab("steps", model="tiny", text=TEXT)
    page.locator("canvas[data-tiles='37']").wait_for()  # embedding, position, 17 steps of each layer, the last norm
    assert page.get_by_role("button", name="Play").count() == 0  # nothing moves where that is not wanted
    bars = page.get_by_role("list", name="The likeliest next tokens").get_by_role("listitem")
    assert bars.count() >= 7 and bars.first.bounding_box()["y"] < 800  # above the fold
    assert page.get_by_label("Top-p", exact=True).bounding_box()["y"] < 800
    assert page.get_by_label("Temperature, as a number").bounding_box()["height"] >= 24  # a target that can be hit
    tile(page, 19 + 8)
    page.wait_for_function("() => location.hash.includes('layer=1')")
    assert (params(page)["step"], params(page)["layer"]) == ("weights", "1")
    assert page.get_by_role("region", name="This step").get_by_role("heading").inner_text() == "Softmax"
    page.locator("canvas[data-tiles]").focus()
    page.keyboard.press("Shift+ArrowLeft")
    page.wait_for_function("() => location.hash.includes('token=11')")


def test_a_pass_is_played_and_its_token_drops_into_the_text(visit, open_tab):
    page = visit(reduced_motion="no-preference")
    page.clock.install()
    open_tab("steps", model="tiny", text=TEXT, temperature=0, on=page)
    page.locator("canvas[data-tiles='37']").wait_for()
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(9000)
    assert page.get_by_role("button", name="Stop").is_visible()
    assert page.get_by_label("Text", exact=True).input_value() == TEXT
    page.clock.run_for(10_000)
    assert page.locator(".falling").is_visible()
    page.clock.run_for(1500)
    assert page.get_by_label("Text", exact=True).input_value() == TEXT + " "
    assert page.get_by_role("button", name="Play").is_visible()


def test_code_runs_and_numbers_are_saved(open_tab, page, acts, server, tmp_path, capsys):
    open_tab("steps", model="tiny", text=TEXT, layer=1)
    page.get_by_role("button", name="View code").click()
    file = tmp_path / "shown.py"
    file.write_text(page.get_by_role("dialog").locator("pre").inner_text(), encoding="utf-8")
    runpy.run_path(str(file))
    assert "decoder.1.self.weights (1, 2, 13, 13)" in capsys.readouterr().out
    page.get_by_role("dialog").get_by_role("tab", name="curl").click()
    body = json.loads(shlex.split(page.get_by_role("dialog").locator("pre").inner_text())[-1])
    assert page.request.post(f"{server.url}/api/steps", data=body).ok
    page.keyboard.press("Escape")
    files = {}
    for item in ("Numbers (CSV)", "Drawing (SVG)"):
        page.get_by_role("button", name="Save").click()
        with page.expect_download() as found:
            page.get_by_role("menuitem", name=item).click()
        files[item] = found.value.path().read_text(encoding="utf-8")
    rows = list(csv.DictReader(files["Numbers (CSV)"].splitlines()))
    hidden = [float(row["value"]) for row in rows if row["step"] == "hidden"]
    assert len(hidden) == 13 * 32
    output = [float(row["value"]) for row in rows if row["step"] == "output"]
    assert torch.allclose(torch.tensor(output).view(13, 16), acts["decoder.1.after"][0], atol=1e-4)
    assert "<image" in files["Drawing (SVG)"] and "residual stream" in files["Drawing (SVG)"]
