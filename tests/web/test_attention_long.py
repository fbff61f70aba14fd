"""The tab Attention with as many layers, heads and tokens as it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.models.gpt import GPT, GPTConfig
from heedful.weights.save import save
from support.browser import n_lines, until
from support.serving import Server, words


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The heads and layers of GPT-2 with random weights, narrow, so that it is quick."""
    torch.manual_seed(0)
    tokenizer = words()
    model = GPT.create(
        GPTConfig(d_model=48, n_layers=12, n_heads=12, vocab_size=len(tokenizer), max_len=512, dropout=0.0)
    )
    model.special = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    folder = tmp_path_factory.mktemp("models") / "long"
    save(model.eval(), folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(long_model: Path) -> Iterator[Server]:
    page = Path(heedful.__file__).parent / "serve" / "page" / "index.html"
    if not page.is_file():
        pytest.skip("the playground's page is not built: make page")
    with Server(long_model) as started:
        yield started


def test_nonsense_in_a_link_does_no_harm(open_tab, page):
    nonsense = {"layer": 99, "off": "[77]", "token": 50, "head": -3, "view": "?", "which": "cross"}
    open_tab("attention", model="long", text="<b>To</b>", **nonsense)
    assert "".join(page.locator(".from .token").all_inner_texts()) == "<b>To</b>"
    assert page.get_by_role("radio", name="11", exact=True).is_checked()


def test_512_tokens_of_12_layers_of_12_heads(open_tab, page):
    text = "\n".join(f"{i % 10}" for i in range(256))
    asked: list[Any] = []
    page.on("response", lambda answer: answer.url.endswith("/api/attention") and asked.append(answer))
    open_tab("attention", model="long", text=text, layer=0)
    n = int(page.get_by_text(re.compile(r"^\d+ tokens$")).inner_text().split()[0])
    assert 500 <= n <= 512
    assert len(asked) == 1  # one layer at a time
    assert asked[0].headers["content-type"] == "application/vnd.heedful.arrays"
    canvas = page.locator("canvas[data-lines]")
    assert 0 < n_lines(page) <= 1500
    assert canvas.evaluate("canvas => canvas.clientHeight") < 800  # no larger than what is seen of it
    assert page.locator(".from .token").count() < 100  # nor are all tokens there at once
    rows = page.get_by_role("group", name="Attention between tokens")
    rows.evaluate("window => (window.scrollTop = 5000)")
    page.locator('.from .token[data-token="255"]').hover()
    page.locator("[data-said]", has_text=" looks at: ").wait_for(state="attached")
    assert n_lines(page) <= 256 * 12
    page.locator('.from .token[data-token="255"]').focus()
    page.keyboard.press("End")  # which is not there yet
    page.locator(f'.from .token[data-token="{n - 1}"]:focus').wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.locator('.to .token[data-token="0"]:focus').wait_for()
    page.get_by_role("radio", name="11", exact=True).click()
    until(page, lambda: len(asked) == 2)
    page.get_by_role("radio", name="Model", exact=True).click()
    thumbnails = page.get_by_role("grid", name="Every layer and head").get_by_role("button")
    thumbnails.nth(143).wait_for()
    assert thumbnails.count() == 144
