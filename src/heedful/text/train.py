"""Training tokenizers on text.

Each function takes texts (any iterable, read once) and returns a `Tokenizer`. The subword algorithms are those of the
`tokenizers` library; `heedful.text.bpe_trace` shows BPE step by step.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from heedful.text import backends
from heedful.text.sentencepiece import SPACE
from heedful.text.tokenizer import Tokenizer


def _texts(texts: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str | bytes):
        raise ValueError("expected several texts; for a single one pass [text]")
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"expected texts, got {type(text).__name__}")
        yield text


# The library's trainers take time quadratic in the length of a word: 2 MB without a space would take hours.
_LONGEST_WORD = re.compile(r"\S{128}|\s{128}")


def _cut_words(text: str) -> Iterator[str]:
    """The text in pieces that end where a run of characters without a space, or of spaces, grows too long."""
    begin = 0
    for match in _LONGEST_WORD.finditer(text):
        yield text[begin : match.end()]
        begin = match.end()
    yield text[begin:]


def _train(backend: tokenizers.Tokenizer, texts: Iterable[str], trainer: trainers.Trainer) -> None:
    failure: list[BaseException] = []

    def guarded() -> Iterator[str]:
        try:
            for text in _texts(texts):
                yield from _cut_words(text)
        except BaseException as error:  # the library would report it as its own
            failure.append(error)
            raise

    try:
        backend.train_from_iterator(guarded(), trainer)
    except Exception as error:
        if failure:
            raise failure[0] from None
        raise ValueError(f"could not train a tokenizer on these texts: {error}") from None


def _check_size(vocab_size: int, least: int, why: str) -> None:
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} ({why}), got {vocab_size}")


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special: Sequence[str] = ("<|endoftext|>",),
    min_frequency: int = 2,
    pattern: str = "gpt2",
    progress: bool = False,
) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; GPT-2): every text can be written, and comes back as it was.

    `pattern` cuts words: "gpt2", "llama3", "qwen2" or "tekken". Special tokens come last, as in GPT-2. The result is
    smaller than `vocab_size` where the texts have fewer pairs that occur `min_frequency` times.
    """
    _check_size(vocab_size, 256 + len(special), "256 bytes and the special tokens")
    if pattern not in backends.PATTERNS:
        raise ValueError(f"unknown pattern {pattern!r}; choose one of {', '.join(backends.PATTERNS)}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = backends.byte_level_pre_tokenizer(backends.PATTERNS[pattern])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        min_frequency=min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    _train(backend, texts, trainer)
    backend.add_special_tokens([backends.special_token(name) for name in special])
    return Tokenizer(backend)


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special: Sequence[str] = (),
    lower_case: bool = True,
    min_frequency: int = 2,
    progress: bool = False,
) -> Tokenizer:
    """WordPiece as in BERT (Devlin et al. 2019): [PAD] [UNK] [CLS] [SEP] [MASK], then `special`, then pieces."""
    roles = backends.bert_special_tokens({})
    names = [roles[role] for role in ("pad", "unk", "cls", "sep", "mask")] + list(special)
    _check_size(vocab_size, len(names) + 1, "the special tokens and one piece")
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token=roles["unk"]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=names, show_progress=progress
    )
    _train(backend, texts, trainer)
    backends.configure_bert(backend, roles, {"do_lower_case": lower_case})
    return Tokenizer(backend, roles=roles)


def train_unigram(
    texts: Iterable[str], vocab_size: int, *, special: Sequence[str] = (), progress: bool = False
) -> Tokenizer:
    """Unigram (Kudo 2018) as in T5: <pad> </s> <unk>, then `special`, then pieces; spaces written "▁".

    Text without spaces takes long: half a megabyte of base64, 17 s of one core in words of 128 characters, as it is cut
    here, and 13 s in words of 16. Train on a part of such a text.
    """
    names = ["<pad>", "</s>", "<unk>", *special]
    _check_size(vocab_size, len(names) + 1, "the special tokens and one piece")
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    space = {"replacement": SPACE, "prepend_scheme": "always"}
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]  # type: ignore[arg-type]
    )
    backend.decoder = decoders.Metaspace(**space)  # type: ignore[arg-type]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=names, unk_token="<unk>", show_progress=progress
    )
    _train(backend, texts, trainer)
    backend = _with_short_scores(backend)
    backends.wrap_with_special_tokens(backend, None, "</s>")
    return Tokenizer(backend, roles={"pad": "<pad>", "eos": "</s>", "unk": "<unk>"})


