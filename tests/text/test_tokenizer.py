"""What every tokenizer promises: losslessness where claimed, text that stays text, files that other tools read."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from heedful.text import Tokenizer, byte_tokens, characters, train_bpe, train_unigram, train_wordpiece, words

CORPUS = [
    "the quick brown fox jumps over the lazy dog <s> </s> <pad> s > / < é 日本",
    "it was the best of times",
] * 5
KINDS = {
    "bpe": lambda: train_bpe(CORPUS, 300),
    "bpe-llama3": lambda: train_bpe(CORPUS, 300, pattern="llama3"),
    "bpe-tekken": lambda: train_bpe(CORPUS, 300, pattern="tekken"),
    "bytes": lambda: byte_tokens(extra=125),
    "wordpiece": lambda: train_wordpiece(CORPUS, 80),
    "unigram": lambda: train_unigram(CORPUS, 60, special=["<extra_id_0>"]),
    "words": lambda: words(CORPUS),
    "characters": lambda: characters(CORPUS),
}
BUILT = {name: make() for name, make in KINDS.items()}
LOSSLESS = {name: tokenizer for name, tokenizer in BUILT.items() if tokenizer.lossless}


@pytest.fixture(params=list(BUILT))
def tokenizer(request) -> Tokenizer:
    return BUILT[request.param]


def test_who_is_lossless():
    assert set(LOSSLESS) == {"bpe", "bpe-llama3", "bpe-tekken", "bytes"}


@pytest.mark.parametrize("name", list(LOSSLESS))
@given(text=st.text(max_size=200))
@settings(deadline=None, max_examples=40)
def test_random_unicode_comes_back(name, text):
    tokenizer = LOSSLESS[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", list(LOSSLESS))
@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=40)
def test_random_bytes_come_back(name, data):
    tokenizer = LOSSLESS[name]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data
    text = data.decode("latin-1")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_itself_is_lossless(gpt2_folder, nasty):
    gpt2 = Tokenizer.from_folder(gpt2_folder)
    assert gpt2.lossless and len(gpt2) == 50257 and gpt2.eos_id == 50256
    for text in nasty:
        assert gpt2.decode(gpt2.encode(text)) == text
    data = bytes(range(256)) * 3
    assert gpt2.decode_bytes(gpt2.encode_bytes(data)) == data
    assert gpt2.encode("Hello world") == [15496, 995]  # the ids of the paper's released code


@pytest.mark.parametrize("what", ["a", " ", "["])
def test_a_quarter_of_a_megabyte_of_one_thing(tokenizer, what):
    """No wall clock here: a quadratic step on that would not come back at all. No token stands for nothing, so the
    output is bounded by the input as well."""
    text = what * (250_000 // len(what.encode()))
    ids = tokenizer.encode(text)
    assert len(ids) <= 250_001
    if tokenizer.lossless:
        assert tokenizer.decode(ids) == text


def look_alikes(tokenizer: Tokenizer) -> list[str]:
    names = list(tokenizer.special_tokens)
    return [*names, *(f"a{name}b {name} c" for name in names), "".join(names), "</s>" * 3]


def test_special_tokens_in_text_are_text(tokenizer):
    special = set(tokenizer.special_tokens.values()) - {tokenizer.unk_id}
    for text in look_alikes(tokenizer):
        assert not special & set(tokenizer.encode(text))
        assert not special & {i for ids in tokenizer.encode_batch([text]) for i in ids}
        if tokenizer.lossless:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    for name, index in tokenizer.special_tokens.items():
        assert index in tokenizer.encode(f"a {name} b", allow_special=True)
        assert tokenizer.encode(f"a {name} b") == tokenizer.encode_batch([f"a {name} b"])[0]


def test_endoftext_is_thirteen_characters(gpt2_folder):
    gpt2 = Tokenizer.from_folder(gpt2_folder)
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("<|endoftext|>", allow_special=True) == [50256]
    assert gpt2.decode([15496, 50256]) == "Hello"
    assert gpt2.decode([15496, 50256], skip_special=False) == "Hello<|endoftext|>"


def test_saved_and_read_again(tokenizer, tmp_path, nasty):
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    copied = pickle.loads(pickle.dumps(tokenizer))
    for other in (again, copied):
        assert other.special_tokens == tokenizer.special_tokens and other.roles == tokenizer.roles
        assert other.lossless == tokenizer.lossless and len(other) == len(tokenizer)
        for text in [*nasty, *look_alikes(tokenizer)]:
            assert other.encode(text, add_special=True) == tokenizer.encode(text, add_special=True)


def test_saved_and_read_by_the_reference(tokenizer, tmp_path, nasty):
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*nasty, *look_alikes(tokenizer)]:
        assert reference(text)["input_ids"] == tokenizer.encode(text, add_special=True, allow_special=True)
    for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep"):
        assert getattr(reference, f"{role}_token_id") == getattr(tokenizer, f"{role}_id")


def test_offsets_point_into_the_text(tokenizer, nasty):
    for text in nasty:
        tokens = tokenizer.encode_with_offsets(text)
        assert [index for index, _, _ in tokens] == tokenizer.encode(text)
        assert all(0 <= start <= end <= len(text) for _, start, end in tokens)
    _, start, end = tokenizer.encode_with_offsets("it was the best")[0]
    assert "it was the best"[start:end] and start == 0


def test_pairs():
    bert, gpt = BUILT["wordpiece"], BUILT["bpe"]
    ids, segments = bert.encode_pair("the dog", "it was")
    cut = 2 + len(bert.encode("the dog"))
    assert [ids[0], ids[cut - 1], ids[-1]] == [bert.cls_id, bert.sep_id, bert.sep_id]
    assert segments == [0] * cut + [1] * (len(ids) - cut)
    assert gpt.encode_pair("the dog", " it")[0] == gpt.encode("the dog") + gpt.encode(" it")


def test_single_tokens():
    gpt = BUILT["bpe"]
    assert gpt.token(gpt.id("Ġthe")) == "Ġthe" and gpt.id("no such piece") is None
    assert gpt.vocab_size == len(gpt)
    for wrong in (-1, len(gpt)):
        with pytest.raises(ValueError, match="no token"):
            gpt.token(wrong)


def test_what_is_no_text_is_refused(tokenizer):
    for wrong in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="surrogate"):
            tokenizer.encode(wrong)
    with pytest.raises(ValueError, match="expected text"):
        tokenizer.encode(b"bytes")
    with pytest.raises(ValueError, match="negative"):
        tokenizer.decode([-1])
    assert tokenizer.decode([]) == "" and tokenizer.decode([10**6]) == ""


def test_half_a_character_decodes_to_its_bytes():
    tokenizer = BUILT["bytes"]
    ids = tokenizer.encode("é")
    assert ids == [0xC3 + 3, 0xA9 + 3]
    assert tokenizer.decode_bytes(ids[:1]) == b"\xc3"
    with pytest.raises(ValueError, match="single bytes"):
        BUILT["words"].decode_bytes([1])


def test_long_texts_are_never_cut(tmp_path):
    BUILT["wordpiece"].save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["truncation"] = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert len(Tokenizer.from_folder(tmp_path).encode("[" * 100)) == 100


# --- folders that are not what they should be ---------------------------------------------------------------------


def test_an_empty_folder_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json.*vocab\.txt.*spiece\.model"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "missing")


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
        ("tokenizer.model", b"not a model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
        ("spiece.model", b""),
        ("vocab.txt", b"a\nb\n"),
        ("tokenizer_config.json", b'{"tokenizer_class": "ByT5Tokenizer", "extra_ids": null}'),
        (
            "tokenizer_config.json",
            b'{"tokenizer_class": "ByT5Tokenizer", "added_tokens_decoder": {"5": "x"}}',
        ),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError):
        Tokenizer.from_folder(tmp_path)


def test_nothing_outside_the_folder_is_read(tmp_path):
    BUILT["bytes"].save(tmp_path / "real")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "real" / "tokenizer.json")
    with pytest.raises(ValueError, match="outside the folder"):
        Tokenizer.from_folder(tmp_path / "model")


def test_the_layout_of_the_hub_cache_is_read(tmp_path):
    BUILT["bytes"].save(tmp_path / "blobs")
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "tokenizer.json").symlink_to(tmp_path / "blobs" / "tokenizer.json")
    assert Tokenizer.from_folder(tmp_path / "snapshots" / "abc").encode("a") == [100]


def test_importing_text_is_light():
    code = "import sys, heedful.text; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment).returncode == 0


def test_a_tokenizer_that_reads_special_tokens(tokenizer):
    reader = tokenizer.reading_special()
    for name in tokenizer.special_tokens:
        text = f"a {name} b"
        assert reader.encode(text) == tokenizer.encode(text, allow_special=True) == reader.encode_batch([text])[0]
        assert tokenizer.encode(text) != tokenizer.encode(text, allow_special=True)
    assert reader.target is reader and reader.special_tokens == tokenizer.special_tokens


def test_a_panic_of_the_library_is_a_value_error(capfd):
    """Its regular expressions give up on some texts, and its Rust code panics: a BaseException."""
    backend = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    tokenizer, text = Tokenizer(backend), "x" * 60
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_batch([text]),
        lambda: tokenizer.encode_pair("a", text),
        lambda: tokenizer.encode_with_offsets(text),
    ):
        with pytest.raises(ValueError, match=r"the tokenizer cannot encode this text: .*retry-limit"):
            call()
