"""The recurrent encoder-decoder: real weights from outside, and the lecture's experiment."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful.generate.batch import generate_batch
from heedful.generate.sampling import Sampling
from heedful.models.base import Batch
from heedful.models.seq2seq import Seq2Seq, Seq2SeqConfig
from heedful.weights.load import DictSource, load_tensors

WORDS = (
    "heedful", "attention", "transformer", "recurrent", "bahdanau", "activationist",
    "a", "reversal", "zebra", "knightly", "phonograph", "queueing", "xylophonist",
)  # fmt: skip
START, END, LONGEST = 2, 3, 20


def pronouncer() -> Path:
    """The weights of g2p-en 2.1.0, a GRU that spells out how words sound (importing it would download data)."""
    named = os.environ.get("HEEDFUL_G2P")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("g2p_en")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the weights of g2p-en 2.1.0: install it, or name its checkpoint20.npz in HEEDFUL_G2P")
    return Path(spec.submodule_search_locations[0]) / "checkpoint20.npz"


def letters(word: str) -> list[int]:
    """a is 3, and 2 ends the word."""
    return [ord(c) - ord("a") + 3 for c in word] + [2]


def sounds(arrays, word: str) -> list[int]:
    """What the GRU's formulas say, in numpy and one word at a time."""

    def cell(side: str, x, h):
        given = np.split(arrays[f"{side}_w_ih"] @ x + arrays[f"{side}_b_ih"], 3)
        kept = np.split(arrays[f"{side}_w_hh"] @ h + arrays[f"{side}_b_hh"], 3)
        reset, update = (1 / (1 + np.exp(-given[i] - kept[i])) for i in (0, 1))
        new = np.tanh(given[2] + reset * kept[2])
        return (1 - update) * new + update * h

    h = np.zeros(arrays["enc_w_hh"].shape[1], np.float32)
    for letter in letters(word):
        h = cell("enc", arrays["enc_emb"][letter], h)
    said = [START]
    while len(said) <= LONGEST:
        h = cell("dec", arrays["dec_emb"][said[-1]], h)
        said.append(int((arrays["fc_w"] @ h + arrays["fc_b"]).argmax()))
        if said[-1] == END:
            return said[1:-1]
    return said[1:]


def test_a_pronouncer_from_outside_says_the_same():
    arrays = dict(np.load(pronouncer()))
    cells = {
        f"{ours}.cells.{kind}_{part}_l0": f"{theirs}_{kind[0]}_{part}"
        for ours, theirs in (("encoder", "enc"), ("decoder.recurrence", "dec"))
        for kind in ("weight", "bias")
        for part in ("ih", "hh")
    }
    names = cells | {
        "source_embed.weight": "enc_emb",
        "target_embed.weight": "dec_emb",
        "head.weight": "fc_w",
        "head.bias": "fc_b",
    }
    (n_letters, width), n_sounds = arrays["enc_emb"].shape, len(arrays["dec_emb"])
    config = Seq2SeqConfig("gru", d_model=width, vocab_size=n_letters, target_vocab_size=n_sounds, start_id=START)
    with torch.device("meta"):
        model = Seq2Seq(config)
    load_tensors(model, DictSource({ours: torch.from_numpy(arrays[theirs]) for ours, theirs in names.items()}))
    rows = [torch.tensor(letters(w)) for w in WORDS]
    source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(r) for r in rows])
    got = generate_batch(
        model.eval(), Batch(source=source, source_lengths=lengths), LONGEST, Sampling(temperature=0), {END}
    )
    assert got == [sounds(arrays, w) for w in WORDS]


@pytest.fixture(scope="module")
def reversal():
    """benchmarks/reversal.py"""
    path = Path(__file__).parents[2] / "benchmarks" / "reversal.py"
    spec = importlib.util.spec_from_file_location("reversal", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reversal"] = module  # where dataclass looks its module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["reversal"]


def test_one_vector_holds_four_symbols(reversal):
    """The lecture's numbers: 99.55 % of the training symbols, 98.125 % of the test's. (Larger batches are quicker.)"""
    run = reversal.Run("A1", "none", cell="lstm", n_train=2000, batch_size=40, epochs=15, rate=0.03)
    source, _, test = reversal.sequences(run, n_test=200)
    model = reversal.train(run, source)
    assert reversal.accuracy(model, source)[1] >= 0.9955
    assert reversal.accuracy(model, test)[1] >= 0.98125


def test_with_attention_twenty_symbols_are_reversed_along_the_anti_diagonal(reversal):
    """The lecture's exercise."""
    settings = reversal.LONG | {"n_train": 2000, "batch_size": 20, "epochs": 10, "rate": 0.01}
    run = reversal.Run("exercise", "general", cell="lstm", **reversal.ATTENTIVE, **settings)
    source, _, test = reversal.sequences(run, n_test=200)
    model = reversal.train(run, source)
    assert reversal.accuracy(model, test)[1] >= 0.99
    assert reversal.mirrored(model, test) >= 0.97


def test_mistakes_say_what_is_possible():
    with pytest.raises(ValueError, match="none, additive, dot, general, concat"):
        Seq2SeqConfig(attention="cubist")
    with pytest.raises(ValueError, match="lstm, gru"):
        Seq2SeqConfig("rnn")
    with pytest.raises(ValueError, match="start_id"):
        Seq2SeqConfig(vocab_size=10, start_id=10)
    model = Seq2Seq.create(Seq2SeqConfig(d_model=8, vocab_size=10))
    with pytest.raises(ValueError, match="source"):
        model.start(Batch(torch.tensor([[1, 2]])))
    with pytest.raises(ValueError, match="every row needs"):
        model.start(Batch(source=torch.tensor([[1, 2]]), source_lengths=torch.tensor([0])))


@pytest.mark.parametrize(
    ("name", "score"),
    [("bahdanau", "additive"), ("Luong", "general"), ("multiplicative", "general"), ("additive", "additive"),
     ("dot-product", "dot"), ("none", "none")],
)  # fmt: skip
def test_scores_of_attention_go_by_the_names_people_know(name, score):
    assert Seq2SeqConfig(attention=name).attention == score == Seq2SeqConfig.from_dict({"attention": name}).attention
    with pytest.raises(ValueError, match="bahdanau, luong, multiplicative"):
        Seq2SeqConfig(attention="bandanau")
