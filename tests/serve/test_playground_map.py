"""POST /api/steps/map: a pass as one picture has the library's numbers, whatever the size of the model and the text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from heedful.observe.capture import capture
from heedful.observe.inputs import text_input
from heedful.serve.playground.steps_map import MAX_MAP_BYTES, image_side, miniature
from support.folders import saved, tiny_llama
from support.playground import TEXTS, array, asked, exact, same
from support.serving import ThreadServer, assert_error, serving


@pytest.fixture(scope="module")
def page() -> Iterator[ThreadServer]:
    with serving("tiny", "shakespeare", "bert-books", "digits-gpt") as found:
        yield found


def decoded(found: dict) -> torch.Tensor:
    """The numbers of a miniature; NaN where it is empty."""
    codes = array(found["image"]).float()
    share = found["id"] in ("weights", "shares")
    numbers = (codes - 1) / 254 * found["full"] if share else (codes - 128) / 127 * found["full"]
    return numbers.masked_fill(codes == 0, torch.nan)


def test_a_small_pass_is_painted_from_its_own_numbers(page):
    loaded = exact("tiny")
    with torch.no_grad(), capture(loaded.model, ["*"]) as acts:
        loaded.model(text_input(loaded.model, loaded.tokenizer, TEXTS["tiny"]).batch)
    found = asked(page, "steps/map", model="tiny", text=TEXTS["tiny"], token=9)
    images = {(m["layer"], m["id"]): m for m in found["miniatures"]}
    assert len(images) == len(found["miniatures"]) == 3 + 2 * 17
    expected = {
        (None, "embeddings"): acts["decoder.embeddings"],
        (0, "input"): acts["decoder.0.before"],
        (1, "weights"): acts["decoder.1.self.weights"],
        (1, "activated"): acts["decoder.1.feedforward.hidden"],
        (1, "output"): acts["decoder.1.after"],
        (None, "final"): acts["decoder.output"],
    }
    for place, x in expected.items():
        one = images[place]
        assert one["shape"] == list(x[0].shape)
        close = one["full"] / 120
        torch.testing.assert_close(decoded(one), x[0].clamp(-one["full"], one["full"]), atol=close, rtol=0)
    mask = decoded(images[0, "masked"])
    assert torch.equal(mask.isnan(), torch.ones(13, 13).triu(1).bool().expand(2, 13, 13))
    rows = torch.stack([acts[f"decoder.{i}.self.weights"][0, :, 9] for i in range(2)])
    same((array(found["attention"]) / 255).tolist(), rows, atol=0.003)
    same(found["logits"], acts["logits"][0, -1])
    same(found["stream"], torch.stack([acts[f"decoder.{n}"][0, 9].norm() for n in ("0.before", "0.after", "1.after")]))
    assert [t["id"] for t in found["named"]] == acts["logits"][0, -1].argsort(descending=True).tolist()
    assert found["small"] and found["token"] == 9


def test_a_larger_model_and_a_longer_text_have_no_larger_a_picture(page):
    found = asked(page, "steps/map", model="shakespeare", text="To be, or not to be. " * 12)
    assert not found["small"] and found["token"] == len(found["tokens"]) - 1
    assert {tuple(m["image"]["shape"][-2:]) for m in found["miniatures"]} <= {(48, 48), (32, 32)}
    for layers, heads, tokens in ((4, 4, 64), (12, 12, 512), (30, 9, 512), (128, 8, 512)):
        side = image_side(layers, heads, tokens)
        assert side >= 8 and (side == 8 or layers * (19 + 4 * heads) * side * side <= MAX_MAP_BYTES)


def test_rotation_gates_and_shared_keys_have_their_own_steps(tmp_path):
    with serving(saved(tmp_path / "llama", tiny_llama())) as other:
        found = asked(other, "steps/map", model="llama", text="3 1 4 1 5")
    ids = [m["id"] for m in found["miniatures"] if m["layer"] == 0]
    assert {"q", "q_turned", "k_turned", "gated"} <= set(ids) and "positions" not in ids


def test_a_pixel_of_several_numbers_has_the_largest_and_its_sign():
    x = torch.zeros(4, 4)
    x[0, 1], x[3, 3] = -5.0, 2.0
    codes = miniature("input", 0, x, 2)["image"]
    assert codes[0, 0] < 128 < codes[1, 1] and codes[0, 1] == codes[1, 0] == 128


def test_what_has_no_map_is_refused_in_words(page):
    for name in ("bert-books", "digits-gpt"):
        assert "decoder" in assert_error(page.post("/api/steps/map", {"model": name, "text": "a"}), 400)
    wrong = {"model": "tiny", "text": "To be", "token": 5}
    assert "0 to 4" in assert_error(page.post("/api/steps/map", wrong), 400)
    long = page.post("/api/steps/map", {"model": "tiny", "text": "a" * 33})
    assert "at most 32 are read here" in assert_error(long, 400, code="context_length_exceeded")
