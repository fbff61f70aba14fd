"""Pictures of every tab, light, dark and narrow, into docs/images: `make screenshots`.

A real server, a real browser (chromium), all that ships. `python docs/screenshots.py attention --out /tmp/pictures`
makes those of one tab.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
BUSY = ".notice.loading, [aria-busy=true]"


def nothing(page: Page) -> None:
    """Most tabs show something at once."""


# What each tab shows: the end of its address, and what to do there before the picture is taken.
SCENES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "write": ("model=shakespeare", nothing),
    "complete": ("model=shakespeare", nothing),
    "fill": ("model=bert-books", nothing),
    "attention": ("model=shakespeare", nothing),
    "steps": ("model=tiny", nothing),
    "tasks": ("model=translator", nothing),
    "images": ("model=digits-vit", nothing),
    "runs": ("", nothing),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tabs", nargs="*", help=f"which of {', '.join(SCENES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    if unknown := set(options.tabs) - set(SCENES):
        parser.error(f"there is no tab {', '.join(sorted(unknown))}: {', '.join(SCENES)} are")
    options.out.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
        for tab in options.tabs or SCENES:
            for look, settings in LOOKS.items():
                path = options.out / f"{tab}-{look}.png"
                page = browser.new_context(**settings, reduced_motion="reduce").new_page()
                take(page, url, tab, path)
                page.context.close()
                print(path)
        browser.close()


def take(page: Page, url: str, tab: str, path: Path) -> None:
    query, act = SCENES[tab]
    page.goto(f"{url}/#/{tab}?{query}")
    wait(page)
    act(page)
    wait(page)
    page.screenshot(path=path)


def wait(page: Page) -> None:
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_function("busy => !document.querySelector(busy)", arg=BUSY)


@contextmanager
def serving() -> Iterator[str]:
    """All that ships, on a free port."""
    command = [sys.executable, "-m", "heedful.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://[\w.\[\]:]+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        try:
            yield found[0]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
