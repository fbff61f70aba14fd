"""Tokenizers as GGUF metadata: read again they give the same ids; what llama.cpp does not have is refused."""

import json

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from heedful.text import Tokenizer, characters, train_bpe, train_unigram, train_wordpiece, words
from heedful.text.gguf_fields import gguf_fields
from heedful.weights.gguf_file import GgufFile
from support.real import real_model

PREFIX = "tokenizer.ggml."


def fields_of(tokenizer: Tokenizer, special: dict[str, object] | None = None) -> dict[str, object]:
    fields = gguf_fields(tokenizer, special or {}, len(tokenizer))
    return {key.removeprefix(PREFIX): value for key, value in fields.items()}


def read_again(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_fields(tokenizer, {}, len(tokenizer) + 3))


def llama_fields() -> dict[str, object]:
    """A small SentencePiece model; the runs of spaces have equal scores, as LLaMA's have."""
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "ll", "▁▁", "▁▁▁▁", "▁▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 3)] + [-1e9] * 3
    values = dict(model="llama", tokens=tokens, scores=scores, token_type=types, bos_token_id=1, eos_token_id=2)
    return {PREFIX + key: value for key, value in values.items()}


@pytest.mark.parametrize("pattern, name", [("gpt2", "gpt-2"), ("llama3", "dbrx"), ("qwen2", "stablelm2")])
def test_byte_level(pattern, name, corpus, nasty, leading):
    original = train_bpe(corpus, 400, pattern=pattern)
    fields = fields_of(original, {"eos_token_id": [3, 4]})
    assert (fields["model"], fields["pre"]) == ("gpt2", name)
    assert (fields["eos_token_id"], fields["eot_token_id"]) == (3, 4)
    assert fields["token_type"] == [1] * 399 + [3] and not fields["add_bos_token"]
    again = read_again(original)
    assert len(again) == len(original)
    for text in nasty + leading:
        assert again.encode(text) == original.encode(text)


def test_pre_tokenizers_have_names(corpus):
    original = train_bpe(corpus, 400)
    words_ = original.backend.pre_tokenizer
    original.backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words_])
    assert fields_of(Tokenizer(original.backend))["pre"] == "smollm"
    original.backend.pre_tokenizer, original.backend.normalizer = words_, normalizers.NFC()
    assert fields_of(Tokenizer(original.backend))["pre"] == "gpt-2"  # GPT-NeoX: llama.cpp composes nothing
    qwen = train_bpe(corpus, 400, pattern="qwen2").backend
    qwen.normalizer = normalizers.NFC()
    assert fields_of(Tokenizer(qwen))["pre"] == "qwen2"
    spec = json.loads(train_bpe(corpus, 400, pattern="llama3").backend.to_str())
    spec["model"]["ignore_merges"] = True
    assert fields_of(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec))))["pre"] == "llama-bpe"


def test_sentencepiece(nasty, leading):
    original = Tokenizer.from_gguf(llama_fields())
    fields = fields_of(original)
    assert (fields["model"], fields["add_space_prefix"], fields["add_bos_token"]) == ("llama", True, True)
    assert fields["token_type"] == llama_fields()[PREFIX + "token_type"]
    assert fields["scores"][-2] == fields["scores"][-1]  # runs of spaces, whose merges alternate
    again = read_again(original)
    for text in nasty + leading:
        assert again.encode(text, add_special=True) == original.encode(text, add_special=True)


def test_unigram(nasty):
    """With SentencePiece's own steps; ours, with NFKC, is refused."""
    pieces = [["<unk>", 0.0], ["▁", -2.0], ["a", -3.0], ["b", -3.5], ["▁ab", -1.5], ["ab", -4.0]]
    values = dict(
        model="t5", tokens=[p for p, _ in pieces], scores=[s for _, s in pieces], token_type=[2, 1, 1, 1, 1, 1],
        unknown_token_id=0, add_eos_token=False,
    )  # fmt: skip
    original = Tokenizer.from_gguf({PREFIX + key: value for key, value in values.items()})
    fields = fields_of(original)
    assert (fields["model"], fields["scores"]) == ("t5", values["scores"])
    assert fields["remove_extra_whitespaces"] and fields["eos_token_id"] == 0  # <unk>, which no text ends with
    for text in ("ab ab  ba", " b", *nasty):
        assert read_again(original).encode(text) == original.encode(text)


def test_characters(corpus):
    original = characters(corpus)
    fields = fields_of(original)
    assert fields["model"] == "t5" and not fields["add_space_prefix"] and "▁" in fields["tokens"]
    again = read_again(original)
    for text in (*corpus, " two  spaces ", "\n"):
        if original.unk_id not in original.encode(text):
            assert again.encode(text) == original.encode(text)
            assert again.decode(again.encode(text)) == text


def test_what_llama_cpp_does_not_have_is_refused(corpus):
    prefixed = train_bpe(corpus, 400).backend
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower = train_bpe(corpus, 400).backend
    lower.normalizer = normalizers.Lowercase()
    bare = Tokenizer.from_gguf(llama_fields())
    spec = json.loads(bare.backend.to_str())
    spec["model"]["merges"] = spec["model"]["merges"][:-1]  # SentencePiece would merge these pieces
    for tokenizer, message in [
        (words(corpus), "WordLevel"),
        (train_wordpiece(corpus, 200), "WordPiece"),
        (train_unigram(corpus, 150), "normalizer"),
        (Tokenizer(prefixed), "pre-tokenizer"),
        (Tokenizer(lower), "Lowercase"),
        (Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), roles=bare.roles), "merges"),
    ]:
        with pytest.raises(ValueError, match=message):
            fields_of(tokenizer)
    with pytest.raises(ValueError, match="the model embeds 10"):
        gguf_fields(train_bpe(corpus, 400), {}, 10)


def test_the_real_smollm2():
    path = real_model("smollm2-135m-instruct")
    if path.is_dir():
        pytest.skip("SmolLM2 was pulled from the hub, in another format")
    with GgufFile(path) as file:
        given = file.fields
    made = gguf_fields(Tokenizer.from_gguf(given), {}, 49152)
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id"):
        assert made[PREFIX + key] == given[PREFIX + key], key
    assert made["tokenizer.chat_template"] == given["tokenizer.chat_template"]
