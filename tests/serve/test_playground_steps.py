"""POST /api/steps/weights: what a small model has learned, whichever way it is kept while it is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.folders import saved, tiny_llama
from support.playground import array, asked, exact, same
from support.serving import assert_error, serving


def check_map(found: dict[str, Any], layer: torch.nn.Linear) -> None:
    same(found["weight"], layer.weight.detach(), atol=1e-6)
    assert (found["bias"] is None) == (layer.bias is None)
    if layer.bias is not None:
        same(found["bias"], layer.bias.detach(), atol=1e-6)


def test_the_weights_are_the_models_own():
    model = exact("tiny").model
    with serving("tiny") as page:
        found = asked(page, "steps/weights", model="tiny")
    same(found["embedding"], model.embed.weight.detach())
    same(found["positions"], model.position.weight.detach())
    same(found["head"]["weight"], model.embed.weight.detach())
    assert found["embedding_scale"] is found["head"]["softcap"] is found["head"]["scale"] is None
    for layer, block in zip(found["layers"], model.decoder.blocks, strict=True):
        for name in ("query", "key", "value", "output"):
            check_map(layer[name], getattr(block.attention, name))
        check_map(layer["up"], block.feedforward.up)
        check_map(layer["down"], block.feedforward.down)
        assert (layer["act"], layer["gate"], layer["router"], layer["query_norm"]) == (
            "gelu_new",
            None,
            None,
            None,
        )
        same(layer["attention_norm"]["gain"], block.attention_norm.weight.detach())
        same(layer["attention_norm"]["shift"], block.attention_norm.bias.detach())
        assert layer["attention_norm"]["kind"] == "layer" and layer["attention_norm"]["eps"] == 1e-5


@pytest.mark.parametrize(("kind", "close"), [(None, 1e-6), ("bfloat16", 1e-6), ("int8", 5e-3)])
def test_of_gates_and_shared_keys_too_and_in_fewer_bits(tmp_path, kind, close):
    model = tiny_llama()
    with serving(saved(tmp_path / "llama", model), quantize=kind) as page:
        found = asked(page, "steps/weights", model="llama")
    assert found["positions"] is None
    for layer, block in zip(found["layers"], model.decoder.blocks, strict=True):
        for name, ours in {"query": block.attention.query, "key": block.attention.key, "gate": block.feedforward.gate,
                           "up": block.feedforward.up, "down": block.feedforward.down}.items():  # fmt: skip
            assert (array(layer[name]["weight"]) - ours.weight.detach()).abs().max() < close
            assert layer[name]["bias"] is None
        assert (layer["act"], layer["feedforward_norm"]["kind"]) == ("silu", "rms")


def test_what_is_not_small_or_not_there_is_refused():
    with serving("tiny", "shakespeare", "bert-books") as page:
        message = assert_error(page.post("/api/steps/weights", {"model": "shakespeare"}), 400)
        assert "6 layers, 192 wide" in message
        assert "decoder" in assert_error(page.post("/api/steps/weights", {"model": "bert-books"}), 400)
        assert_error(page.post("/api/steps/weights", {"model": "../tiny"}), 404, code="model_not_found")
        for body in (None, [], {}, {"model": 3}, {"text": "a"}):
            assert_error(page.post("/api/steps/weights", body), 400)
