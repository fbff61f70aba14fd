"""Images: drawn or chosen, classified with the patches that counted, completed pixel by pixel."""

from __future__ import annotations

import json
import runpy
import shlex
from typing import Any

import torch
from torch import Tensor

from heedful.observe import attention as look
from heedful.observe.inputs import image_input
from heedful.serve.playground.images import example_digits, example_mnist
from support.browser import settled, table
from support.playground import exact
from support.serving import events

LEVELS = "0123456789abcdefg"


def params(page: Any) -> dict[str, str]:
    page.evaluate("() => void dispatchEvent(new Event('blur'))")  # whoever leaves the window finds it written
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")


def pixels(levels: Any) -> Tensor:
    return torch.tensor(levels)[None] * 2 - 1


def shown_code(page: Any, name: str) -> str:
    page.get_by_role("dialog").get_by_role("tab", name=name).click()
    return page.get_by_role("dialog").locator("pre").inner_text()


def test_an_example_is_classified_and_its_patches_are_shown(open_tab, page, tmp_path, capsys):
    open_tab("images", model="digits-vit")
    page.get_by_role("button", name="7", exact=True).first.click()
    page.get_by_role("heading", name="It looks like 7").wait_for()
    settled(page)
    image = next(digit["image"] for digit in example_mnist() if digit["label"] == 7)
    labels = {label.name: label.score for label in exact("digits-vit").classify(pixels(image))}
    rows = table(page)
    for row in rows[:11]:
        assert abs(float(row["value"]) - labels[row["label"]]) < 1e-4
    model = exact("digits-vit").model
    rolled = look.attention_rollout(model, image_input(model, pixels(image)))[-1, 0, 1:]
    assert torch.allclose(torch.tensor([float(row["value"]) for row in rows[11:]]), rolled, atol=1e-4)
    page.get_by_role("button", name="View code").click()
    file = tmp_path / "shown.py"
    file.write_text(shown_code(page, "Python"), encoding="utf-8")
    runpy.run_path(str(file))
    name, score = capsys.readouterr().out.split("\n")[0].split(" ")
    assert name == "7" and abs(float(score) - labels["7"]) < 1e-3


def test_a_head_and_a_patch_are_chosen_and_the_link_keeps_them(visit, open_tab, page):
    open_tab("images", model="digits-vit")
    page.get_by_role("button", name="Layer 2, head 1").click()
    large = page.get_by_role("application", name="Layer 2, head 1")
    before = large.evaluate("canvas => canvas.toDataURL()")
    large.click(position={"x": 60, "y": 20})  # row 1, column 2 of 7 x 7
    page.get_by_text("from the patch in row 1, column 2").wait_for()
    page.mouse.move(2, 2)
    assert large.evaluate("canvas => canvas.toDataURL()") != before
    assert {name: params(page)[name] for name in ("layer", "head", "from")} == {
        "layer": "2",
        "head": "1",
        "from": "1",
    }
    again = visit()
    again.goto(page.url)
    again.get_by_text("from the patch in row 1, column 2").wait_for()
    page.get_by_role("button", name="All together").click()
    page.get_by_text("(rollout)").wait_for()


def test_what_is_drawn_is_what_the_model_reads(open_tab, page):
    open_tab("images", model="digits-vit")
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function(f"() => location.hash.includes('image={'0' * 784}')")
    assert page.get_by_role("button", name="Clear").is_disabled()
    canvas = page.get_by_role("application", name="Drawing")
    box = canvas.bounding_box()
    side = box["width"] / 28
    page.mouse.move(box["x"] + 14 * side, box["y"] + 4 * side)
    page.mouse.down()
    page.mouse.move(box["x"] + 14 * side, box["y"] + 24 * side, steps=30)
    page.mouse.up()
    canvas.focus()
    page.keyboard.press("ArrowUp")  # to the middle
    for key in (*["ArrowRight"] * 10, "Space"):
        page.keyboard.press(key)
    page.wait_for_function("() => /image=[^&]*g/.test(location.hash)")
    settled(page)
    levels = torch.tensor([LEVELS.index(letter) / 16 for letter in params(page)["image"]]).view(28, 28)
    assert levels[4:24, 13:15].min() > 0.5 and levels[:, 0].max() == 0 and levels[14, 24] == 1
    best = exact("digits-vit").classify(pixels(levels.tolist()))[0]
    page.get_by_role("heading", name=f"It looks like {best.name}").wait_for()
    page.get_by_role("radio", name="Erase").check()
    before = params(page)["image"]
    page.mouse.click(box["x"] + 24.5 * side, box["y"] + 14.5 * side)
    page.wait_for_function("old => !location.hash.includes(old)", arg=before)
    assert params(page)["image"][14 * 28 + 24] == "0"


def test_an_image_is_completed_as_the_server_streams_it(open_tab, page, server, tmp_path, capsys):
    open_tab("images", model="digits-gpt", n=2, given=40, seed=5, temperature=0.8)
    page.get_by_role("heading", name="Completed").wait_for()
    settled(page)
    page.get_by_text("48 of 48 pixels").wait_for()
    assert page.get_by_text("seen as").count() == 2  # by the classifier that is served, too
    image = example_digits()[6]["image"]
    rows = table(page)
    assert len(rows) == 128
    found = torch.tensor([float(row["level"]) for row in rows]).view(2, 64)
    assert torch.allclose(found[:, :40], torch.tensor(image).flatten()[:40].expand(2, -1))
    page.get_by_role("button", name="View code").click()
    body = json.loads(shlex.split(shown_code(page, "curl"))[-1])
    with server.http.stream("POST", "/api/image/complete", json=body) as reply:
        said = events(b"".join(reply.iter_raw()))
    for pixel in said:
        assert abs(float(found[pixel["index"], pixel["pixel"]]) - pixel["value"]) < 1e-4
    file = tmp_path / "shown.py"
    file.write_text(shown_code(page, "Python"), encoding="utf-8")
    images = runpy.run_path(str(file))["images"]
    assert images.shape == (2, 64) and images[:, :40].float().sub(found[:, :40] * 15).abs().max() <= 0.51


def test_another_seed_draws_another_image(open_tab, page):
    open_tab("images", model="digits-gpt", n=1, given=8)
    page.get_by_role("heading", name="Completed").wait_for()
    first = [row["level"] for row in table(page)]
    page.get_by_role("button", name="Again, otherwise").click()
    page.wait_for_function("() => location.hash.includes('seed=2')")
    page.get_by_role("heading", name="Completed").wait_for()
    page.get_by_text("56 of 56 pixels").wait_for()
    assert [row["level"] for row in table(page)] != first
