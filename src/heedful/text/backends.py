"""Tokenizer backends of each family, built from its vocabulary files.

Normalizer, pre-tokenizer, subword model, decoder and post-processor as in each paper's code. Functions of a family
return a `tokenizers.Tokenizer` and the names of its special tokens.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from heedful.text import sentencepiece
from heedful.text.byte_level import CHAR_OF_BYTE

Roles = dict[str, str]
Built = tuple[tokenizers.Tokenizer, Roles]

# The pre-tokenizers' patterns before byte-level BPE; GPT-2's own is built into the library.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS: dict[str, str | None] = {
    "gpt2": None,
    "llama3": _WORDS % "{1,3}",  # LLaMA 3, OLMo 2
    "qwen2": _WORDS % "",  # digits one by one
    "tekken": (  # Mistral Nemo and later
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def special_token(name: str, **flags: bool) -> AddedToken:
    """A special token that the normalizer leaves alone."""
    return AddedToken(name, special=True, normalized=False, **flags)


def byte_level_pre_tokenizer(pattern: str | None, *, prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """Split into words by `pattern` (None: GPT-2's), then map bytes to the byte-level alphabet."""
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)])


def wrap_with_special_tokens(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Set the post-processor that puts `before` and `after` around a text (and around both texts of a pair)."""
    names = [name for name in (before, after) if name is not None]
    if not names:
        return
    one = [*([before] if before else []), "$A", *([after] if after else [])]
    two = [*([before] if before else []), "$B:1", *([after] if after else [])]
    ids = [(name, index) for name in names if (index := backend.token_to_id(name)) is not None]
    if len(ids) != len(names):
        raise ValueError(f"the tokens {names} must be in the vocabulary")
    two = [f"{part}:1" if part in names else part for part in two]
    template = processors.TemplateProcessing(single=one, pair=[*one, *two], special_tokens=ids)
    inner = backend.post_processor
    backend.post_processor = template if inner is None else processors.Sequence([inner, template])


def parse_merges(text: str) -> list[tuple[str, str]]:
    """merges.txt: one pair per line after an optional "#version" line."""
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise ValueError(f"merges.txt, line {number}: expected two pieces, got {line!r}")
        merges.append((pair[0], pair[1]))
    return merges


def _bpe_model(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
        raise ValueError("vocab.json must map pieces to ids")
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        raise ValueError(f"vocab.json and merges.txt do not fit together: {error}") from None


def bpe(vocab: dict[str, int], merges: str, config: dict[str, Any], family: str) -> Built:
    """BPE from vocab.json and merges.txt: GPT-1, GPT-2 (Neo, J, NeoX), RoBERTa or Qwen, by family or vocabulary."""
    pairs = parse_merges(merges)
    if family == "openaigpt" or any(piece.endswith("</w>") for piece in vocab):
        return gpt1(vocab, pairs)
    backend = _bpe_model(vocab, pairs)
    prefix = bool(config.get("add_prefix_space", False))
    pattern = PATTERNS["qwen2"] if family.startswith("qwen") else None
    backend.pre_tokenizer = byte_level_pre_tokenizer(pattern, prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    if family == "roberta" or (not family and {"<s>", "<mask>"} <= vocab.keys()):
        return _roberta(backend, prefix)
    if family.startswith("qwen") or family == "gptneox":
        backend.normalizer = normalizers.NFC()
    roles = {"eos": "<|endoftext|>", "unk": "<|endoftext|>"}
    roles |= {"pad": "<|endoftext|>"} if family.startswith("qwen") else {"bos": "<|endoftext|>"}
    backend.add_special_tokens([special_token("<|endoftext|>")])
    before = config.get("bos_token", "<|endoftext|>") if config.get("add_bos_token") else None
    wrap_with_special_tokens(backend, before["content"] if isinstance(before, dict) else before, None)
    return backend, roles


def gpt1(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Built:
    """GPT-1: lower case, BERT's words, BPE whose last piece of a word ends in "</w>"."""
    backend = _bpe_model(vocab, merges, end_of_word_suffix="</w>", unk_token="<unk>")
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend, {"unk": "<unk>"}


def _roberta(backend: tokenizers.Tokenizer, prefix: bool) -> Built:
    """RoBERTa: GPT-2's tokenizer with <s> a </s> </s> b </s> around it; <mask> takes the space before it along."""
    roles = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>"}
    names = dict.fromkeys(roles.values())
    backend.add_special_tokens([special_token(name) for name in names])
    backend.add_special_tokens([special_token("<mask>", lstrip=True)])
    start, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    assert start is not None and end is not None
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", end), ("<s>", start), trim_offsets=True, add_prefix_space=prefix
    )
    return backend, {**roles, "mask": "<mask>"}


