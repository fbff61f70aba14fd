"""The animation of the README, docs/images/playground.webp: `make screenshots`, or `python docs/animation.py`.

Start, attention word by word, one forward pass step by step, a question answered.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from screenshots import KING, SWITCHES, serving, wait

SIZE = {"width": 1100, "height": 900}
SHOWN = (880, 720)  # pixels
Frame = tuple[bytes, int]  # a picture, and for how many milliseconds it is shown


def frames(page: Page, url: str) -> Iterator[Frame]:
    page.goto(url)
    wait(page)
    yield page.screenshot(), 1600
    for token in range(2, 12):
        page.goto(f"{url}/#/attention?model=books&token={token}&text={quote(KING)}")
        wait(page)
        yield page.screenshot(), 1000 if token == 2 else 450
    page.goto(f"{url}/#/steps?model=tiny-books")
    wait(page)
    page.get_by_role("button", name="Play").click()
    for _ in range(18):  # it plays for twenty seconds
        yield page.screenshot(), 250
        page.wait_for_timeout(1000)
    page.goto(f"{url}/#/chat?model=chat&length=60&seed=5")
    wait(page)
    message = page.get_by_placeholder("Say something")
    message.fill("Tell me a story about a fox and a clock.")
    yield page.screenshot(), 900
    message.press("Enter")
    seen = ""
    while not page.get_by_role("button", name="Retry").is_visible():
        if (text := page.get_by_role("log").inner_text()) != seen:
            yield page.screenshot(), 150
        seen = text
    yield page.screenshot(), 2500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "playground.webp")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
        taken = list(frames(browser.new_page(viewport=SIZE, color_scheme="light"), url))
        browser.close()
    pictures = [
        Image.open(io.BytesIO(picture)).convert("RGB").resize(SHOWN, Image.Resampling.LANCZOS) for picture, _ in taken
    ]
    first, *rest = pictures
    first.save(
        options.out,
        save_all=True,
        append_images=rest,
        duration=[time for _, time in taken],
        loop=0,
        quality=60,
        method=6,
    )
    print(options.out, f"{options.out.stat().st_size:,} bytes, {len(taken)} pictures")


if __name__ == "__main__":
    main()
