"""`heedful serve --open`: the browser is shown the page, where there is one with a window."""

from __future__ import annotations

import threading
import webbrowser

import pytest

from heedful.serve import server
from heedful.serve.options import Options


@pytest.fixture
def opened(monkeypatch):
    """What the browser was asked to show."""
    found = []
    monkeypatch.setattr(webbrowser, "open", lambda url: found.append(url))
    monkeypatch.setattr(server.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return found


def show(address):
    server.open_page(server.page_address(Options(host=address[0], token="of-sixteen-or-more", page="#/learn"), address))
    for thread in threading.enumerate():
        if thread.name == "browser":
            thread.join(10)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/?token=of-sixteen-or-more#/learn"),
        ("0.0.0.0", "http://127.0.0.1:8000/#/learn"),  # nobody is there
        ("::", "http://[::1]:8000/#/learn"),
        ("192.168.0.7", "http://192.168.0.7:8000/#/learn"),
    ],
)
def test_the_page_is_opened_where_it_can_be_reached(opened, monkeypatch, host, shown):
    monkeypatch.setenv("DISPLAY", ":0")
    show((host, 8000))
    assert opened == [shown]


def test_no_browser_takes_the_terminal_over(opened):
    show(("127.0.0.1", 8000))
    assert opened == []
