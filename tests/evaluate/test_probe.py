"""Which layers know best: probing finds what was hidden in a layer, and entities are counted as CoNLL counts them."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
import torch

import heedful
from heedful.cli import main
from heedful.data.images import ImageSet
from heedful.data.tagging import TaggedSentences
from heedful.evaluate.entities import are_entity_tags, entities, score_entities
from heedful.evaluate.probe import COMBINATIONS, evenly_spaced, format_results, probe
from heedful.evaluate.probe_images import image_features, probe_images
from heedful.models.image_gpt import ImageGPT, ImageGPTConfig, quantize
from heedful.models.vit import ViT, ViTConfig
from support.tiny import tiny


def test_entities_are_counted_whole():
    assert entities("B-PER I-PER O B-LOC".split()) == {("PER", 0, 2), ("LOC", 3, 4)}
    assert entities("I-PER I-PER B-PER I-LOC I-LOC".split()) == {("PER", 0, 2), ("PER", 2, 3), ("LOC", 3, 5)}
    true = ["B-PER I-PER O B-LOC O".split(), "O B-ORG I-ORG I-ORG".split()]
    said = ["B-PER O O B-LOC O".split(), "B-ORG B-ORG I-ORG I-ORG".split()]
    score = score_entities(true, said)
    assert (score.n_true, score.n_found, score.n_right) == (3, 4, 2)
    assert score.precision == 0.5 and score.recall == pytest.approx(2 / 3) and score.f1 == pytest.approx(4 / 7)
    assert score_entities([["O"]], [["O"]]).f1 == 0
    assert are_entity_tags(["O", "B-X"]) and not are_entity_tags(["NN", "O"]) and not are_entity_tags(["O"])
    with pytest.raises(ValueError, match="1 words have 2 tags"):
        score_entities([["O"]], [["O", "O"]])


@pytest.fixture(scope="module")
def tokenizer():
    return heedful.load("bert-books").tokenizer


WORDS = ["king", "queen", "house", "river", "night", "stone"]


def tagged(tokenizer, n: int, seed: int) -> TaggedSentences:
    """The tag of a word is the next word's: nothing about the word itself says it."""
    random, sentences = Random(seed), []
    for _ in range(n):
        words = random.choices(WORDS, k=random.randint(4, 9))
        after = [*words[1:], words[0]]
        sentences.append((words, ["B-X" if word in WORDS[:3] else "O" for word in after]))
    return TaggedSentences(sentences, tokenizer, names=["O", "B-X"])


def hidden_in(model, tokenizer, layer: int) -> None:
    """From this layer on it is written into the residual stream, and nothing else; in the next one it is gone."""
    kings = [tokenizer.id(word) for word in WORDS[:3]]

    def remember(_module, inputs) -> None:
        model.seen = inputs[0].ids

    def tell(_block, _inputs, out):
        found = torch.zeros_like(out)
        for row, ids in enumerate(model.seen.tolist()):
            end = max(i for i, index in enumerate(ids) if index in map(tokenizer.id, WORDS)) + 1
            for place in range(1, end):
                following = ids[place + 1] if place + 1 < end else ids[1]
                found[row, place, 0] = float(following in kings)
        return found

    model.register_forward_pre_hook(remember)
    model.encoder.blocks[layer].register_forward_hook(tell)
    model.encoder.blocks[layer + 1].register_forward_hook(lambda _b, _i, out: torch.zeros_like(out))


def test_what_one_layer_alone_knows_is_found_there(tokenizer):
    torch.manual_seed(0)
    model = tiny("bert", vocab_size=len(tokenizer), n_layers=6).eval()
    hidden_in(model, tokenizer, 3)
    train, dev = tagged(tokenizer, 120, 1), tagged(tokenizer, 60, 2)
    done = []
    rows = {
        row.which: row
        for row in probe(
            model, train, dev, [*COMBINATIONS, "2", "3", "4"], progress=lambda what, n, of: done.append((what, n, of))
        )
    }
    for which in ("3", "sum_last_four", "concat_last_four", "sum_all"):
        assert rows[which].f1 == 1.0 and rows[which].accuracy == 1.0
    for which in ("first", "last", "4"):  # the word alone, and nothing
        assert rows[which].accuracy < 0.7
    assert rows["concat_last_four"].n_features == 4 * model.config.d_model == 4 * rows["first"].n_features
    assert done[-1] == ("fitting", 9, 9)
    text = format_results(list(rows.values()), "tiny")
    assert re.search(r"^after layer 3 +\d+ +100\.00 +100\.00 \*$", text, flags=re.M)
    assert re.search(r"^first layer \(embeddings\) +\d+ +[1-7]\d?\.\d\d +\d\d\.\d\d$", text, flags=re.M)


