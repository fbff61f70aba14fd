"""Maps, rollout, alignments and the worth of heads."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.models.base import Batch
from heedful.observe.attention import (
    alignment,
    attention_entropy,
    attention_kinds,
    attention_rollout,
    attention_weights,
    axis_labels,
    head_importance,
    rollout,
)
from heedful.observe.inputs import image_input, text_input, token_label
from support.tiny import tiny


def test_the_reversal_model_looks_along_the_anti_diagonal():
    loaded = heedful.load("reversal")
    source = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    reading = text_input(loaded.model, loaded.tokenizer, " ".join(map(str, source)))
    assert reading.targets == [*map(str, source[::-1]), "</s>"]
    weights = alignment(loaded.model, reading)[:20]
    assert weights.shape == (20, 20)
    best = weights.argmax(dim=-1)
    off = (best - torch.arange(19, -1, -1)).abs()
    assert (off <= 1).all() and (off == 0).sum() >= 15
    near = weights.flip(1).diagonal().sum() + sum(weights.flip(1).diagonal(d).sum() for d in (-1, 1))
    assert near / 20 > 0.9


def test_a_causal_model_sees_nothing_of_the_future():
    loaded = heedful.load("shakespeare", dtype=torch.float32)  # its file has bfloat16, whose sums are near 1
    reading = text_input(loaded.model, loaded.tokenizer, "ROMEO: But soft,")
    for weights in attention_weights(loaded.model, reading).values():
        assert weights.triu(1).abs().max() == 0
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    rolled = attention_rollout(loaded.model, reading)
    assert rolled.triu(1).abs().max() == 0 and torch.allclose(rolled.sum(-1), torch.ones(rolled.shape[:-1]), atol=1e-5)


def test_rollout_of_two_layers_by_hand():
    """Abnar & Zuidema 2020, equations 1 and 2: A = (W + I) / 2, and each layer times the one before."""
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.2, 0.8], [0.0, 1.0]])
    found = rollout(torch.stack([first, second])[:, None])
    a, b = torch.tensor([[1.0, 0.0], [0.25, 0.75]]), torch.tensor([[0.6, 0.4], [0.0, 1.0]])
    assert torch.allclose(found[0], a) and torch.allclose(found[1], b @ a)
    with pytest.raises(ValueError, match="layers, heads"):
        rollout(torch.zeros(2, 3, 4, 5))


def test_kinds_and_what_stands_beside_a_map():
    assert (
        attention_kinds(tiny("gpt")) == ["decoder"]
        and attention_kinds(tiny("bert")) == ["encoder"]
        and attention_kinds(tiny("vit")) == ["encoder"]
    )
    assert attention_kinds(tiny("t5")) == ["encoder", "decoder", "cross"]
    assert (
        attention_kinds(tiny("seq2seq", attention="dot")) == ["cross"]
        and attention_kinds(tiny("seq2seq")) == attention_kinds(tiny("cbow")) == []
    )
    model = tiny("t5").eval()
    reading = text_input(model, None, "5 6 7", target="9 8")
    maps = attention_weights(model, reading, "cross", 1)
    ((name, weights),) = maps.items()
    assert name == "decoder.1.cross.weights" and weights.shape == (4, 2, 3)
    assert axis_labels(reading, name) == (["9", "8"], ["5", "6", "7"])
    assert axis_labels(reading, "encoder.0.self.weights")[0] == ["5", "6", "7"]
    assert axis_labels(reading, "decoder.0.self.weights")[0] == ["0", "9"]
    for wrong in (dict(kind="cross"), dict(layer=2)):
        with pytest.raises(ValueError, match="this model has"):
            attention_weights(tiny("gpt").eval(), text_input(tiny("gpt"), None, "5 6"), **wrong)


def test_a_head_that_goes_nowhere_is_worth_nothing():
    model = tiny("gpt").eval()
    attended = model.decoder.blocks[1].attention
    with torch.no_grad():
        attended.output.weight[:, 3 * attended.d_head :] = 0
    batch = Batch(torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(0)), torch.tensor([8, 5]))
    for ablation in ("zero", "mean"):
        scores = head_importance(model, batch, ablation=ablation)
        assert scores.shape == (2, 4)
        assert scores[1, 3] < 1e-6 and (scores[0] > 1e-4).all() and (scores[1, :3] > 1e-4).all()


def test_entropy_is_zero_for_one_and_two_bits_for_four():
    weights = torch.stack([torch.eye(4), torch.full((4, 4), 0.25)])
    assert torch.allclose(attention_entropy(weights), torch.tensor([0.0, 2.0]))


def test_attention_over_the_patches_of_an_image():
    loaded = heedful.load("digits-vit")
    reading = image_input(loaded.model, torch.rand(1, 28, 28) * 2 - 1)
    assert reading.tokens[:2] == ["[CLS]", "1,1"] and len(reading.tokens) == 50
    assert attention_rollout(loaded.model, reading).shape == (6, 50, 50)
    with pytest.raises(ValueError, match="reads images"):
        text_input(loaded.model, None, "a text")


def test_tokens_are_written_so_that_one_can_see_them():
    shakespeare, bert = heedful.load("shakespeare"), heedful.load("bert-books")
    reading = text_input(shakespeare.model, shakespeare.tokenizer, "a b\nc")
    assert reading.tokens == ["a", "␣", "b", "⏎", "c"]
    pair = text_input(bert.model, bert.tokenizer, "the man", second="the sea")
    assert pair.tokens == ["[CLS]", "the", "man", "[SEP]", "the", "sea", "[SEP]"]
    assert pair.batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert token_label(None, 7) == "7"
    for wrong, text in ((dict(second="x"), "one text"), (dict(target="x"), "no target")):
        with pytest.raises(ValueError, match=text):
            text_input(shakespeare.model, shakespeare.tokenizer, "x", **wrong)
    with pytest.raises(ValueError, match="at most 100,000"):
        text_input(shakespeare.model, shakespeare.tokenizer, "x" * 100_001)
    with pytest.raises(ValueError, match="numbers from 0 to 18"):
        text_input(heedful.load("reversal").model, None, "3 one 4")
    with pytest.raises(ValueError, match="shorten the text"):
        text_input(shakespeare.model, shakespeare.tokenizer, "x" * 300)


def test_the_translators_words_look_at_their_originals():
    loaded = heedful.load("translator", dtype=torch.float32)
    reading = text_input(loaded.model, loaded.tokenizer, "Ein Mann mit einem roten Hut spielt Gitarre.")
    weights, says, source = (
        alignment(loaded.model, reading),
        *([t.strip() for t in x] for x in (reading.targets, reading.source)),
    )
    for english, german in (("red", "roten"), ("hat", "Hut"), ("playing", "spielt"), ("guitar", "Gitarre")):
        assert source[int(weights[says.index(english)].argmax())] == german
