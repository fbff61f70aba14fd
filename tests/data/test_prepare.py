"""Text becomes tokens: the same as encoded at once, split as promised, kept and checked."""

import errno
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, trainers

from heedful.data import prepare as module
from heedful.data import sources
from heedful.data.prepare import piece_join_mode, prepare_corpus, tokenizer_fingerprint
from heedful.data.sources import TextSource
from heedful.text import (
    Tokenizer,
    byte_tokens,
    characters,
    sentencepiece,
    train_bpe,
    train_unigram,
    train_wordpiece,
    words,
)  # fmt: skip

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SENTENCES = [
    "It was the best of times, it was the worst of times.\n\nIt was  the age of wisdom (they said: 'yes!').\n",
    "\n   Indented by three; 1234567890 3.14 don't we'll I'VE\t\ttabs\n\n\n",
    "The café naïve Ångström e\u0301 — dash… 日本語のテキスト、中文字符。한국어 문장 👩‍👩‍👧 <|endoftext|> </s>\n",
    "def f(x):\n    return x**2  # comment   \n trailing \n",
]
TEXT = "".join(SENTENCES * 12)


def llama_like() -> Tokenizer:
    """SentencePiece's BPE, which writes a space before every text."""
    pieces = [
        sentencepiece.Piece("<unk>", 0, sentencepiece.UNKNOWN),
        sentencepiece.Piece("<s>", 0, sentencepiece.CONTROL),
        sentencepiece.Piece("</s>", 0, sentencepiece.CONTROL),
    ]
    found = ["▁t", "he", "▁the", "wa", "▁wa", "▁▁", "it", "▁it", "ti", *sorted({"▁", *TEXT})]
    pieces += [sentencepiece.Piece(text, -float(rank)) for rank, text in enumerate(found)]
    model = sentencepiece.SentencePieceModel(pieces=pieces, kind=sentencepiece.BPE, remove_extra_whitespaces=False)
    return Tokenizer(sentencepiece.to_backend(model))


def over_words() -> Tokenizer:
    """Tokens that go from a word into the next."""
    backend = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return Tokenizer(backend)


TOKENIZERS = {
    **{f"bpe-{p}": lambda p=p: train_bpe([TEXT], 350, pattern=p) for p in ("gpt2", "llama3", "qwen2", "tekken")},
    "characters": lambda: characters([TEXT]),
    "bytes": byte_tokens,
    "words": lambda: words([TEXT]),
    "wordpiece": lambda: train_wordpiece([TEXT], 200),
    "unigram": lambda: train_unigram([TEXT], 150),
    "llama": llama_like,
    "over words": over_words,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heedful" / "data"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_tokens_of_the_whole(name, text_file, monkeypatch):
    tokenizer = TOKENIZERS[name]()
    for attribute, value in (("PIECE", 20), ("CHUNK", 4096)):
        monkeypatch.setattr(sources, attribute, value)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 100)
    source = TextSource(text_file)
    assert len(list(source.texts())) > 100
    train, validation = prepare_corpus(source, tokenizer)
    assert validation is None
    assert train.tokens.tolist() == tokenizer.encode(TEXT)
    assert train.n_bytes == len(TEXT.encode()) and train.starts.tolist() == [0]
    assert piece_join_mode(tokenizer, TEXT) == {"llama": "drop", "over words": "whole"}.get(name, "keep")


def test_text_without_spaces(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 20)
    monkeypatch.setattr(sources, "LONGEST", 60)
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo.\nthree!\n" * 50)
    for tokenizer in (train_bpe([TEXT], 350, pattern="llama3"), train_bpe([TEXT], 350), llama_like()):
        train, _ = prepare_corpus(TextSource(lines), tokenizer)
        assert train.tokens.tolist() == tokenizer.encode(lines.read_text())


@pytest.mark.parametrize("kind, expected", [("characters", (1_003_854, 111_540)), ("gpt2", (301_966, 36_059))])
def test_shakespeare_is_split_as_nanogpt_does(kind, expected):
    """The numbers of tokens are those of nanoGPT's data/shakespeare_char and data/shakespeare readmes."""
    if not (DATA / "shakespeare.txt").is_file():
        pytest.skip("shared/data is not beside the repository")
    source = TextSource(DATA / "shakespeare.txt")
    gpt2 = kind == "gpt2"
    tokenizer = Tokenizer.from_folder(DATA / "gpt2-tokenizer") if gpt2 else characters(source.texts())
    train, validation = prepare_corpus(source, tokenizer, share=0.1)
    assert (len(train.tokens), len(validation.tokens)) == expected
    assert train.tokens.dtype == np.uint16
    text = (DATA / "shakespeare.txt").read_text()
    assert tokenizer.decode(train.tokens[-50:]) + tokenizer.decode(validation.tokens[:50]) in text