def test_tags_that_are_no_entities_are_counted_by_words(tokenizer):
    sentences = [(WORDS, ["NN" if word == "king" else "XX" for word in WORDS])] * 4
    data = TaggedSentences(sentences, tokenizer)
    model = tiny("bert", vocab_size=len(tokenizer), n_layers=1).eval()
    rows = probe(model, data, data)
    assert [row.which for row in rows] == [
        "first",
        "last",
        "sum_all",
        "second_to_last",
    ]  # there are no four layers
    assert all(row.f1 is None for row in rows) and rows[0].accuracy == 1.0


def test_sentences_are_spread():
    assert evenly_spaced(10, None) == list(range(10)) == evenly_spaced(10, 99)
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tags") / "tags.txt"
    lines = [f"{word} {'I-PER' if word in WORDS[:2] else 'O'}" for word in WORDS * 3]
    path.write_text("-DOCSTART- O\n\n" + "\n\n".join("\n".join(lines[i : i + 6]) for i in (0, 6, 12)) + "\n")
    return str(path)


@pytest.mark.parametrize("model", ["bert-books", "shakespeare", "translator"])
def test_the_command_prints_the_table(model, file, capsys):
    assert main(["probe", model, file, file, "--dev-sentences", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 sentences to fit, 2 to measure, 3 tags") and "last layer" in out and "entity F1" in out
    assert main(["probe", model, file, file, "--layers", "each"]) == 0
    assert "after layer 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert-books", "FILE", "nothing.txt"], "there is no file nothing.txt"),
        (["digits-vit", "FILE", "FILE"], "is no idx file"),
        (["bert-books", "FILE", "FILE", "--layers", "9"], "there is no layer 9"),
        (["bert-books", "FILE", "FILE", "--layers", "middle"], "features can be first"),
        (["bert-books", "FILE", "FILE", "--train-sentences", "0"], "there must be 1 at least"),
        (["tiny", "FILE", "FILE", "--layers", "sum_last_four"], "needs 4 layers"),
    ],
)
def test_mistakes_are_one_line(arguments, message, file, capsys):
    assert main(["probe", *(file if a == "FILE" else a for a in arguments)]) == 2
    *notes, said = capsys.readouterr().err.splitlines()
    assert message in said and all("their ends are cut" in note for note in notes)


# --- images -----------------------------------------------------------------------------------------------------------


def bright_or_dark(n: int, seed: int) -> ImageSet:
    chance = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    return ImageSet.of(
        chance.integers(0, 100, (n, 4, 4)) + 150 * labels[:, None, None], labels, names=["dark", "bright"]
    )


@pytest.mark.parametrize("family", ["vit", "image_gpt"])
def test_a_probe_of_images_by_layer(family):
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 2}
    torch.manual_seed(0)
    if family == "vit":
        config = ViTConfig(**shape, d_ff=32, image_size=4, patch_size=2, n_channels=1, n_labels=2)
        model = ViT.create(config)
    else:
        model = ImageGPT.create(ImageGPTConfig(**shape, vocab_size=9, max_len=16))
    train, dev = bright_or_dark(40, 0), bright_or_dark(20, 1)
    rows = probe_images(model, train, dev)
    assert [row.which for row in rows] == ["first", "0", "1"] and rows[0].n_features == 16
    assert all(row.accuracy > 0.9 for row in rows)
    assert [row.which for row in probe_images(model, train, dev, ["1"])] == ["1"]
    if family == "image_gpt":
        model.eval()
        batch = model.training_batch(quantize(train.scaled([3, 7]), model.palette))
        found = image_features(model, train)[:, [3, 7]]
        for layer in range(3):
            torch.testing.assert_close(found[layer], model.features(batch, layer).detach())
    with pytest.raises(ValueError, match="no layer 2"):
        probe_images(model, train, dev, ["2"])
    with pytest.raises(ValueError, match="have none"):
        probe_images(model, ImageSet.of(train.pixels), dev)


def test_heedful_probe_of_images(capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    assert main(["probe", "digits-gpt", "digits", "--train-images", "120", "--dev-images", "60"]) == 0
    out = capsys.readouterr().out
    assert "120 images to fit, 60 to measure, 10 classes" in out
    scores = [float(x) for x in re.findall(r"(\d+\.\d+)(?: \*)?$", out, re.M)]
    assert len(scores) > 4 and max(scores) > 80
