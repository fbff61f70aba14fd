"""Pairs of texts from every kind of file, and what a model gets of them."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from heedful.data.dataset import Draw
from heedful.data.pairs import Pairs, read_pairs
from heedful.data.ragged import random_split
from heedful.text import train_unigram, words

SHARED = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
GERMAN = ["ein Hund läuft", "zwei Katzen", "der Mann schläft im Haus"]
ENGLISH = ["a dog runs", "two cats", "the man sleeps in the house"]
BOTH = list(zip(GERMAN, ENGLISH, strict=True))


def parallel(folder, german=None, english=None):
    for name, content, usual in ("x.de", german, GERMAN), ("x.en", english, ENGLISH):
        text = "".join(f"{line}\n" for line in usual) if content is None else content
        (folder / name).write_bytes(text.encode())
    return folder / "x.de"


def test_two_parallel_files(tmp_path):
    assert read_pairs(parallel(tmp_path), target="x.en") == BOTH
    assert read_pairs(tmp_path / "x.de", target=str(tmp_path / "x.en")) == BOTH


def test_windows_line_ends_a_byte_order_mark_and_no_last_line_end_make_no_difference(tmp_path):
    path = parallel(tmp_path, "\ufeff" + "\r\n".join(GERMAN), "\n".join(ENGLISH) + "\n")
    assert read_pairs(path, target="x.en") == BOTH


def test_unequal_line_counts_are_refused_with_the_counts(tmp_path):
    path = parallel(tmp_path, english="a\nb\nc\nd\ne\n")
    with pytest.raises(ValueError, match=r"x\.de has 3 lines and .*x\.en has 5"):
        read_pairs(path, target="x.en")


def test_tables_with_two_columns(tmp_path):
    tsv = tmp_path / "a.tsv"
    tsv.write_text("".join(f"{s}\t{t}\n" for s, t in BOTH), encoding="utf-8")
    assert read_pairs(tsv) == BOTH
    named = tmp_path / "b.csv"
    named.write_text("id,de,en\n" + "".join(f'{i},"{s}","{t}"\n' for i, (s, t) in enumerate(BOTH)))
    assert read_pairs(named, "de", "en") == BOTH
    assert read_pairs(named, "en", "de") == [(t, s) for s, t in BOTH]
    objects = tmp_path / "c.jsonl.gz"
    with gzip.open(objects, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"german": s, "english": t}) + "\n" for s, t in BOTH)
    assert read_pairs(objects) == BOTH
    assert read_pairs(objects, target="german") == [(t, s) for s, t in BOTH]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        (
            "a.jsonl",
            '{"s": "x", "t": "y"}\n{"s": "x"}\n',
            {},
            r"line 2: no column 't' \(did you mean|it has s\)",
        ),
        ("a.jsonl", '{"s": "x", "t": "y"}\n{"s": 3, "t": "y"}\n', {}, "line 2: s is '3', not a text"),
        ("a.jsonl", '{"s": "x", "t": "y"}\nnonsense\n', {}, "line 2: not JSON"),
        ("a.tsv", "x\ty\nx\n", {}, "line 2: no column 1"),
        ("a.csv", "de,en\nx,y\n", {"source": "de", "target": "eng"}, "no column 'eng'.*did you mean en"),
        ("a.de", "x\n", {}, "is no table: name the file"),
        ("a.de", "x\n", {"target": "a.en"}, "there is no file a.en"),
        ("a.tsv", b"\xff\xfex\0\t\0y", {}, "line 0: truncated data: save it as UTF-8"),
    ],
)
def test_mistakes_say_where_they_are(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_pairs(path, **options)


def test_batches_are_what_an_encoder_decoder_learns_from(tmp_path):
    tokenizer = words([*GERMAN, *ENGLISH])
    data = Pairs.read(parallel(tmp_path), tokenizer, target="x.en", start_id=1)
    batch = data.batch([Draw(0, 2), Draw(0, 1)], seed=0)
    eos = tokenizer.eos_id
    target = tokenizer.encode(ENGLISH[2])
    assert batch.source[0].tolist() == tokenizer.encode(GERMAN[2])
    assert batch.source_lengths.tolist() == [5, 2] and batch.lengths.tolist() == [7, 3]
    assert batch.tokens[0].tolist() == [1, *target]
    assert batch.targets[0].tolist() == [*target, eos]
    assert batch.targets[1].tolist() == [*tokenizer.encode(ENGLISH[1]), eos, -100, -100, -100, -100]
    assert data.lengths.tolist() == [4, 3, 7]
    assert torch.equal(data.batch([Draw(5, 1)], 9).source, batch.source[1:, :2])


def test_the_source_has_what_its_family_puts_around_a_text(tmp_path):
    tokenizer = train_unigram([*GERMAN, *ENGLISH] * 5, 60)
    data = Pairs.read(parallel(tmp_path), tokenizer, target="x.en", start_id=0)
    assert data.batch([Draw(0, 0)], 0).source[0, -1] == tokenizer.eos_id


def test_empty_and_long_pairs_are_left_out_and_told(tmp_path):
    path = parallel(tmp_path, "a\n\nb c d e\nf\n", "A\nB\nC\nF\n")
    data = Pairs.read(path, words(["a b c d e f A B C F"]), target="x.en", start_id=1, max_length=3)
    assert len(data) == 2
    assert data.notes == [
        "1 of 4 pairs have an empty side and are left out",
        "1 of 4 pairs are longer than 3 tokens and are left out",
    ]
    with pytest.raises(ValueError, match="no pair of texts is left"):
        Pairs([[]], [[1]], start_id=0, eos_id=1)


def test_a_part_is_kept_for_validation():
    data = Pairs([[i] for i in range(3, 103)], [[i] for i in range(3, 103)], start_id=0, eos_id=1)
    train, validation = random_split(data, 0.1)
    assert (len(train), len(validation)) == (90, 10)
    seen = [int(p.batch([Draw(0, i)], 0).source) for p in (train, validation) for i in range(len(p))]
    assert sorted(seen) == list(range(3, 103))
    assert train.fingerprint != validation.fingerprint
    assert len(train.lengths) == 90


@pytest.mark.skipif(not SHARED.exists(), reason="wants Multi30k in ../shared/data")
def test_multi30k_is_read_whole():
    pairs = read_pairs(SHARED / "train.de.gz", target="train.en.gz")
    assert len(pairs) == 29000
    assert pairs[0][1] == "Two young, White males are outside near many bushes."
