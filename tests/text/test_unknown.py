"""A text in a script that the vocabulary does not have: told wherever a model reads it."""

import warnings

import pytest

import heedful
from heedful.cli import main
from heedful.text import UnknownTextWarning, byte_tokens, train_unigram, train_wordpiece, unknown_share, words
from support.folders import tiny_translator

CORPUS = ["the quick brown fox jumps over the lazy dog", "it was the best of times, it was the worst of times"] * 3
RUSSIAN = "Привет, мир! Как дела?"


@pytest.mark.parametrize(
    "tokenizer",
    [words(CORPUS), train_wordpiece(CORPUS, 80), train_unigram(CORPUS, 60)],
    ids=["words", "wordpiece", "unigram"],
)
def test_share_of_characters_without_tokens(tokenizer):
    assert unknown_share(tokenizer, "the lazy fox") == 0
    assert unknown_share(tokenizer, "日本語 のテキスト") == 1
    assert unknown_share(tokenizer, "the 日本 fox") == 2 / 8  # whitespace is not counted
    assert unknown_share(tokenizer, "") == unknown_share(tokenizer, " \n") == 0


def test_bytes_cover_every_text():
    assert unknown_share(byte_tokens(), RUSSIAN + "日本語") == 0


def test_a_long_text_is_sampled(monkeypatch):
    tokenizer = words(CORPUS)
    seen = []
    encode = tokenizer.encode_with_offsets
    monkeypatch.setattr(tokenizer, "encode_with_offsets", lambda text: seen.append(len(text)) or encode(text))
    assert unknown_share(tokenizer, "the dog " * 100_000) == 0
    assert seen == [4096]


READ = {
    "generate": lambda: heedful.load("shakespeare").generate(RUSSIAN, max_tokens=1),
    "translate": lambda: tiny_translator().translate(RUSSIAN, max_tokens=1, beams=1),
    "classify": lambda: heedful.load("sentiment").classify(RUSSIAN),
    "answer": lambda: heedful.load("reader").answer("Who?", RUSSIAN),
    "tag": lambda: heedful.load("entities").tag(RUSSIAN),
    "embed": lambda: heedful.load("bert-books").embed(["A text.", RUSSIAN]),
    "fill": lambda: heedful.load("bert-books").fill("Привет, _ мир!"),
}


@pytest.mark.parametrize("ability", list(READ))
def test_every_task_warns(ability):
    with pytest.warns(UnknownTextWarning, match="no tokens for .*% of this text, as 'Привет"):
        READ[ability]()


def test_no_warning_for_what_the_vocabulary_has():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heedful.load("sentiment").classify("A café with naïve charm.")
        heedful.load("bert-books").fill("They like to _ fish.")


@pytest.mark.filterwarnings("always")
def test_the_command_line_says_it_in_one_line(capsys):
    assert main(["fill", "bert-books", "日本語 _ 日本語"]) == 0
    out, errors = capsys.readouterr()
    assert out and errors.startswith("heedful: warning: the model's vocabulary has no tokens for 100% of this text")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "text", "symbols"),
    [("sums", "45 minus 3", "only + 0 1 2 3 4 5 6 7 8 9 =, and"), ("reversal", "3 1 four", "only 1 2 3 .* 15 16, and")],
)
def test_a_model_of_few_symbols_says_what_it_reads(model, text, symbols):
    with pytest.warns(UnknownTextWarning, match=symbols.replace("+", "[+]")):
        heedful.load(model).generate(text, max_tokens=1)


def test_sums_are_read_with_spaces():
    loaded = heedful.load("sums")
    assert loaded.generate("45 + 54 =", temperature=0) == loaded.generate("45+54=", temperature=0)
