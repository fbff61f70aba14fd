"""Pictures of every tab, light, dark and narrow, into docs/images: `make screenshots`.

A real server, a real browser (chromium), all that ships, and for the tab of runs two short trainings on the words of
this repository. `python docs/screenshots.py attention --out /tmp/pictures` makes those of one tab.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
BUSY = ".notice.loading, [aria-busy=true]"
KING = "When the king heard the news, he called his servants and sent them to the castle."
RUNS: dict[str, dict[str, Any]] = {"muon": {}, "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.003}}


def nothing(page: Page) -> None:
    """Most tabs show something at once."""


def suggest(page: Page) -> None:
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.press("Control+End")
    page.keyboard.press("Tab")
    page.locator("[aria-label=Continuations][aria-busy=false]").wait_for()


def go_on(page: Page) -> None:
    """Three answers, and what else a token might have been."""
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Continue").wait_for()
    page.locator("[role=option]").nth(17).hover()  # not those of the menu of models


def talk(page: Page) -> None:
    """A question, answered; its tokens tinted."""
    page.get_by_role("button", name="What is attention").click()
    page.get_by_role("button", name="Retry").wait_for()


def compare(page: Page) -> None:
    page.get_by_role("img", name="Loss").wait_for()


def study(page: Page) -> None:
    """A lesson whose cells have run, with its live view where there is room for one."""
    page.wait_for_function("() => !document.querySelector('.running')", timeout=300_000)
    for view in page.frames[1:]:
        view.get_by_role("heading", level=1).wait_for()
        view.wait_for_function("busy => !document.querySelector(busy)", arg=BUSY)


# What each tab shows: the end of its address, and what to do there before the picture is taken.
SCENES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "start": ("", nothing),
    "learn": ("lesson=attention-by-hand&part=5", study),
    "write": ("model=books&length=15&seconds=5", suggest),
    "complete": ("model=books&length=30&n=3&seed=3&probabilities=true", go_on),
    "chat": ("model=smollm2-135m-instruct&length=90&seed=5&tint=true", talk),  # make real
    "fill": ("model=bert-books", nothing),
    "attention": (f"model=books&token=7&text={quote(KING)}", nothing),
    "steps": ("model=tiny-books&step=weights", nothing),
    "tasks": ("model=translator", nothing),
    "images": ("model=digits-vit", nothing),
    "runs": ("run=muon&beside=adamw", compare),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tabs", nargs="*", help=f"which of {', '.join(SCENES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    if unknown := set(options.tabs) - set(SCENES):
        parser.error(f"there is no tab {', '.join(sorted(unknown))}: {', '.join(SCENES)} are")
    options.out.mkdir(parents=True, exist_ok=True)
    tabs = options.tabs or list(SCENES)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder:
        if "runs" in tabs:
            train(Path(folder))
        with serving(Path(folder)) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
            for tab in tabs:
                for style, settings in LOOKS.items():
                    path = options.out / f"{tab}-{style}.png"
                    page = browser.new_context(**settings, reduced_motion="reduce").new_page()
                    take(page, url, tab, path)
                    page.context.close()
                    print(path)
            browser.close()


def train(folder: Path) -> None:
    """Two short runs of the recipe `tiny`, seconds each, with two optimizers."""
    words = folder / "words.txt"
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))]
    words.write_text("\n\f\n".join(texts), encoding="utf-8")
    usual = {
        "data.source": words, "train.steps": 200, "train.batch_size": 32, "train.eval_every": 20,
        "log.sample_tokens": 120,
    }  # fmt: skip
    for name, changes in RUNS.items():
        settings = [f"--set={key}={value}" for key, value in (usual | changes).items()]
        command = [sys.executable, "-m", "heedful", "train", "tiny", "--quiet", "--out", str(folder / name)]
        # On matrices this small several threads only wait for each other.
        subprocess.run([*command, *settings], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


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
def serving(runs: Path) -> Iterator[str]:
    """All that ships, on a free port, and the runs of a folder."""
    command = [sys.executable, "-m", "heedful", "serve", "--port", "0", "--runs", str(runs)]
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
