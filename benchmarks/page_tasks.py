"""The longest tasks of the page's main thread with a long text, as a browser traces them.

    heedful serve --port 8000 &
    python benchmarks/page_tasks.py http://127.0.0.1:8000

A text of 505 tokens is opened in Step by step (the pass played for ten seconds, the temperature moved, tiles pointed
at) and in Attention (another layer, a token pointed at). Printed for each: tasks over 50 ms and the longest, by the
time of the thread itself, which other programs lengthen little, and by the clock. Needs chromium and playwright.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from playwright.sync_api import Browser, Page, sync_playwright

TEXT = "The old house stood at the end of the lane, and nobody had lived in it for many years. " * 24
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
LONG = 50.0  # milliseconds: what a browser calls a long task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where `heedful serve` runs")
    parser.add_argument("--model", default="books")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    scenes: dict[str, Callable[[Page], None]] = {"steps": play, "attention": look}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
        for tab, act in scenes.items():
            measure(browser, f"{options.url}/#/{tab}?model={options.model}&text={quote(TEXT)}", tab, act)
        browser.close()


def measure(browser: Browser, address: str, tab: str, act: Callable[[Page], None]) -> None:
    """Open an address, wait until it is drawn, do something there, and print the longest tasks."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        browser.start_tracing(page=page, path=trace, categories=["toplevel", "devtools.timeline", "__metadata"])
        page.goto(address)
        page.get_by_role("heading", level=1).first.wait_for()
        page.wait_for_function("() => !document.querySelector('.notice.loading, [aria-busy=true]')")
        page.wait_for_timeout(2000)
        act(page)
        browser.stop_tracing()
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    page.close()
    main_threads = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"].get("name") == "CrRendererMain"
    }
    tasks = [
        (e.get("tdur", 0) / 1000, e.get("dur", 0) / 1000)
        for e in events
        if e["name"].endswith("RunTask") and (e["pid"], e["tid"]) in main_threads
    ]
    for what, times in (("thread time", [t for t, _ in tasks]), ("clock", [t for _, t in tasks])):
        print(f"{tab:10} {what:12} longest {max(times):6.1f} ms, over {LONG:.0f} ms: {sum(t > LONG for t in times)}")


def play(page: Page) -> None:
    page.get_by_label("Temperature", exact=True).focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_timeout(10_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.mouse.move(300, 560)
    page.mouse.move(700, 700, steps=20)
    page.wait_for_timeout(500)


def look(page: Page) -> None:
    page.get_by_role("radio", name="3", exact=True).click()
    page.wait_for_timeout(2000)
    page.mouse.move(150, 700)
    page.mouse.move(160, 780, steps=10)
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
