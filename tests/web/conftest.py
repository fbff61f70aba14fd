"""A real browser on the real page of a real server. Errors on the console, violations of the page's own policy and
requests to anywhere else fail a test, whatever it is about."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import heedful
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.weights.resolve import shipped_models
from support.serving import Server, saved

PAGE = Path(heedful.__file__).parent / "serve" / "page" / "index.html"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SWITCHES = [
    "--no-sandbox",  # of no use to root, whom CI often is
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the network is off
]
BUSY = ".notice.loading, [aria-busy=true]"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All that ships, and a small chat model, served by a process of its own."""
    if not PAGE.is_file():
        pytest.skip("the playground's page is not built: make page")
    with Server(*shipped_names(), saved(tmp_path_factory.mktemp("models") / "small")) as started:
        yield started


def shipped_names() -> list[str]:
    """The models that ship, in the order of a server that serves them all."""
    return [name for name in ModelManager((), Options(), Metrics()).names if name in shipped_models()]


@pytest.fixture(scope="package")  # not longer: while it runs, nobody else in this process can use asyncio
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=SWITCHES)
        yield launched
        launched.close()


@pytest.fixture
def problems() -> list[str]:
    """What went wrong on the page; a test that provokes errors looks at them and clears the list."""
    return []


@pytest.fixture
def visit(browser: Any, server: Server, problems: list[str]) -> Iterator[Callable[..., Any]]:
    """Makes pages, each of a browser that knows nothing yet; with Playwright's options, such as color_scheme."""
    contexts = []

    def new(**options: Any) -> Any:
        usual = {
            "viewport": {"width": 1280, "height": 800},
            "reduced_motion": "reduce",
            "color_scheme": "light",
        }
        context = browser.new_context(**usual | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        # As the address that the server printed does it; tests open many others.
        keep = f"localStorage.setItem('heedful-token', {server.token!r})"
        page.add_init_script(f"if (location.origin === {server.url!r}) {keep}" if server.token else "")
        page.on("console", lambda said: said.type in ("error", "warning") and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: problems.extend(elsewhere(asked.url, server.url)))
        return page

    yield new
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    """A page of 1280 x 800 in light colours, not yet anywhere."""
    return visit()


@pytest.fixture
def open_tab(page: Any, server: Server) -> Callable[..., Any]:
    """open_tab("attention", model="tiny", text="To be", layer=1): goes there and waits until all is drawn."""

    def go(tab: str = "", *, on: Any = page, **params: Any) -> Any:
        on.goto(address(server.url, tab, **params))
        if tab:
            on.locator(f"#panel-{tab} h1").wait_for()  # not that of the tab before
        return settled(on)

    return go


def address(url: str, tab: str, **params: Any) -> str:
    query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in params.items())
    return f"{url}/#/{tab}{'?' + query if query else ''}"


def settled(page: Any) -> Any:
    """The page, once its tab is there and nothing on it is under way."""
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_function("busy => !document.querySelector(busy)", arg=BUSY)
    return page


def elsewhere(asked: str, url: str) -> list[str]:
    own = asked.startswith((url + "/", "data:", "blob:"))
    return [] if own else [f"the page asked for {asked}"]
