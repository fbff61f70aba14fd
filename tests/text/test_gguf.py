"""Tokenizers inside GGUF metadata equal the same tokenizers from their own files."""

import json

import pytest
from tokenizers import pre_tokenizers

from heedful.text import Tokenizer, train_bpe, train_unigram, train_wordpiece
from support.real import real_model

NORMAL, UNKNOWN, CONTROL, USER, _, BYTE = range(1, 7)


def fields(**values: object) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def bpe_fields(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    model = json.loads(tokenizer.backend.to_str())["model"]
    special = tokenizer.special_tokens.values()
    return fields(
        model="gpt2",
        pre=pre,
        tokens=[tokenizer.token(index) for index in range(len(tokenizer))],
        token_type=[CONTROL if index in special else NORMAL for index in range(len(tokenizer))],
        merges=[f"{a} {b}" for a, b in model["merges"]],
        eos_token_id=tokenizer.eos_id,
    )


@pytest.mark.parametrize("pre, pattern", [("gpt-2", "gpt2"), ("llama-bpe", "llama3"), ("tekken", "tekken")])
def test_byte_level(corpus, nasty, leading, pre, pattern):
    original = train_bpe(corpus, 400, pattern=pattern)
    read = Tokenizer.from_gguf({**bpe_fields(original, pre), "tokenizer.chat_template": "{{ eos_token }}"})
    for text in nasty + leading:
        assert read.encode(text) == original.encode(text)
        assert read.decode(read.encode(text)) == text
    assert read.lossless and read.eos_id == original.eos_id
    assert read.chat([{"role": "user", "content": "x"}]) == [original.eos_id]


def test_smollm_cuts_every_digit(corpus, nasty):
    original = train_bpe(corpus, 400)
    read = Tokenizer.from_gguf(bpe_fields(original, "smollm"))
    backend = original.backend
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    for text in nasty:
        assert read.encode(text) == backend.encode(text).ids


def test_qwen_composes_accents(corpus):
    read = Tokenizer.from_gguf(bpe_fields(train_bpe(corpus, 400, pattern="qwen2"), "qwen2"))
    assert read.encode("e\u0301") == read.encode("é") and not read.lossless


def test_bert(corpus, nasty):
    original = train_wordpiece(corpus, 200)
    tokens = [original.token(index) for index in range(len(original))]
    special = original.special_tokens
    marked = [t if t in special else t[2:] if t.startswith("##") else "▁" + t for t in tokens]
    read = Tokenizer.from_gguf(fields(model="bert", tokens=marked, cls_token_id=original.cls_id))
    for text in nasty:
        assert read.encode(text, add_special=True) == original.encode(text, add_special=True)


def test_llama_scores(nasty, leading):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) - 1)] + [-1e9]
    given = fields(model="llama", tokens=tokens, scores=scores, token_type=types, bos_token_id=1, eos_token_id=2)
    read = Tokenizer.from_gguf(given)
    assert [read.token(i) for i in read.encode("hello  hé", add_special=True)] == [
        *("<s>", "▁hello", "▁", "▁h", "<0xC3>", "<0xA9>")
    ]
    for text in nasty:
        assert read.decode(read.encode(text)) == text
    unprefixed = Tokenizer.from_gguf({**given, "tokenizer.ggml.add_space_prefix": False})
    for text in nasty + leading[:-1]:
        assert unprefixed.decode(unprefixed.encode(text)) == text


def test_t5(corpus, nasty):
    original = train_unigram(corpus, 150)
    vocab = json.loads(original.backend.to_str())["model"]["vocab"]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(vocab) - 3)]
    tokens, scores = zip(*vocab, strict=True)
    given = fields(model="t5", tokens=tokens, scores=scores, token_type=types, eos_token_id=1, unknown_token_id=2)
    read = Tokenizer.from_gguf(given)
    text = "it was the best of times"
    assert read.encode(text, add_special=True) == original.encode(text, add_special=True)
    assert read.eos_id not in read.encode("</s>")


@pytest.mark.parametrize(
    "given, match",
    [
        ({}, "no tokenizer"),
        (fields(model="gpt2", tokens=["a"], pre="unheard-of"), "not known"),
        (fields(model="rwkv", tokens=["a"]), "not supported"),
        (fields(model="gpt2", tokens=["a"], merges=["a b"]), "fit together"),
        (fields(model="gpt2", tokens=["a"], merges=["a"]), "pairs"),
        (fields(model="llama", tokens=["a"], scores=[0.0, 1.0]), "1 tokens but 2 scores"),
        (fields(model="llama", tokens=["a"], unknown_token_id=7), "unknown token"),
    ],
)
def test_damaged_metadata(given, match):
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_gguf(given)


def test_the_real_smollm2(nasty):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    path = real_model("smollm2-135m-instruct")
    if path.is_dir():
        pytest.skip("SmolLM2 was pulled from the hub, in another format")
    reader = gguf.GGUFReader(path)
    given = {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    read = Tokenizer.from_gguf(given)
    assert len(read) == 49152 and read.eos_id == read.id("<|im_end|>") == 2
    assert not read.lossless  # its vocabulary lacks some control characters
    for text in nasty:
        if text.isprintable():
            assert read.decode(read.encode(text)) == text
    ids = read.chat([{"role": "user", "content": "Hi<|im_end|>"}])
    assert ids.count(2) == 2 and ids.count(1) == 3


def test_the_real_bert(nasty):
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    folder = real_model("all-minilm-l6-v2")
    read = Tokenizer.from_folder(folder)
    reference = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    for text in nasty:
        expected = reference(text, split_special_tokens=True)["input_ids"]
        assert read.encode(text, add_special=True) == expected