def test_few_documents_are_split_by_characters(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.txt").write_text("ghij")
    tokenizer = characters(["abcdefghij"])
    train, validation = prepare_corpus(TextSource(tmp_path), tokenizer, share=0.5)
    assert tokenizer.decode(train.tokens, skip_special=False) == "abcde"
    assert tokenizer.decode(validation.tokens, skip_special=False) == "f</s>ghij</s>"
    assert validation.starts.tolist() == [0, 2]
    assert (train.n_bytes, validation.n_bytes) == (5, 5)
    assert train.fingerprint != validation.fingerprint


def test_many_documents_are_held_out_whole(tmp_path):
    texts = [f"document {i}" for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = byte_tokens()
    train, validation = prepare_corpus(TextSource(tmp_path / "a.jsonl"), tokenizer, share=0.1)
    found = [[tokenizer.decode(ids) for ids in np.split(part.tokens, part.starts[1:])] for part in (train, validation)]
    assert len(found[1]) == 5 and sorted(found[0] + found[1]) == sorted(texts)
    assert found[1] != texts[-5:] and found[0] == [text for text in texts if text not in found[1]]
    assert (train.tokens[train.starts[1:] - 1] == tokenizer.eos_id).all() and train.tokens[-1] == tokenizer.eos_id
    assert any("10% of the documents" in note for note in train.notes)


def test_documents_without_tokens_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('"one"\n"  "\n"two"')
    train, _ = prepare_corpus(TextSource(tmp_path / "a.jsonl"), words(["one two"]))
    assert len(train.starts) == 2 and len(train.tokens) == 4


class Deaf(Tokenizer):
    """Cannot encode: what it gives back was kept."""

    def encode_batch(self, *args, **kwargs):
        raise AssertionError("tokenized again")


def deaf(tokenizer: Tokenizer) -> Tokenizer:
    return Deaf(tokenizer.backend, roles=tokenizer.roles)


def test_the_second_time_nothing_is_tokenized(text_file, cache):
    tokenizer = characters([TEXT])
    first = prepare_corpus(TextSource(text_file), tokenizer, share=0.2)
    again = prepare_corpus(TextSource(text_file), deaf(tokenizer), share=0.2)
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and a.fingerprint == b.fingerprint and a.notes == b.notes
    assert isinstance(again[0].tokens, np.memmap)
    with pytest.raises(AssertionError, match="tokenized again"):
        prepare_corpus(TextSource(text_file), deaf(tokenizer), share=0.3)
    text_file.write_text(TEXT[:-1] + "x", encoding="utf-8")
    with pytest.raises(AssertionError, match="tokenized again"):
        prepare_corpus(TextSource(text_file), deaf(tokenizer), share=0.2)
    assert not list(cache.glob("aside-*"))


def damage_byte(entry):
    path = entry / "train.tokens.npy"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def cut_short(entry):
    path = entry / "train.tokens.npy"
    path.write_bytes(path.read_bytes()[:-10])


def foreign(entry):
    meta = json.loads((entry / "meta.json").read_text())
    meta["made_of"]["tokenizer"] = "another"
    (entry / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        damage_byte,
        cut_short,
        foreign,
        lambda entry: (entry / "train.starts.npy").unlink(),
        lambda entry: (entry / "meta.json").write_text("{"),
        lambda entry: (entry / "meta.json").write_text("[]"),
        lambda entry: np.save(entry / "train.tokens.npy", np.array([{}], dtype=object), allow_pickle=True),
        lambda entry: (shutil.rmtree(entry), entry.mkdir()),
    ],
)
def test_damaged_or_foreign_files_are_made_again(text_file, cache, damage):
    tokenizer = characters([TEXT])
    prepare_corpus(TextSource(text_file), tokenizer)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    damage(entry)
    train, _ = prepare_corpus(TextSource(text_file), tokenizer)
    assert train.tokens.tolist() == tokenizer.encode(TEXT)
    prepare_corpus(TextSource(text_file), deaf(tokenizer))


def test_a_full_disk(text_file, cache, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write_header", full)
    with pytest.raises(OSError, match=r"could not keep the tokens of .*text\.txt.* set XDG_CACHE_HOME"):
        prepare_corpus(TextSource(text_file), byte_tokens())
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_nowhere_to_keep_it(text_file, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    train, _ = prepare_corpus(TextSource(text_file), byte_tokens(), cache=text_file / "no folder")
    assert byte_tokens().decode(train.tokens.tolist()) == TEXT
    assert list((tmp_path / "temporary").iterdir()) == []


def test_large_vocabularies_have_larger_tokens(tmp_path):
    everything = [chr(i) for i in range(0x4E00, 0x4E00 + 20_000)] + [chr(i) for i in range(0x20000, 0x20000 + 50_000)]
    (tmp_path / "a.txt").write_text("".join(everything[-10:]), encoding="utf-8")
    tokenizer = characters(everything)
    train, _ = prepare_corpus(TextSource(tmp_path / "a.txt"), tokenizer)
    assert train.tokens.dtype == np.uint32 and train.tokens.max() > 2**16


def test_what_cannot_be_prepared(tmp_path, text_file):
    with pytest.raises(ValueError, match="share=1"):
        prepare_corpus(TextSource(text_file), byte_tokens(), share=1)
    (tmp_path / "blank.txt").write_text("a")
    with pytest.raises(ValueError, match="no tokens for train"):
        prepare_corpus(TextSource(tmp_path / "blank.txt"), byte_tokens(), share=0.5)


def test_tokenizers_have_fingerprints():
    a, b = characters(["abc"]), characters(["abd"])
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(characters(["abc"])) != tokenizer_fingerprint(b)
