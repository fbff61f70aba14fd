"""Step by step: of every kind of model, what a cell says that it was made of comes to the number that is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.models.registry import FAMILIES
from support.serving import Server, words

SMALL = {"d_model": 24, "n_layers": 2, "n_heads": 4, "max_len": 64}
GATED = SMALL | {"d_ff": 40, "n_kv_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "post-norm": ("gpt", SMALL | {"norm_first": False}),
    "parallel-one-norm": ("gpt_j", SMALL | {"d_rotary": 4}),
    "parallel-two-norms": ("gpt_neox", SMALL | {"d_ff": 40, "rotated": 0.67}),
    "llama": ("llama", GATED),
    "windows": ("gpt_neo", SMALL | {"window": 3}),
    "caps": ("gemma", GATED | {"d_head": 8, "after_norms": True, "score_cap": 2.0, "logit_cap": 3.0}),
    "head-norms": ("qwen", GATED | {"head_norms": True}),
    "wide-norms": ("olmo", GATED),
    "experts": ("mixtral", GATED | {"n_experts": 4}),
}
LAYERS = {"tiny": (0, 1), "windows": (0, 1)}  # of the others one layer is as the next
TEXT = "the young cat likes"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The tiny model that ships, and random ones of other shapes."""
    if not (Path(heedful.__file__).parent / "serve" / "page" / "index.html").is_file():
        pytest.skip("the playground's page is not built: make page")
    root, tokenizer = tmp_path_factory.mktemp("models"), words()
    for name, (family, settings) in MODELS.items():
        kind = FAMILIES[family].load()
        model = kind.create(kind.config_class(**settings, vocab_size=len(tokenizer))).eval()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw) * 0.25 + (p.ndim == 1))
        heedful.save(model, root / name, tokenizer)
    with Server("tiny", *(root / name for name in MODELS), "--lazy") as started:
        yield started


READ = """where => {
  const box = document.querySelector(where)
  const exact = found => found && Number(found.title)
  const rows = [...box.querySelectorAll('tbody tr')].filter(row => row.querySelector('th').textContent === 'product')
  return {
    shown: exact(box.querySelector('strong[title]')),
    comes_to: exact(box.querySelector('.result')),
    terms: rows.map(row => [...row.querySelectorAll('td[title]')].map(exact)),
    words: box.innerText,
  }
}"""


def explained(page: Any, where: str) -> dict[str, Any]:
    """What a panel says of a number, of which the digits are all in the titles; it must be right."""
    found = page.evaluate(READ, where)
    shown, comes_to = found["shown"], found["comes_to"]
    assert shown is not None, found
    if comes_to is not None:
        assert abs(shown - comes_to) <= 1e-5 * max(1, abs(shown)), found
        assert "≈" not in found["words"]
    for terms in found["terms"]:
        if "tanh" not in found["words"]:  # a cap, which comes after the sum
            assert abs(sum(terms) - comes_to) <= 1e-9 * max(1, abs(comes_to)), found
    return found


def walk(page: Any) -> dict[str, list[dict[str, Any]]]:
    """Some cells of every step, by the arrow keys alone."""
    found = {}
    for step in page.locator("[data-step]").evaluate_all("all => all.map(one => one.dataset.step)"):
        page.locator(f"[data-step={step}] canvas").focus()
        cells = []
        for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft"):
            page.keyboard.press(key)
            cells.append(explained(page, ".explained"))
        found[step] = cells
    return found


@pytest.mark.parametrize("name", ["tiny", *MODELS])
def test_what_every_number_is_said_to_be_made_of_comes_to_it(open_tab, page, name):
    for layer in LAYERS.get(name, (1,)):
        open_tab("steps", model=name, text="To be, or not" if name == "tiny" else TEXT, layer=layer, head=1)
        page.locator("[data-step=scores] canvas").wait_for()
        found = walk(page)
        for step, cells in found.items():
            seen = [cell for cell in cells if cell["comes_to"] is not None]
            # Where looking is not allowed, or an expert is not asked, there is nothing to add up.
            assert seen or step in ("masked", "weights", "shares"), step
        multiplied = {step for step, cells in found.items() if any(cell["terms"] for cell in cells)}
        assert multiplied >= {"q", "k", "v", "scores", "heads_out", "attention_out", "feedforward_out"}
        assert ("hidden" in multiplied) == (name != "experts")


@pytest.mark.parametrize("name", ["tiny", "parallel-one-norm", "caps"])
def test_the_choice_says_how_it_came_about(open_tab, page, name):
    text = "To be, or not" if name == "tiny" else TEXT
    open_tab("steps", model=name, text=text, temperature=0.7, top_k=9, top_p=0.8)
    grid = page.get_by_role("grid", name="The likeliest tokens")
    grid.get_by_role("gridcell").first.focus()
    said = []
    for key in ("", "ArrowRight", "ArrowRight", "ArrowRight", *11 * ("ArrowDown",)):
        if key:
            page.keyboard.press(key)
        said.append(explained(page, ".how"))
    assert said[0]["terms"] and "learned vector" in said[0]["words"]
    assert "divided by the temperature" in said[1]["words"] and "÷ 0.7" in said[1]["words"]
    assert "e to the power" in said[2]["words"]
    cuts = [one["words"] for one in said[4:]]
    assert any("top-p is content with 80 %" in words for words in cuts)
    assert "number 12 in order, and top-k leaves the 9 likeliest" in cuts[-1]
    grid.get_by_role("gridcell").first.hover()  # the pointer comes first
    assert "learned vector" in page.locator(".how").inner_text()
