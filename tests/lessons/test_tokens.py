"""The lesson on tokens: the lecture's merges, the sizes and lengths that its text has, its exercises."""

from __future__ import annotations

import pytest

from heedful.data.samples import ARTICLE_1
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def run():
    return executed("tokens")


def test_the_lectures_merges(run):
    assert run.names["symbols"] == "XdXac"
    assert [str(merge) for merge in run.names["trace"].merges] == ["Z=aa", "Y=ab", "X=ZY"]
    assert run.names["learned"] == [("e", "s"), ("es", "t"), ("l", "o"), ("lo", "w"), ("n", "e")]


def test_bytes_and_characters(run):
    assert "26 characters, 33 bytes" in run.text
    assert [len(run.names["bytewise"].encode(letter)) for letter in "aü€🙂"] == [1, 2, 3, 4]
    assert len(run.names["shakespeare"]) == 66
    assert "Russian   98" in run.text  # percent of the letters unknown


def test_what_article_1_costs(run):
    lengths = {name: len(tokenizer.encode(ARTICLE_1["English"])) for name, tokenizer in run.names["ways"].items()}
    assert list(lengths.values()) == [170, 170, 44, 34, 34, 32]
    assert 170**2 / 34**2 == 25
    counts = run.names["counts"]
    assert (counts["English"], counts["German"], counts["Russian"]) == (34, 71, 293)
    assert round(counts["Russian"] / counts["English"], 1) == 8.6
    assert len(ARTICLE_1["Russian"].encode()) == 293  # every byte is a token


def test_words_put_together(run):
    books, wordpiece = run.names["books"], run.names["wordpiece"]
    assert [books.token(id) for id in books.encode(" remembered")] == ["Ġremem", "b", "ered"]
    assert [wordpiece.token(id) for id in wordpiece.encode("misunderstood")] == ["mis", "##under", "##st", "##ood"]
    first = "['Ġt', 'he', 'Ġa', 'in', 'Ġthe'"
    assert first in run.text


def test_new_text_has_unknown_words_and_longer_tokens_with_a_larger_vocabulary(run):
    text, lengths = run.outputs[3].text, run.names["lengths"]
    shares = [float(line.split(":")[1].split("%")[0]) for line in text.splitlines()]
    assert shares == sorted(shares, reverse=True) and shares[-1] > 0.1
    assert lengths == sorted(lengths, reverse=True)
    rate = [len(run.names["unseen"].encode()) / n for n in lengths]
    assert rate[5] - rate[4] > rate[6] - rate[5] > rate[7] - rate[6]  # 1000, 2000, 4000, 8000


def test_unigram_takes_the_likeliest_split(run):
    assert run.names["chosen"] == run.names["found"][0] and len(run.names["found"]) > 4


def test_the_questions_that_can_be_computed(run):
    vocabulary = {"abc", "ab", "##cde", "##d", "##e"}
    assert run.names["wordpiece_split"]("abcde", vocabulary) == ["abc", "##d", "##e"]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("only the first occurrence", lambda s, p: _first_only(s, p)),
        ("the last symbol lost", lambda s, p: s[:-1]),
        ("not a list", lambda s, p: None),
        ("share a symbol", lambda s, p: _overlapping(s, p)),
        ("it changed the list", lambda s, p: s.clear() or s),
    ],
)
def test_wrong_merges(said, answer, capsys):
    assert said in verdict(answer, capsys, name="merge_pair")


def _first_only(symbols, pair):
    for i in range(len(symbols) - 1):
        if tuple(symbols[i : i + 2]) == pair:
            return [*symbols[:i], "".join(pair), *symbols[i + 2 :]]
    return list(symbols)


def _overlapping(symbols, pair):
    if pair[0] == pair[1] and len(symbols) >= 3 and tuple(symbols[:2]) == pair == tuple(symbols[1:3]):
        return ["".join(symbols[:3]), *symbols[3:]]
    return list(symbols)


def _cut(word, vocabulary, *, shortest=False, marked=True):
    pieces, start = [], 0
    while start < len(word):
        ends = range(start + 1, len(word) + 1) if shortest else range(len(word), start, -1)
        found = [e for e in ends if ("##" if start and marked else "") + word[start:e] in vocabulary]
        if not found:
            return [*pieces, "[UNK]"]
        pieces.append(("##" if start and marked else "") + word[start : found[0]])
        start = found[0]
    return pieces


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("the whole word is ['[UNK]']", lambda w, v: _cut(w, v)),
        ("is longer than", lambda w, v: _cut(w, v, shortest=True)),
        ("with ## before it", lambda w, v: ["un", "affable"]),
        ("is not in the vocabulary", lambda w, v: ["unaffable"]),
        ("not a list", lambda w, v: "un ##aff ##able"),
    ],
)
def test_wrong_wordpieces(said, answer, capsys):
    assert said in verdict(answer, capsys, name="wordpiece_split")
