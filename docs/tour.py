"""A strip of pictures of what people do first on the page, light, dark and narrow: `python docs/tour.py`.

Start, a card's guide, a chat, a pass that is played, a model trained on a text and tried. It needs what
docs/screenshots.py needs, and `heedful pull smollm2-135m-instruct` for the chat.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from screenshots import LOOKS, SWITCHES, serving, suggest, wait

PATIENCE = 300_000  # milliseconds until there is a checkpoint
COLUMNS = {"light": 3, "dark": 3, "narrow": 8}
SHOWN = {"light": 440, "dark": 440, "narrow": 240}  # the width of a picture in the strip


def start(page: Page) -> Iterator[str]:
    yield "Start"
    page.get_by_role("link", name="Change one word").click()
    wait(page)
    page.get_by_role("button", name="wine", exact=True).first.click()
    page.get_by_role("region", name="Guide").get_by_text("In the text, change").wait_for()
    wait(page)
    yield "A guide goes on when its step is done"


def chat(page: Page) -> Iterator[str]:
    page.get_by_role("button", name="What is attention").click()
    page.get_by_role("button", name="Retry").wait_for()
    yield "A chat with SmolLM2"


def play(page: Page) -> Iterator[str]:
    page.get_by_role("button", name="Play").click()
    for part in ("attention", "layer by layer"):
        page.wait_for_timeout(6000)
        yield f"A pass is played: {part}"
    page.wait_for_function("() => document.querySelector('main textarea').value.length > 38")
    wait(page)
    yield "Its token drops into the text"


def train(page: Page) -> Iterator[str]:
    """Begun by the first look alone; the others show how far it is."""
    if page.get_by_role("button", name="Train on a sample").is_visible():
        page.get_by_role("button", name="Train on a sample").click()
        page.get_by_text("step").filter(has_text=" of ").first.wait_for()
        page.wait_for_timeout(5000)
        yield "A model is trained on a text"
    page.get_by_role("link", name="Write with it").first.wait_for(timeout=PATIENCE)
    page.get_by_role("img", name="Loss").wait_for()
    yield "Its first checkpoint can be tried while it goes on"
    page.get_by_role("link", name="Write with it").first.click()
    page.locator("#panel-write h1").wait_for()
    page.get_by_label("Text", exact=True).fill("The king")
    suggest(page)
    yield "It writes"


SCENES = {
    "start": start,
    "chat?model=smollm2-135m-instruct&length=90&seed=5&tint=true": chat,
    "steps?model=tiny-books&text=The%20old%20man%20opened%20the%20door%20and%20looked": play,
    "runs": train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
        for style, settings in LOOKS.items():
            pictures = [taken for hash_, act in SCENES.items() for taken in frames(browser, settings, url, hash_, act)]
            path = options.out / f"tour-{style}.png"
            strip(browser, pictures, style, path)
            print(path)
        browser.close()


def frames(browser: Any, settings: dict[str, Any], url: str, hash_: str, act: Any) -> Iterator[tuple[str, bytes]]:
    """What a scene shows, one picture after the other, with what is said of each."""
    page = browser.new_context(**settings).new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{url}/#/{hash_}")
    wait(page)
    for said in act(page):
        yield said, page.screenshot()
    page.context.close()


def strip(browser: Any, pictures: list[tuple[str, bytes]], style: str, path: Path) -> None:
    """All pictures in one, in rows, each with its words."""
    columns, width = COLUMNS[style], SHOWN[style]
    sources = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for _, png in pictures]
    shown = "".join(
        f'<figure><img src="{source}"><figcaption>{said}</figcaption></figure>'
        for source, (said, _) in zip(sources, pictures, strict=True)
    )
    page = browser.new_page(viewport={"width": columns * (width + 16) + 16, "height": 100})
    page.set_content(
        f"<style>body {{ display: grid; grid-template-columns: repeat({columns}, {width}px); gap: 16px; margin: 16px;"
        "font: 14px sans-serif; background: #ccc } figure { margin: 0 } img { width: 100%; display: block }"
        f"figcaption {{ padding: 4px }}</style>{shown}"
    )
    page.screenshot(path=path, full_page=True)
    page.close()


if __name__ == "__main__":
    main()
