"""The playground's numbers are the library's: tokens, attention, neurons, lens, rollout, alignments, every step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from heedful.observe import attention as look
from heedful.observe.capture import capture
from heedful.observe.inputs import text_input
from heedful.observe.lens import logit_lens
from heedful.serve.playground.steps import bpe_merges
from support.folders import saved, tiny_llama
from support.playground import TEXTS, array, asked, exact, pieces, same
from support.serving import ThreadServer, assert_error, serving, words

MAPS = [
    ("tiny", "self", "decoder"),
    ("shakespeare", "self", "decoder"),
    ("bert-books", "self", "encoder"),
    ("translator", "encoder", "encoder"),
    ("translator", "self", "decoder"),
    ("translator", "cross", "cross"),
    ("reversal", "cross", "cross"),
]


@pytest.fixture(scope="module")
def page() -> Iterator[ThreadServer]:
    with serving(*TEXTS, "digits-vit", "digits-gpt") as found:
        yield found


@pytest.mark.parametrize("name", TEXTS)
def test_tokens_are_those_the_model_reads(page, name):
    loaded = exact(name)
    reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name])
    found = asked(page, "tokens", model=name, text=TEXTS[name])["tokens"]
    assert pieces(found) == (reading.source or reading.tokens)
    if name == "bert-books":
        assert [t["raw"] for t in found if t["special"]] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize("name", ["tiny", "shakespeare", "reversal", "translator"])
def test_next_is_the_softmax_of_the_last_logits(page, name):
    loaded = exact(name)
    batch = text_input(loaded.model, loaded.tokenizer, TEXTS[name]).batch
    with torch.no_grad():
        logits = loaded.model(batch).logits[0]
    expected = logits[-1 if batch.source is None else 0].softmax(-1).topk(5)
    found = asked(page, "next", model=name, text=TEXTS[name], top_k=5)["next"]
    assert [f["token"]["id"] for f in found] == expected.indices.tolist()
    same([f["probability"] for f in found], expected.values)


@pytest.mark.parametrize(("name", "which", "kind"), MAPS)
def test_attention_of_every_layer(page, name, which, kind):
    loaded = exact(name)
    reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name])
    expected = look.attention_weights(loaded.model, reading, kind)
    rows, columns = look.axis_labels(reading, next(iter(expected)))
    for layer, weights in enumerate(expected.values()):
        found = asked(page, "attention", model=name, text=TEXTS[name], which=which, layer=layer)
        assert (found["layer"], found["n_layers"], found["n_heads"]) == (layer, len(expected), len(weights))
        assert pieces(found["from"]) == rows and pieces(found["to"]) == columns
        assert which in found["kinds"] and found["which"] == which
        same(found["weights"], weights)
        given = array(found["weights"])
        same(given.sum(-1).tolist(), torch.ones(given.shape[:2]), atol=1e-6)
        if kind == "decoder":
            assert (given.triu(1) == 0).all()
    said = {
        "reversal": " ".join(reading.targets[:-1]),
        "translator": "".join(reading.targets[:-1]).replace("␣", " ").strip(),
    }
    assert found["answer"] == said.get(name)


@pytest.mark.parametrize(("name", "which", "kind"), MAPS)
def test_thumbnails_have_the_largest_weight_of_each_part(page, name, which, kind):
    loaded, long = exact(name), name == "shakespeare"
    text = TEXTS[name] * (4 if long else 1)
    maps = torch.stack(
        list(look.attention_weights(loaded.model, text_input(loaded.model, loaded.tokenizer, text), kind).values())
    )
    found = asked(page, "attention/overview", model=name, text=text, which=which)
    side = min(32, max(maps.shape[-2:]))
    assert found["thumbnails"]["dtype"] == "uint8"
    assert found["thumbnails"]["shape"] == [found["n_layers"], found["n_heads"], side, side]
    small = array(found["thumbnails"]) / 255
    same(small.amax((-1, -2)).tolist(), maps.amax((-1, -2)), atol=0.003)
    if not long and maps.shape[-1] == maps.shape[-2]:
        same(small.tolist(), maps, atol=0.003)


# --- masked tokens ----------------------------------------------------------------------------------------------------


def test_a_masked_model_reads_mask(page):
    loaded = exact("bert-books")
    ids = loaded.tokenizer.encode(TEXTS["bert-books"], add_special=True)
    ids[2] = loaded.tokenizer.mask_id
    with capture(loaded.model, "encoder.1.self.weights") as acts, torch.no_grad():
        loaded.model(torch.tensor([ids]))
    found = asked(page, "attention", model="bert-books", text=TEXTS["bert-books"], which="self", layer=1, masked=[2])
    same(found["weights"], acts["encoder.1.self.weights"][0])
    assert pieces(found["to"])[2] == "[MASK]"


def test_in_a_causal_model_nobody_looks_at_a_masked_token_but_itself(page):
    text = {"model": "tiny", "text": TEXTS["tiny"], "which": "self"}
    for layer in (0, 1):
        weights = array(asked(page, "attention", **text, layer=layer, masked=[0, 3])["weights"])
        same(weights.sum(-1).tolist(), torch.ones(weights.shape[:2]), atol=1e-6)
        assert (weights.triu(1) == 0).all() and (weights[:, 0, 0] == 1).all()
        assert (weights[:, 1:3, 0] == 0).all() and (weights[:, 4:, [0, 3]] == 0).all()
        assert (weights[:, 3, 3] > 0).all()
    same(asked(page, "attention", **text)["weights"], look.attention_weights(
        exact("tiny").model, text_input(exact("tiny").model, exact("tiny").tokenizer, TEXTS["tiny"]), layer=0
    )["decoder.0.self.weights"])  # fmt: skip


@pytest.mark.parametrize("which", ["cross", "encoder"])
def test_a_masked_word_of_the_source_is_not_translated(page, which):
    text = {"model": "translator", "text": TEXTS["translator"], "which": which, "masked": [1, 4]}
    found = [array(asked(page, "attention", **text, layer=layer)["weights"]) for layer in range(3)]
    for weights in found:
        hidden = weights[:, :, [1, 4]]
        if which == "encoder":
            hidden = hidden[:, [i for i in range(weights.shape[1]) if i not in (1, 4)]]
        assert (hidden == 0).all()
        same(weights.sum(-1).tolist(), torch.ones(weights.shape[:2]), atol=1e-6)


def test_what_cannot_be_masked_is_refused(page):
    body = {"model": "reversal", "text": "1 2 3", "which": "cross"}
    assert "leave one" in assert_error(page.post("/api/attention", {**body, "masked": [0, 1, 2]}), 400)
    assert "no token 3" in assert_error(page.post("/api/attention", {**body, "masked": [3]}), 400)
    assert "no layer 5" in assert_error(page.post("/api/attention", {**body, "layer": 5}), 400)
    assert "has cross" in assert_error(page.post("/api/attention", {**body, "which": "self"}), 400)
    long = " ".join(["1"] * 513)
    assert "512" in assert_error(page.post("/api/attention", {**body, "text": long}), 400)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "which", "kind"), MAPS)
def test_a_score_is_the_sum_of_its_products_and_the_weights_their_softmax(page, name, which, kind):
    body = {"model": name, "text": TEXTS[name], "which": which, "layer": 0, "head": 0, "index": 2}
    found = asked(page, "attention/neuron", **body)
    query, keys, products = torch.tensor(found["query"]), array(found["keys"]), array(found["products"])
    same(found["products"], query * keys, atol=1e-6)
    assert len(found["tokens"]) == len(keys)
    seen = [i for i, score in enumerate(found["scores"]) if score is not None]
    assert seen == (list(range(3)) if kind == "decoder" else list(range(len(keys))))
    scores = products.sum(-1)[seen] * found["scale"]
    same([found["scores"][i] for i in seen], scores, atol=1e-4)
    same([found["weights"][i] for i in seen], scores.softmax(-1), atol=1e-4)
    whole = asked(page, "attention", model=name, text=TEXTS[name], which=which, layer=0)
    same(found["weights"], array(whole["weights"])[0, 2], atol=1e-6)


@pytest.mark.parametrize("name", ["tiny", "shakespeare", "bert-books", "translator"])
def test_the_lens(page, name):
    loaded = exact(name)
    reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name])
    expected = logit_lens(loaded.model, reading.batch, 3)
    found = asked(page, "lens", model=name, text=TEXTS[name], k=3)
    assert found["layers"] == expected.layers and pieces(found["tokens"]) == reading.tokens
    chances = [[[c["probability"] for c in place] for place in layer] for layer in found["top"]]
    same(chances, expected.probabilities, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "shakespeare", "bert-books"])
def test_rollout_of_a_text(page, name):
    loaded = exact(name)
    found = asked(page, "rollout", model=name, text=TEXTS[name])
    reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name])
    same(found["weights"], look.attention_rollout(loaded.model, reading))
    assert pieces(found["tokens"]) == reading.tokens


@pytest.mark.parametrize(
    ("name", "which", "half"),
    [
        ("tiny", "self", "decoder"),
        ("bert-books", "self", "encoder"),
        ("translator", "encoder", "encoder"),
        ("translator", "self", "decoder"),
    ],
)
def test_rollout_goes_by_the_weights_of_a_pass_with_masks(page, name, which, half):
    body = {"model": name, "text": TEXTS[name], "which": which, "masked": [1, 3]}
    found = asked(page, "rollout", **body)
    n_layers = found["weights"]["shape"][0]
    layers = [array(asked(page, "attention", **body, layer=layer)["weights"]) for layer in range(n_layers)]
    same(found["weights"], look.rollout(torch.stack(layers)))
    plain = asked(page, "rollout", **{**body, "masked": []})
    assert (array(plain["weights"]) - array(found["weights"])).abs().max() > 0.01
    if name == "bert-books":
        assert pieces(found["tokens"])[1] == pieces(found["tokens"])[3] == "[MASK]"
    else:  # nothing of a hidden token comes to any other
        others = [i for i in range(len(found["tokens"])) if i not in (1, 3)]
        assert (array(found["weights"])[:, others][..., [1, 3]] == 0).all()


def test_an_image_has_no_tokens_to_mask(page):
    body = {"model": "digits-vit", "image": [[0.5] * 8] * 8, "masked": [1]}
    assert "no tokens to mask" in assert_error(page.post("/api/rollout", body), 400)


@pytest.mark.parametrize("name", ["reversal", "translator"])
def test_an_alignment_with_masks_has_the_layers_of_it(page, name):
    found = asked(page, "alignment", model=name, source=TEXTS[name], masked=[1])
    body = {"model": name, "text": TEXTS[name], "which": "cross", "masked": [1]}
    for layer, weights in enumerate(array(found["weights"])):
        same(asked(page, "attention", **body, layer=layer)["weights"], weights)
        assert (weights[..., 1] == 0).all()


@pytest.mark.parametrize("target", [None, "given"])
@pytest.mark.parametrize("name", ["reversal", "translator"])
def test_alignment(page, name, target):
    given = None if target is None else {"reversal": "6 2 9", "translator": "Ein Mann."}[name]
    loaded = exact(name)
    reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name], target=given)
    found = asked(page, "alignment", model=name, source=TEXTS[name], target=given)
    assert pieces(found["source"]) == reading.source and pieces(found["target"]) == reading.targets
    same(found["weights"], torch.stack(list(look.attention_weights(loaded.model, reading, "cross").values())))
    assert given is None or found["text"] == given


def test_reversal_looks_along_the_other_diagonal(page):
    text = " ".join(str(1 + 7 * i % 16) for i in range(20))
    found = asked(page, "alignment", model="reversal", source=text)
    assert found["text"].split() == text.split()[::-1]
    best = array(found["weights"])[0, 0, :20].argmax(-1)  # without the end
    assert (best - torch.arange(19, -1, -1)).abs().max() <= 1


def test_every_step_of_a_pass_follows_from_the_one_before(page):
    loaded = exact("tiny")
    model, c = loaded.model, loaded.model.config
    found = asked(page, "steps", model="tiny", text=TEXTS["tiny"])
    x = array(found["embeddings"]) + array(found["positions"])
    for layer, block in zip(found["layers"], model.decoder.blocks, strict=True):
        a = {name: array(value) for name, value in layer.items() if isinstance(value, dict)}
        with torch.no_grad():
            same(layer["input"], x)
            same(layer["normed"], block.attention_norm(x))
            q, k, v = (part(a["normed"]).unflatten(-1, (c.n_heads, -1)).transpose(0, 1) for part in (
                block.attention.query, block.attention.key, block.attention.value))  # fmt: skip
            same(layer["q"], q), same(layer["k"], k), same(layer["v"], v)
            same(layer["scores"], q @ k.mT)
            same(layer["scaled"], a["scores"] / (c.d_model / c.n_heads) ** 0.5)
            future = torch.ones(len(x), len(x)).triu(1).bool()
            same(layer["masked"], a["scaled"].masked_fill(future, -torch.inf))
            same(layer["weights"], a["masked"].softmax(-1))
            same(layer["heads_out"], a["weights"] @ v)
            same(layer["concatenated"], a["heads_out"].transpose(0, 1).flatten(1))
            same(layer["attention_out"], block.attention.output(a["concatenated"]))
            same(layer["residual"], x + a["attention_out"])
            same(layer["normed2"], block.feedforward_norm(a["residual"]))
            same(layer["hidden"], block.feedforward.up(a["normed2"]))
            same(layer["activated"], F.gelu(a["hidden"], approximate="tanh"))
            same(layer["feedforward_out"], block.feedforward.down(a["activated"]))
            x = a["residual"] + a["feedforward_out"]
            same(layer["output"], x)
    with torch.no_grad():
        same(found["final"], model.decoder.norm(x))
        same(found["logits"], model.head(array(found["final"])[-1]))
    assert [t["id"] for t in found["vocabulary"]] == list(range(66)) and found["merges"] is None


def test_steps_of_models_that_are_too_large_are_refused_with_the_sizes(page):
    message = assert_error(page.post("/api/steps", {"model": "shakespeare", "text": "a"}), 400)
    assert "6 layers, 192 wide" in message and "at most 4 layers, 128 wide" in message
    assert "decoder" in assert_error(page.post("/api/steps", {"model": "bert-books", "text": "a"}), 400)
    message = assert_error(page.post("/api/steps", {"model": "tiny", "text": "a" * 33}), 400)
    assert "33 tokens, and at most 32 are read here" in message


def test_steps_of_a_model_with_rotation_gates_and_shared_keys(tmp_path):
    model = tiny_llama()
    with serving(saved(tmp_path / "llama", model)) as other:
        found = asked(other, "steps", model="llama", text="3 1 4 1 5")
    assert found["positions"] is None and found["merges"] is None
    for layer, block in zip(found["layers"], model.decoder.blocks, strict=True):
        a = {name: array(value) for name, value in layer.items() if isinstance(value, dict)}
        assert a["q"].shape == (4, 5, 16) and a["k"].shape == (2, 5, 16)
        same(layer["weights"], a["masked"].softmax(-1))
        same(a["scaled"].tril().tolist(), a["masked"].masked_fill(a["masked"].isinf(), 0))
        with torch.no_grad():
            same(layer["normed"], block.attention_norm(a["input"]))
            same(layer["hidden"], block.feedforward.gate(a["normed2"]))
            same(layer["activated"], F.silu(a["hidden"]) * block.feedforward.up(a["normed2"]))
        same(layer["residual"], a["input"] + a["attention_out"])
        same(layer["output"], a["residual"] + a["feedforward_out"])
    with torch.no_grad():
        same(found["logits"], model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1])


def test_merges_end_in_the_tokens():
    tokenizer = words()
    found = bpe_merges(tokenizer, "the bird sang to the cat")
    last = [piece for word in found for piece in word["steps"][-1]]
    assert last == [tokenizer.token(id) for id in tokenizer.encode("the bird sang to the cat")]
    assert all(len(b) < len(a) for word in found for a, b in pairwise(word["steps"]))
    assert "".join(found[0]["steps"][0]) == "the" and len(found[0]["steps"][0]) == 3