def _with_short_scores(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Scores rounded to six decimals: the library does not read back every bit of longer ones, and a saved tokenizer
    must be loaded unchanged."""
    content = json.loads(backend.to_str())
    content["model"]["vocab"] = [[piece, round(score, 6)] for piece, score in content["model"]["vocab"]]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


_PLAIN = ("<pad>", "<s>", "</s>", "<unk>")


def _plain_roles(special: Sequence[str]) -> dict[str, str]:
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    if "<unk>" not in special:
        raise ValueError('special must contain "<unk>", for what the vocabulary does not have')
    return {role: name for role, name in names.items() if name in special}


def words(
    texts: Iterable[str],
    vocab_size: int | None = None,
    *,
    special: Sequence[str] = _PLAIN,
    lower_case: bool = False,
    min_frequency: int = 1,
) -> Tokenizer:
    """Whole words and punctuation marks, the most frequent `vocab_size` of them; decoding puts spaces between."""
    roles = _plain_roles(special)
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    if lower_case:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    counts: Counter[str] = Counter()
    for text in _texts(texts):
        text = backend.normalizer.normalize_str(text) if lower_case else text
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return _finish_table(backend, counts, special, roles, vocab_size, min_frequency)


def symbols(n: int) -> Tokenizer:
    """The numbers 1 to n as symbols, separated by spaces or commas: <s> 0, then n symbols, </s> and <unk>."""
    vocab = {name: i for i, name in enumerate(["<s>", *map(str, range(1, n + 1)), "</s>", "<unk>"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s,]+"), "removed")
    roles = _plain_roles(("<s>", "</s>", "<unk>"))
    backend.add_special_tokens([backends.special_token(name) for name in roles.values()])
    return Tokenizer(backend, roles=roles)


def characters(
    texts: Iterable[str],
    vocab_size: int | None = None,
    *,
    special: Sequence[str] = _PLAIN,
    min_frequency: int = 1,
) -> Tokenizer:
    """Single characters (Unicode code points), spaces and line ends included: no text but <unk> is lost."""
    roles = _plain_roles(special)
    counts: Counter[str] = Counter()
    for text in _texts(texts):
        counts.update(text)
    # BPE without merges: one token per character, and the library walks the text once
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return _finish_table(backend, counts, special, roles, vocab_size, min_frequency)


def _finish_table(
    backend: tokenizers.Tokenizer,
    counts: Counter[str],
    special: Sequence[str],
    roles: dict[str, str],
    vocab_size: int | None,
    min_frequency: int,
) -> Tokenizer:
    """Number the special tokens, then entries by falling frequency, ties in the order of the alphabet."""
    if vocab_size is not None:
        _check_size(vocab_size, len(special) + 1, "the special tokens and one entry")
    entries = [entry for entry, count in counts.items() if count >= min_frequency and entry not in special]
    entries.sort(key=lambda entry: (-counts[entry], entry))
    room = None if vocab_size is None else vocab_size - len(special)
    vocab = {entry: index for index, entry in enumerate([*special, *entries[:room]])}
    if isinstance(backend.model, models.BPE):
        backend.model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>")
    else:
        backend.model = models.WordLevel(vocab, unk_token="<unk>")
    backend.add_special_tokens([backends.special_token(name) for name in special])
    return Tokenizer(backend, roles=roles)


def byte_tokens(extra: int = 0) -> Tokenizer:
    """The bytes themselves, as in ByT5 (Xue et al. 2022): <pad> 0, </s> 1, <unk> 2, then byte + 3. Nothing to train."""
    backend, roles = backends.byt5(extra)
    return Tokenizer(backend, roles=roles)
