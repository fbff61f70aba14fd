"""What the tokenizer tests share: a nasty sample, a small corpus, and where the real vocabularies are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from heedful.text import Tokenizer

NASTY = [
    "Hello this is a test",
    "The café naïve Ångström e\u0301 vs é, a\u0300\u0301\u0302\u0303b",
    "日本語のテキスト、中文字符。한국어 문장",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם हिन्दी में ไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 👍🏽 🇩🇪 I ❤️ NY!!!",
    "nul\x00inside \x01\x02\x1f\x7f\x80\x9f",
    "tabs\t\tand\tmore",
    "runs   of    spaces     here",
    "trailing spaces   ",
    "line\r\nline\n\n\nline\r",
    "x" * 500,
    "a" * 60 + " " + "ab" * 40,
    "<|endoftext|>",
    "</s> <s> <unk> <pad> <mask> <bos> <eos>",
    "[CLS] [SEP] [MASK] [UNK] [PAD]",
    "foo<|im_start|>user <start_of_turn> <extra_id_0> <0x0A>",
    "don't we'll I'VE they're 1234567890 3.14 1,000,000",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "\u200b\u200c\u200d\ufeff zero width \u2028\u2029 \x0b vt \x0c ff",
    "ﬁ ligature ½ ² Ⅷ ① ＦＵＬＬＷＩＤＴＨ ｶﾀｶﾅ",
    "İstanbul ıI ß ẞ ǅ",
    "\xa0nbsp\xa0\u3000ideographic",
    "\ue000 private \U0010fffd 𝕳𝖊𝖑𝖑𝖔 𐍈",
    "https://example.com/?q=a%20b&c=d “curly” — dash…",
    "(((([[[[{{{{",
    "",
    "\n",
    "a",
]

# Texts on which SentencePiece and the reference's LLaMA class disagree: it takes one leading space for the prefix.
LEADING = [" ", " a", "   leading", "▁literal▁"]

CORPUS = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "The quick brown fox jumps over the lazy dog; the dog does not mind, and the fox runs on and on.",
    "Hello this is a test of the café naïve Ångström test. These tests are testing the tester's test.",
    "日本語のテキスト、中文字符。한국어 문장 日本語のテキスト",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם",
    "don't we'll they're 1234567890 3.14 1,000,000 and 2,000,000",
    "def f(x):    return x**2  # comment",
    "aaaa aaaaaaaa abababab abab runs  of   spaces    here",
    "< s > / s> </ <s pad> unk> <un <pa CLS ] [ MASK extra_id_ 0>",
] * 4


@pytest.fixture(scope="session")
def nasty() -> list[str]:
    return list(NASTY)


@pytest.fixture(scope="session")
def leading() -> list[str]:
    return list(LEADING)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return list(CORPUS)


@pytest.fixture(scope="session")
def gpt2_folder() -> Path:
    root = Path(__file__).resolve().parents[2]
    for data in (root.parent / "shared" / "data", root / "shared" / "data"):
        if (data / "gpt2-tokenizer" / "vocab.json").is_file():
            return data / "gpt2-tokenizer"
    pytest.skip("GPT-2's vocabulary (shared/data/gpt2-tokenizer) is not beside the repository")


def _same_allowed(mine: Tokenizer, reference, texts: list[str]) -> None:
    """Equal ids with special tokens allowed, and with what the family adds."""
    for text in texts:
        expected = reference(text)["input_ids"]
        assert mine.encode(text, add_special=True, allow_special=True) == expected, text


def _same(mine: Tokenizer, reference, texts: list[str]) -> None:
    """Equal ids: plain, with the tokens the family adds, and with special tokens allowed."""
    for text in texts:
        split = reference(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == split, text
        around = reference(text, split_special_tokens=True)["input_ids"]
        assert mine.encode(text, add_special=True) == around, text
    _same_allowed(mine, reference, texts)


def _write(folder: Path, **files: object) -> None:
    """Files by name ("vocab__json" for vocab.json); what is no text is written as JSON."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture
def same() -> Callable[..., None]:
    return _same


@pytest.fixture
def same_allowed() -> Callable[..., None]:
    return _same_allowed


@pytest.fixture
def write() -> Callable[..., None]:
    return _write
