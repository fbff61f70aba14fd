"""The links of the built documentation: `python docs/check_links.py FOLDER`, the last step of `make docs`.

Every link inside the site must lead to a file and, if it names one, to an element there. Nothing that a page needs may
come from another host, and scripts and styles may not stand inside a page, where `heedful serve` forbids them. Links to
other hosts are listed with --list, not followed: the check needs no network.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NEEDED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}  # what a page loads
INLINE = {"style", "onclick", "onload", "onerror", "onsubmit", "onchange"}


class Page(HTMLParser):
    """The targets of a page's links, what it loads, its elements' ids, and the scripts and styles inside it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.needs: list[str] = []
        self.ids: set[str] = set()
        self.inline: list[str] = []
        self.unshown = "&lt;Figure size" in text  # a picture's name in its place
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attributes if value}
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        if tag == "style" or (tag == "script" and "src" not in given) or any(key in INLINE for key in given):
            self.inline.append(self.get_starttag_text() or tag)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in NEEDED and NEEDED[tag] in given:
            self.needs.append(given[NEEDED[tag]])


@cache
def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def problems(folder: Path) -> tuple[list[str], dict[str, set[str]]]:
    """What is wrong with the links of a folder of pages, and the addresses of other hosts with their pages."""
    wrong: list[str] = []
    elsewhere: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        wrong += [f"{name} has a figure that is not shown"] * read(path).unshown
        wrong += [f"{name} has inside it {tag[:100]}" for tag in read(path).inline]
        for target in read(path).needs:
            if urlsplit(target).netloc:
                wrong.append(f"{name} loads {target}")
        for target in [*read(path).links, *read(path).needs]:
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                elsewhere[target].add(name)
                continue
            found = (path.parent / unquote(parts.path)) if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file() or not found.resolve().is_relative_to(folder.resolve()):
                wrong.append(f"{name} links to {target}, which is not there")
            elif parts.fragment and found.suffix == ".html" and unquote(parts.fragment) not in read(found).ids:
                wrong.append(f"{name} links to {target}, where nothing is called so")
    return wrong, elsewhere


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="print the addresses of other hosts")
    options = parser.parse_args()
    wrong, elsewhere = problems(options.folder)
    for line in wrong:
        print(line, file=sys.stderr)
    if options.list:
        for target, names in sorted((target, sorted(pages)) for target, pages in elsewhere.items()):
            print(target, "on", *names[:3], "..." if names[3:] else "")
    pages = len(list(options.folder.rglob("*.html")))
    print(f"{pages} pages, {len(wrong)} wrong links, {len(elsewhere)} addresses of other hosts (not followed)")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
