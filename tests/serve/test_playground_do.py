"""What the playground does is what the library does: fill, translate, label, answer, tag, see and draw images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.models.bert import Bert, BertConfig
from heedful.models.image_gpt import ImageGPT, ImageGPTConfig, quantize
from heedful.models.registry import FAMILIES
from heedful.observe import attention as look
from heedful.observe.inputs import image_input
from heedful.observe.template import parse_template
from heedful.serve.playground.fill import fill_in_slices
from heedful.serve.playground.inspection import Inspector, LRUCache
from heedful.text import train_bpe, train_wordpiece
from heedful.weights.resolve import shipped_models
from heedful.weights.save import save
from heedful.zoo import FOLDER, read_card
from support.folders import tiny_gpt
from support.playground import array, asked, exact, pieces, same, validated
from support.serving import ThreadServer, assert_error, events, serving

JOB = "In [1908|2018], [he|she] was employed as a _."
PROSE = "the whale rose out of the sea and anna saw it from the house on the hill in berlin"
HEADS = {"classify": ("no", "yes"), "tag": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), "answer": ("a", "b")}


def small_bert(folder: Path, head: str) -> Path:
    torch.manual_seed(1)
    tokenizer = train_wordpiece([PROSE] * 3, 120)
    labels = HEADS[head]
    config = BertConfig(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=len(tokenizer), max_len=64,
        head=head, n_labels=len(labels), labels=labels, dropout=0.0, attention_dropout=0.0)  # fmt: skip
    model = Bert.create(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.ndim == 1))
    save(model.eval(), folder / head, tokenizer)
    return folder / head


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("tasks")
    words = train_bpe([PROSE] * 3, 300, special=["<|endoftext|>"])
    save(tiny_gpt(vocab_size=len(words), max_len=64), place / "words", words)
    colours = ImageGPT.create(ImageGPTConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=7, max_len=16)).eval()
    colours.preprocessor = {"clusters": [[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1], [0, 0, 0], [1, 1, 1]]}
    save(colours, place / "colours")
    return {
        **{head: small_bert(place, head) for head in HEADS},
        "words": place / "words",
        "colours": place / "colours",
    }


@pytest.fixture(scope="module")
def page(folders) -> Iterator[ThreadServer]:
    zoo = "tiny", "shakespeare", "bert-books", "reversal", "translator", "digits-vit", "digits-gpt"
    with serving(*zoo, *folders.values()) as found:
        yield found


# --- models -----------------------------------------------------------------------------------------------------------


def described(page: ThreadServer) -> list[dict[str, Any]]:
    return validated("GET", "/api/models", page.get("/api/models").content)["models"]


def test_models_are_described_without_being_loaded():
    with serving() as page:
        found = {model["id"]: model for model in described(page)}
        assert set(found) == set(shipped_models()) and not any(model["loaded"] for model in found.values())
        asked(page, "tokens", model="tiny", text="a")
        loaded = {m["id"] for m in described(page) if m["loaded"]}
    assert loaded == {"tiny"}
    kinds = {
        "tiny": "decoder", "bert-books": "encoder", "translator": "encoder-decoder", "reversal": "recurrent",
        "digits-vit": "image-classifier", "digits-gpt": "image-decoder",
    }  # fmt: skip
    for name, kind in kinds.items():
        expected, model = heedful.load(name), found[name]
        assert model["kind"] == kind and model["family"] == expected.model.family
        assert model["parameters"] == expected.model.n_parameters() and model["about"]
        assert tuple(model["abilities"]) == expected.abilities and model["context"] == expected.model.context_length
        maps = look.attention_kinds(expected.model)
        assert bool(maps) == bool(model["n_heads"]) and model["n_layers"] and not model["chat"]
    assert found["tiny"]["vocabulary"] == 66 and found["tiny"]["n_heads"] == 2 and found["tiny"]["image"] is None
    assert found["tiny"]["about"] != FAMILIES["gpt"].about  # its card's
    card = read_card(FOLDER / "translator").facts
    assert (found["translator"]["good_at"], found["translator"]["fails_at"]) == (card["good at"], card["fails at"])
    assert all(model["good_at"] and model["fails_at"] for model in found.values())
    purposes = {
        "tiny": "write", "bert-books": "fill", "translator": "translate", "digits-vit": "classify_image",
        "digits-gpt": "complete_image", "reader": "answer", "entities": "tag", "sentiment": "classify",
    }  # fmt: skip
    assert {name: found[name]["purpose"] for name in purposes} == purposes
    assert found["digits-vit"]["labels"] == [*"0123456789", "not a digit"]
    assert found["digits-vit"]["image"] == {"size": 28, "channels": 1, "levels": 256}
    assert found["digits-gpt"]["image"] == {"size": 8, "channels": 1, "levels": 16}
    assert [found[n]["reads"] for n in ("tiny", "reversal", "digits-gpt")] == ["text", "text", "image"]


# --- fill -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-books", "shakespeare", "words"])
@pytest.mark.parametrize("n", [5, 0])
@pytest.mark.parametrize("template", [JOB, "the [whale|sea] _ out of the house"])
def test_fill_of_a_template(page, folders, name, n, template):
    expected = exact(folders.get(name, name)).fill(template, n=n or None)
    found = asked(page, "fill", model=name, template=template, n=n)
    assert [s["text"] for s in found["sentences"]] == list(map(str, expected.sentences))
    assert {s["model"] for s in found["sentences"]} == {name} and found["note"]
    assert sorted(found["words"]) == sorted(expected.words)
    order = [found["words"].index(word) for word in expected.words]
    same(array(found["logprobs"])[:, order].tolist(), expected.logprobs, atol=1e-4)


def test_bias_is_the_librarys(page, folders):
    groups, fill = {"women": ["anna"], "men": ["whale", "hill"]}, {"PLACE": ["berlin", "sea"]}
    templates = ["{NAME} saw the {PLACE}", "the {PLACE} and {NAME}"]
    for name in ("bert-books", "classify", "words"):
        expected = exact(folders.get(name, name)).bias(*templates, groups=groups, fill=fill)
        found = asked(page, "bias", model=name, templates=templates, groups=groups, fill=fill, page=True)
        assert found["page"].startswith("<!doctype html>") and found["results"][0]["sentences"] == 12
        wanted = expected.results[0].contrasts[0].effect
        effect = found["results"][0]["contrasts"][0]["effect"]
        assert effect["value"] == pytest.approx(wanted.value, abs=1e-3)
        assert (effect["low"], effect["high"]) == pytest.approx((wanted.low, wanted.high), abs=1e-2)
    body = {"model": "words", "templates": ["{A} is"], "groups": {"a": ["x"] * 200, "b": ["y"] * 200}, "fill": fill}
    assert "has no {PLACE}" in assert_error(page.post("/api/bias", body), 400)


def test_fill_of_two_texts_and_of_chosen_words(page):
    texts, words = ["He was a _.", "She was a _."], ["man", "woman", "schoolmistress"]
    found = asked(page, "fill", model="bert-books", texts=texts, words=words)
    assert found["words"] == words and [s["text"] for s in found["sentences"]] == texts
    expected = exact("bert-books").fill("[He|She] was a _.", words=words)
    same(found["logprobs"], expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("names", [("tiny", "shakespeare"), ("bert-books", "words")])
@pytest.mark.parametrize("rest", ["[thou|he] _", "thou _ the house"])
def test_models_that_a_template_names_fill_it(page, folders, names, rest):
    found = asked(page, "fill", model="tiny", template=f"[{'|'.join(names)}]: {rest}", n=4)
    paths = [str(folders.get(name, name)) for name in names]
    expected = exact("tiny").fill(f"[{'|'.join(paths)}]: {rest}", n=4)
    per = len(expected.sentences) // 2
    assert [s["model"] for s in found["sentences"]] == [names[0]] * per + [names[1]] * per
    assert [s["choices"][0] for s in found["sentences"]] == [s["model"] for s in found["sentences"]]
    assert found["words"] == expected.words and found["note"]
    same(found["logprobs"], expected.logprobs, atol=1e-4)


def test_a_bracket_that_names_models_names_no_others(page):
    body = {"model": "tiny", "template": "[tiny|shakespear]: thou _"}
    said = assert_error(page.post("/api/fill", body), 400)
    assert "'shakespear' is none" in said and "near it: shakespeare" in said
    assert "one blank" in assert_error(page.post("/api/fill", {**body, "template": "[tiny|shakespeare]"}), 400)


def test_a_clicked_token_becomes_the_blank(page):
    text, bert = "He was a man of great learning.", exact("bert-books")
    found = asked(page, "fill/token", model="bert-books", text=text, index=4)
    assert pieces(found["tokens"])[4] == "man"
    expected = bert.fill("He was a _ of great learning.", n=None)
    known = dict(zip(expected.words, expected.probabilities[0].tolist(), strict=True))
    shared = [w for w in found["words"] if w["word"] in known]
    assert len(shared) >= 20
    same([w["probability"] for w in shared], torch.tensor([known[w["word"]] for w in shared]))
    chances = [w["probability"] for w in found["words"]]
    assert chances == sorted(chances, reverse=True) and len(chances) == 30
    place = [w["word"] for w in found["words"]].index("man")  # the hidden word's own rank
    assert found["own"] == {"rank": place + 1, "probability": chances[place]}
    causal = asked(page, "fill/token", model="tiny", text="To be", index=3)["words"]
    after = asked(page, "next", model="tiny", text="To ", top_k=3)["next"]
    assert [w["word"] for w in causal[:3]] == [c["token"]["text"] for c in after]
    same([w["probability"] for w in causal[:3]], torch.tensor([c["probability"] for c in after]))
    assert "nothing stands before" in assert_error(
        page.post("/api/fill/token", {"model": "tiny", "text": "a", "index": 0}), 400
    )
    assert "[CLS]" in assert_error(page.post("/api/fill/token", {"model": "bert-books", "text": text, "index": 0}), 400)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("In [a|, they _", "not closed"),
        (f"[{'|'.join(map(str, range(50)))}] is _", "more than 20 alternatives"),
        ("_ " + "x" * 1_000_000, "1,000,002 characters: at most 20,000"),
        ("_ " + "x" * 6_000, "5,000"),
        ("[a|b][a|b][a|b][a|b][a|b][a|b][a|b] _", "64 at most"),
        ("no blank", "one blank"),
        ("", "empty"),
    ],
)
def test_templates_that_are_wrong_say_how(page, template, problem):
    body = {"model": "tiny", "template": template}
    assert problem in assert_error(page.post("/api/fill", body), 400)
    with pytest.raises(ValueError):
        parse_template(template)


def test_a_fill_that_takes_long_lets_others_have_their_turn():
    inspector = Inspector(exact("tiny"), shipped_models()["tiny"], LRUCache(), 0)
    template = parse_template("[a|b|c] is _ and so on")
    *slices, found = fill_in_slices(template, None, 5, True, inspector)
    assert slices == [None] * 4  # which words, then one sentence after the other
    same(found.logprobs.tolist(), exact("tiny").fill(template.text, n=5).logprobs)


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3, None])
def test_translate(page, beams):
    loaded, text = exact("translator"), "Two dogs run on the grass."
    settings = {} if beams is None else {"beams": beams}
    found = asked(page, "translate", model="translator", text=text, **settings)
    assert found["text"] == loaded.translate(text, **settings)
    ids = [t["id"] for t in found["target"]]
    assert loaded.tokenizer.target.decode(ids) == found["text"] and ids[-1] in loaded.eos_ids
    weights = array(found["weights"])
    assert weights.shape == (len(ids), len(found["source"]))
    whole = asked(page, "alignment", model="translator", source=text, target=found["text"])
    if [t["id"] for t in whole["target"]] == ids:
        same(weights.tolist(), array(whole["weights"])[-1].mean(0))
    same(weights.sum(-1).tolist(), torch.ones(len(ids)), atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_reversal_translates_numbers(page, beams):
    found = asked(page, "translate", model="reversal", text="1 2 3 4 5 6", beams=beams)
    assert found["text"] == "6 5 4 3 2 1" and pieces(found["target"]) == [*"654321", "</s>"]
    assert array(found["weights"]).shape == (7, 6)


def test_classify_answer_and_tag(page, folders):
    text, question = "anna saw the whale in berlin", "the house ?"
    expected = heedful.load(folders["classify"]).classify(text)
    found = asked(page, "classify", model="classify", text=text)
    assert [label["label"] for label in found["labels"]] == [label.name for label in expected]
    same([label["probability"] for label in found["labels"]], torch.tensor([e.score for e in expected]))
    assert pieces(found["tokens"])[0] == "[CLS]"
    span = heedful.load(folders["answer"]).answer(question, PROSE)
    (answer,) = asked(page, "answer", model="answer", question=question, passage=PROSE)["answers"]
    assert (answer["text"], answer["start"], answer["end"]) == (span.text, span.begin, span.end)
    assert math.isclose(answer["probability"], span.score, rel_tol=1e-4)
    assert PROSE[answer["start"] : answer["end"]] == answer["text"]
    spans = heedful.load(folders["tag"]).tag(text)
    words = asked(page, "tag", model="tag", text=text)["words"]
    assert [(w["text"], w["start"], w["end"], w["label"]) for w in words] == [
        (s.text, s.begin, s.end, s.label) for s in spans
    ]
    assert asked(page, "tag", model="tag", text="")["words"] == []
    assert found["warnings"] == []
    assert "reads 64: its end is cut" in asked(page, "classify", model="classify", text=PROSE * 4)["warnings"][0]
    assert asked(page, "tag", model="tag", text=PROSE * 4)["words"][-1]["end"] > 3 * len(PROSE)


def test_classify_reads_pairs(page, folders):
    pair = "anna saw the whale", "in berlin"
    expected = heedful.load(folders["classify"]).classify(*pair)
    found = asked(page, "classify", model="classify", text=pair[0], second=pair[1])
    same([label["probability"] for label in found["labels"]], torch.tensor([e.score for e in expected]))
    assert pieces(found["tokens"]).count("[SEP]") == 2


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_the_translation_of_nothing_is_nothing(page, text):
    found = asked(page, "translate", model="translator", text=text)
    assert found["text"] == exact("translator").translate(text) == "" and found["target"] == []


@pytest.mark.parametrize("layer", [None, 1])
def test_neighbours(page, layer):
    expected = exact("bert-books").neighbours("king - man + woman", 5, layer=layer)
    for _ in range(2):  # computed, then cached
        found = asked(page, "neighbours", model="bert-books", text="king - man + woman", n=5, layer=layer)
        assert [x["word"] for x in found["neighbours"]] == [x.word for x in expected]
        same([x["similarity"] for x in found["neighbours"]], torch.tensor([x.similarity for x in expected]))
    body = {"model": "bert-books", "text": "king", "layer": 99}
    assert "there is no layer 99" in assert_error(page.post("/api/neighbours", body), 400)
    (told,) = asked(page, "neighbours", model="bert-books", text="zyzzyva - king")["warnings"]
    assert told.startswith("'zyzzyva' takes")


@pytest.mark.parametrize("nothing", ["", " ", "\u200b", "\0", "\ufe0f"])
def test_a_text_without_anything_to_read_is_the_clients_mistake(page, nothing):
    assert "is empty" in assert_error(page.post("/api/classify", {"model": "classify", "text": nothing}), 400)
    for question, passage in (("who?", nothing), (nothing, PROSE)):
        body = {"model": "answer", "question": question, "passage": passage}
        assert "one of them is empty" in assert_error(page.post("/api/answer", body), 400)


@pytest.mark.parametrize("path", ["translate", "classify", "tag", "next", "fill/token"])
def test_a_model_that_cannot_says_what_it_can(page, path):
    body = {"model": "digits-vit", "text": "a", "index": 0}
    message = assert_error(page.post(f"/api/{path}", body), 400)
    assert "classif" in message


# --- images -----------------------------------------------------------------------------------------------------------


def examples(page: ThreadServer, kind: str = "digits") -> list[dict]:
    return validated("GET", "/api/images", page.get("/api/images").content)[kind]


def test_the_examples_are_digits_that_the_classifier_knows(page):
    assert [d["label"] for d in examples(page)] == [i // 2 for i in range(20)]
    assert all(torch.tensor(d["image"]).shape == (8, 8) for d in examples(page))
    digits = examples(page, "mnist")
    assert [d["label"] for d in digits] == list(range(10))
    loaded = exact("digits-vit")
    for digit in digits:
        image = torch.tensor(digit["image"])
        assert image.shape == (28, 28) and 0 <= image.min() and image.max() == 1
        found = asked(page, "image/classify", model="digits-vit", image=digit["image"])
        expected = loaded.classify(image[None] * 2 - 1)
        assert expected[0].name == str(digit["label"])
        assert [label["label"] for label in found["labels"]] == [label.name for label in expected]
        same([label["probability"] for label in found["labels"]], torch.tensor([e.score for e in expected]))
    reading = image_input(loaded.model, image[None] * 2 - 1)
    same(found["weights"], torch.stack(list(look.attention_weights(loaded.model, reading).values())))
    rollout = look.attention_rollout(loaded.model, reading)[:, 0, 1:].view(-1, 7, 7)
    same(found["rollout"], rollout[-1])
    over = asked(page, "rollout", model="digits-vit", image=digit["image"])
    assert over["grid"] == [7, 7]
    same(over["weights"], rollout)


def test_an_image_in_colour_is_completed(page, folders):
    loaded = heedful.load(folders["colours"])
    image = torch.rand(4, 4, 3, generator=torch.Generator().manual_seed(0))
    body = {"model": "colours", "image": image.tolist(), "n_given": 8, "seed": 2}
    with page.http.stream("POST", "/api/image/complete", json=body) as response:
        said = events(b"".join(response.iter_raw()))
    for event in said:
        validated("POST", "/api/image/complete", json.dumps(event))
    (expected,) = loaded.complete_image(image[:2].permute(2, 0, 1) * 2 - 1, seed=2)
    found = torch.tensor([event["value"] for event in said]).view(2, 4, 3).permute(2, 0, 1)
    torch.testing.assert_close(found, expected[:, 2:] / 2 + 0.5)
    (described_one,) = [model for model in described(page) if model["id"] == "colours"]
    assert described_one["image"] == {"size": 4, "channels": 3, "levels": 6}
    grey = {"model": "digits-gpt", "image": [[[0.0, 0.5, 1.0]] * 8] * 8, "n_given": 8}
    assert "64 grey pixels" in assert_error(page.post("/api/image/complete", grey), 400)


@pytest.mark.parametrize(("n_given", "n", "temperature"), [(32, 2, 1.0), (0, 1, 0.8), (63, 1, 0)])
def test_half_an_image_is_completed_pixel_by_pixel(page, n_given, n, temperature):
    image = examples(page)[7]["image"]
    body = {"model": "digits-gpt", "image": image, "n_given": n_given, "n": n, "temperature": temperature}
    with page.http.stream("POST", "/api/image/complete", json={**body, "seed": 5}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        said = events(b"".join(response.iter_raw()))
    for event in said:
        validated("POST", "/api/image/complete", json.dumps(event))
    gpt = heedful.load("digits-gpt")
    begun = quantize(torch.tensor(image)[None, None] * 2 - 1, gpt.model.palette)[0, :n_given]
    expected = gpt.complete_image(begun, n, temperature=temperature, seed=5)
    for index in range(n):
        mine = [event for event in said if event["index"] == index]
        assert [event["pixel"] for event in mine] == list(range(n_given, 64))
        assert [round(15 * event["value"]) for event in mine] == expected[index, n_given:].tolist()


@pytest.mark.parametrize(
    ("path", "change", "problem"),
    [
        ("classify", {"image": [[0.0] * 7] * 8}, "multiples of 4"),
        ("classify", {"image": [[0.0] * 8] * 7 + [[0.0] * 6]}, "one length"),
        ("classify", {"image": [[[0.0, 0.0, 0.0]] * 8] * 8}, "1 channels"),
        ("classify", {"image": [[2.0] * 8] * 8}, "less than or equal to 1"),
        ("classify", {"image": [[0.0] * 65] * 8}, "64"),
        ("classify", {"image": [[0.0] * 8] * 65}, "64"),
        ("classify", {"model": "digits-gpt"}, "cannot classify"),
        ("complete", {"image": [[0.0] * 8] * 9, "n_given": 3}, "64 grey pixels"),
        ("complete", {"n_given": 64}, "fewer than 64"),
        ("complete", {"n_given": 3, "n": 17}, "16"),
        ("complete", {"n_given": 3, "model": "digits-vit"}, "cannot complete_image"),
        ("complete", {"n_given": 3, "temperature": 3}, "2"),
    ],
)
def test_wrong_images_are_refused(page, path, change, problem):
    body = {"model": {"classify": "digits-vit", "complete": "digits-gpt"}[path], "image": [[0.0] * 8] * 8}
    assert problem in assert_error(page.post(f"/api/image/{path}", body | change), 400)
