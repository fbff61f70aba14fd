"""From the command to a page that can be used: `heedful serve`, and Start's six cards in a real browser.

    python benchmarks/page_start.py [--rounds 3] [--port 8491]

Prints the seconds until the server says that it serves, until the six cards are shown, and until all their miniatures
are computed, for each round and as medians. Needs chromium and playwright, and a page that is built (make page).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time

from playwright.sync_api import Browser, sync_playwright

BUSY = ".notice.loading, [aria-busy=true]"


def measure(browser: Browser, port: int) -> tuple[float, float, float]:
    """Seconds to the server, the cards, and their miniatures."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "heedful", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        up = time.perf_counter() - begin
        page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator(".cards > li").nth(5).wait_for()
        cards = time.perf_counter() - begin
        page.wait_for_function("busy => !document.querySelector(busy)", arg=BUSY)
        computed = time.perf_counter() - begin
        page.context.close()
        server.terminate()
    return up, cards, computed


def main() -> None:
    """Measure some rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8491)
    options = parser.parse_args()
    program = shutil.which("chromium")
    assert program is not None, "there is no chromium on this machine"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        rounds = [measure(browser, options.port) for _ in range(options.rounds)]
        browser.close()
    for times in [*rounds, tuple(map(statistics.median, zip(*rounds, strict=True)))]:
        print("server {:.2f} s, cards {:.2f} s, miniatures {:.2f} s".format(*times))
    print("the last line is the median")


if __name__ == "__main__":
    main()