def bert_special_tokens(config: dict[str, Any]) -> Roles:
    """BERT's special tokens by role: [UNK], [CLS] ... or the names in the config."""
    defaults = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    given = {role: config.get(f"{role}_token", name) for role, name in defaults.items()}
    return {role: name["content"] if isinstance(name, dict) else name for role, name in given.items()}


def configure_bert(backend: tokenizers.Tokenizer, roles: Roles, config: dict[str, Any]) -> None:
    """Set BERT's normalizer, pre-tokenizer, decoder, and post-processor [CLS] a [SEP] b [SEP]."""
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([special_token(name) for name in roles.values()])
    cls, sep = roles["cls"], roles["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in (cls, sep)],
    )


def wordpiece(vocabulary: str, config: dict[str, Any]) -> Built:
    """BERT's vocab.txt: one piece per line, its id the line's number."""
    pieces = vocabulary.removesuffix("\n").split("\n")
    vocab = {piece.rstrip(): index for index, piece in enumerate(pieces)}
    roles = bert_special_tokens(config)
    if roles["unk"] not in vocab:
        raise ValueError(f"vocab.txt lacks the token {roles['unk']}")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=roles["unk"]))
    configure_bert(backend, roles, config)
    return backend, roles


def byt5(extra: int = 0) -> Built:
    """ByT5 (Xue et al. 2022): <pad>, </s>, <unk>, then the 256 bytes (id = byte + 3), then `extra` sentinels."""
    names = ["<pad>", "</s>", "<unk>"]
    vocab = {piece: index for index, piece in enumerate([*names, *CHAR_OF_BYTE])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([special_token(name) for name in names])
    backend.add_special_tokens([special_token(f"<extra_id_{index}>") for index in range(extra)])
    wrap_with_special_tokens(backend, None, "</s>")
    return backend, {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


def marian(vocab: dict[str, int], model: sentencepiece.SentencePieceModel) -> tuple[tokenizers.Tokenizer, int]:
    """Marian: a SentencePiece model cuts the text, vocab.json (shared by both languages) numbers the pieces.

    Pieces of the other language keep their ids under a name that no text contains; pieces of this language without an
    id are appended. The second result is the first appended id: they all mean <unk>.
    """
    if model.kind != sentencepiece.UNIGRAM:
        raise ValueError("Marian's .spm files must be unigram models")
    if not isinstance(vocab, dict) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("Marian's vocab.json must number its pieces 0, 1, 2 ...")
    scores = {p.text: p.score for p in model.pieces if p.kind == sentencepiece.NORMAL}
    lowest = min(scores.values(), default=0.0)
    kept = {"</s>", "<unk>", "<pad>"}
    if not kept <= vocab.keys():
        raise ValueError("Marian's vocab.json must contain </s>, <unk> and <pad>")
    codes = [piece for piece in vocab if piece.startswith(">>") and piece.endswith("<<")]
    kept.update(codes)
    pieces = []
    for text, _ in sorted(vocab.items(), key=lambda entry: entry[1]):
        kind = sentencepiece.NORMAL if text in scores or text in kept else sentencepiece.UNUSED
        name = text if kind == sentencepiece.NORMAL else sentencepiece.FOREIGN + text
        pieces.append(sentencepiece.Piece(name, scores.get(text, lowest), kind))
    pieces += [sentencepiece.Piece(text, score) for text, score in scores.items() if text not in vocab]
    shared = sentencepiece.SentencePieceModel(
        pieces=pieces,
        unk_id=vocab["<unk>"],
        charsmap=model.charsmap,
        add_dummy_prefix=model.add_dummy_prefix,
        remove_extra_whitespaces=model.remove_extra_whitespaces,
    )
    backend = sentencepiece.to_backend(shared)
    if model.charsmap:
        # SentencePiece composes accents wherever they stand, the library only in short clusters; Marian's reference
        # is SentencePiece itself
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), backend.normalizer])
    backend.decoder = decoders.Sequence([decoders.Replace(sentencepiece.FOREIGN, ""), backend.decoder])
    backend.add_special_tokens([special_token(name) for name in ("</s>", "<unk>", "<pad>")])
    backend.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    wrap_with_special_tokens(backend, None, "</s>")
    return backend, len(vocab)
