"""Each family's own files give the ids of the reference's own class for that family, on a nasty sample.

The vocabularies are tiny ones trained here; what is compared is everything around them: normalisation, word boundaries,
byte fallback, special tokens, what goes around a text.
"""

import json

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from heedful.text import Tokenizer

transformers = pytest.importorskip("transformers", reason="the reference is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece, which trains test models, is missing")

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def bpe_files(corpus) -> tuple[dict[str, int], str]:
    """vocab.json and merges.txt of a tiny byte-level BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])


def numbered(vocab: dict[str, int], *extra: str) -> dict[str, int]:
    return {**vocab, **{name: len(vocab) + index for index, name in enumerate(extra)}}


# --- vocab.json and merges.txt --------------------------------------------------------------------------------------


def test_the_real_gpt2(gpt2_folder, nasty, leading, same):
    reference = transformers.GPT2Tokenizer.from_pretrained(gpt2_folder)
    same(Tokenizer.from_folder(gpt2_folder), reference, nasty + leading)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neo", "gptj"])
@pytest.mark.parametrize("prefix", [False, True])
def test_gpt2_neo_j(tmp_path, bpe_files, nasty, leading, model_type, prefix, write, same):
    vocab, merges = bpe_files
    config = {"add_prefix_space": prefix, "tokenizer_class": "GPT2Tokenizer"}
    write(
        tmp_path,
        vocab__json=numbered(vocab, "<|endoftext|>"),
        merges__txt=merges,
        config__json={"model_type": model_type},
        tokenizer_config__json=config,
    )
    mine = Tokenizer.from_folder(tmp_path)
    same(mine, transformers.GPT2Tokenizer.from_pretrained(tmp_path), nasty + leading)
    assert mine.lossless is not prefix and mine.bos_id == mine.eos_id == len(vocab)


def test_gptj_tokens_added_later(tmp_path, bpe_files, nasty, write, same):
    vocab, merges = bpe_files
    extra = {f"<|extratoken_{i}|>": len(vocab) + i for i in range(1, 4)}
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": False}
    added = {index: {"content": name, **flags} for name, index in extra.items()}
    write(
        tmp_path,
        vocab__json=numbered(vocab, "<|endoftext|>"),
        merges__txt=merges,
        added_tokens__json=extra,
        tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added},
    )
    mine = Tokenizer.from_folder(tmp_path)
    same(mine, transformers.GPT2Tokenizer.from_pretrained(tmp_path), [*nasty, "a <|extratoken_2|> b"])
    assert len(mine) == len(vocab) + 4


def test_roberta(tmp_path, bpe_files, nasty, write, same):
    vocab, merges = bpe_files
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocab = {**{n: i for i, n in enumerate(names)}, **{p: i + len(names) for p, i in vocab.items()}}
    write(tmp_path, vocab__json=vocab, merges__txt=merges, config__json={"model_type": "roberta"})
    mine, reference = Tokenizer.from_folder(tmp_path), transformers.RobertaTokenizer.from_pretrained(tmp_path)
    for text in nasty:
        if "<mask>" not in text:
            same(mine, reference, [text])
    ids, _ = mine.encode_pair("a b", "c")
    assert ids == reference("a b", "c")["input_ids"]
    # as published with RoBERTa: the mask takes the space before it along
    assert mine.encode("a <mask>", allow_special=True) == [*mine.encode("a"), mine.mask_id]


@pytest.mark.parametrize("form", ["files", "json"])
def test_qwen(tmp_path, bpe_files, nasty, leading, form, write, same):
    vocab, merges = bpe_files
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {
            str(len(vocab) + i): {"content": name, "special": True, "normalized": False, "lstrip": False}
            for i, name in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        },
    }
    write(
        tmp_path,
        vocab__json=vocab,
        merges__txt=merges,
        tokenizer_config__json=config,
        config__json={"model_type": "qwen2"},
    )
    reference = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
    if form == "json":
        reference.save_pretrained(tmp_path / "saved")
        tmp_path = tmp_path / "saved"
    mine = Tokenizer.from_folder(tmp_path)
    same(mine, reference, nasty + leading)
    assert not mine.lossless and mine.eos_id == len(vocab) + 2  # it normalises to NFC


def test_gpt1(tmp_path, corpus, nasty, write, same):
    backend = Backend(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
    write(tmp_path, vocab__json=model["vocab"], merges__txt=merges, config__json={"model_type": "openai-gpt"})
    mine = Tokenizer.from_folder(tmp_path)
    reference = transformers.OpenAIGPTTokenizer.from_pretrained(tmp_path)
    same(mine, reference, [text for text in nasty if "<unk>" not in text])
    assert mine.decode(mine.encode("The best of times")) == "the best of times"


# --- tokenizer.json -------------------------------------------------------------------------------------------------


def byte_level_json(kind: str, bpe_files) -> tuple[Backend, dict[str, str]]:
    """The tokenizer.json of a family, as published, over a tiny vocabulary."""
    vocab, merges = bpe_files
    pairs = [tuple(line.split(" ")) for line in merges.split("\n")[1:] if line]
    backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), level])
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    backend.pre_tokenizer = {"smollm2": digits, "neox": pre_tokenizers.ByteLevel(False)}.get(kind, split)
    backend.decoder = decoders.ByteLevel()
    end = {"llama3": "<|end_of_text|>", "smollm2": "<|im_end|>"}.get(kind, "<|endoftext|>")
    roles = {"eos_token": end}
    if kind == "llama3":
        roles["bos_token"] = "<|begin_of_text|>"
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in roles.values()])
    if kind == "llama3":
        bos = "<|begin_of_text|>"
        template = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    if kind == "neox":
        backend.normalizer = normalizers.NFC()
        backend.add_tokens([AddedToken(" " * n, normalized=True, special=False) for n in range(8, 1, -1)])
    return backend, roles


@pytest.mark.parametrize("kind", ["llama3", "smollm2", "olmo2", "neox"])
def test_byte_level_families(tmp_path, bpe_files, nasty, leading, kind, same):
    backend, roles = byte_level_json(kind, bpe_files)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    reference.save_pretrained(tmp_path)
    mine = Tokenizer.from_folder(tmp_path)
    same(mine, reference, [*nasty, *leading, *roles.values(), "a" + "".join(roles.values()) + "b"])
    assert mine.lossless is (kind != "neox")


def test_gpt_neox_own_class(tmp_path, bpe_files, nasty, leading, same):
    vocab, merges = bpe_files
    pairs = [tuple(line.split(" ")) for line in merges.split("\n")[1:] if line]
    extra = ("<|endoftext|>", "<|padding|>")
    transformers.GPTNeoXTokenizer(vocab=numbered(vocab, *extra), merges=pairs).save_pretrained(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    same(Tokenizer.from_folder(tmp_path), reference, nasty + leading)


# --- WordPiece and bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"strip_accents": False, "tokenize_chinese_chars": False}]
)
def test_bert(tmp_path, corpus, nasty, leading, model_type, config, write, same):
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=config.get("do_lower_case", True))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        corpus, trainers.WordPieceTrainer(vocab_size=250, special_tokens=names, show_progress=False)
    )
    vocab = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    write(
        tmp_path,
        vocab__txt="".join(f"{piece}\n" for piece, _ in vocab),
        config__json={"model_type": model_type},
        tokenizer_config__json=config,
    )
    mine, reference = (
        Tokenizer.from_folder(tmp_path),
        transformers.BertTokenizer.from_pretrained(tmp_path, **config),
    )
    same(mine, reference, nasty + leading)
    pair = reference("the dog", "it was")
    assert mine.encode_pair("the dog", "it was") == (pair["input_ids"], pair["token_type_ids"])
    for text in nasty:
        assert mine.decode(mine.encode(text)) == reference.decode(mine.encode(text), skip_special_tokens=True)


def test_byt5(tmp_path, nasty, leading, write):
    write(
        tmp_path,
        tokenizer_config__json={"tokenizer_class": "ByT5Tokenizer"},
        config__json={"model_type": "t5"},
    )
    mine, reference = Tokenizer.from_folder(tmp_path), transformers.ByT5Tokenizer()
    for text in nasty + leading:
        expected = reference(text, split_special_tokens=True)["input_ids"]
        assert mine.encode(text, add_special=True) == expected
        assert mine.decode(expected) == text
    assert mine.encode("<extra_id_7>", allow_special=True) == reference("<extra_id_7>").input_ids[:1]
    assert mine.lossless and mine.encode("a") == [ord("a") + 3]
