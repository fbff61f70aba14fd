"""Nearest words and analogies, held against transformers' hidden states and plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import heedful
from heedful.loaded import Loaded
from heedful.tasks.neighbours import SplitWordWarning, parse_expression
from heedful.text import train_bpe
from heedful.text.word_tokens import whole_words, word_ids
from support.folders import tiny_gpt


def test_the_queen_is_found():
    bert = heedful.load("bert-books")
    single, analogy = bert.neighbours("king - man + woman"), bert.neighbours("man:king::woman:?")
    assert single == analogy and single[0].word == "queen" and len(single) == 10
    first, second = bert.neighbours(["king", "London"], 3)
    assert first == bert.neighbours("king", 3) and "england" in [x.word for x in second]


@pytest.mark.parametrize("layer", [None, 0, 1])
def test_the_vectors_are_those_of_transformers(bert, tokenizer, tmp_path, layer):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    loaded = bert("masked")
    loaded.save(tmp_path / "model")
    theirs = transformers.BertModel.from_pretrained(tmp_path / "model", add_pooling_layer=False).eval()
    words, vectors = whole_words(tokenizer), {}
    for id, word in words.items():
        row = torch.tensor([[tokenizer.id("[CLS]"), id, tokenizer.id("[SEP]")]])
        with torch.no_grad():
            states = theirs(row, output_hidden_states=True).hidden_states
        table = theirs.get_input_embeddings().weight.detach()
        vectors[word] = (table[id] if layer is None else states[layer + 1][0, 1]).numpy()
    unit = {word: x / np.linalg.norm(x) for word, x in vectors.items()}
    wanted = unit["mat"] - unit["cat"] + unit["dog"]
    cosines = {word: float(x @ wanted / np.linalg.norm(wanted)) for word, x in unit.items()}
    best = sorted(set(cosines) - {"mat", "cat", "dog"}, key=lambda word: -cosines[word])[:5]
    found = loaded.neighbours("mat - cat + dog", 5, layer=layer)
    assert [x.word for x in found] == best
    assert [x.similarity for x in found] == pytest.approx([cosines[word] for word in best], abs=1e-5)


def test_a_word_of_several_tokens_is_the_mean_of_theirs(bert, tokenizer):
    loaded = bert("masked")
    ids = word_ids(tokenizer, "matdog")
    assert len(ids) > 1
    with pytest.warns(SplitWordWarning, match="'matdog' takes"):
        found = loaded.neighbours("matdog", 1)
    table = loaded.model.embed.weight.detach()
    words = whole_words(tokenizer)
    cosines = torch.cosine_similarity(table[list(words)], table[ids].mean(dim=0), dim=-1)
    assert found[0].word == list(words.values())[int(cosines.argmax())]


def test_words_of_byte_level_bpe_begin_with_a_space():
    tokenizer = train_bpe(["the cat sat on the mat and the dog"] * 9, 300, special=["<|endoftext|>"])
    words = whole_words(tokenizer)
    assert {"the", "cat", "dog"} <= set(words.values()) and all(tokenizer.decode([i])[0] == " " for i in words)
    assert word_ids(tokenizer, "cat") == tokenizer.encode(" cat")
    loaded = Loaded(tiny_gpt(vocab_size=len(tokenizer), max_len=16), tokenizer, "small")
    for layer in (None, 0):
        found = [x.word for x in loaded.neighbours("cat", 1000, layer=layer)]
        assert sorted([*found, "cat"]) == sorted(words.values())


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("king", "+king"),
        (" king - man + woman ", "+king -man +woman"),
        ("- man + king", "-man +king"),
        ("well-known + New York", "+well-known +New York"),
        ("a : b :: c : ?", "+b -a +c"),
        ("a:b::c", "+b -a +c"),
    ],
)
def test_expressions(text, terms):
    assert " ".join("-+"[sign > 0] + word for sign, word in parse_expression(text)) == terms


@pytest.mark.parametrize("text", ["", " ", "-", "king -", "+ + king", "- king", "a + " * 30 + "b", "x" * 200])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError, match=r"expression|characters"):
        parse_expression(text)


@pytest.mark.parametrize(
    ("name", "word", "options", "told"),
    [
        ("digits-vit", "king", {}, "cannot neighbours"),
        ("bert-books", "king", {"layer": 9}, "no layer 9"),
        ("bert-books", "king", {"n": 0}, "n is 0"),
        ("bert-books", "日本", {}, "no tokens for"),
        ("reversal", "3", {"layer": 0}, "leave the layer out"),
    ],
)
def test_what_cannot_be_is_told(name, word, options, told):
    with pytest.raises(ValueError, match=told):
        heedful.load(name).neighbours(word, **options)
