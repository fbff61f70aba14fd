"""What tests read from the page."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs


def table(page: Any) -> list[dict[str, str]]:
    """The numbers that the page saves."""
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as found:
        page.get_by_role("menuitem", name="Numbers (CSV)").click()
    with open(found.value.path(), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def address(page: Any) -> str:
    """As it is when somebody leaves the window to copy it."""
    return page.evaluate("() => (dispatchEvent(new Event('blur')), location.href)")


def in_address(page: Any, name: str) -> str | None:
    found = parse_qs(address(page).partition("?")[2]).get(name)
    return found[0] if found else None


def n_lines(page: Any) -> int:
    return int(page.locator("canvas[data-lines]").get_attribute("data-lines"))


def settled(page: Any) -> None:
    page.wait_for_function("() => !document.querySelector('.notice.loading, [aria-busy=true]')")


def until(page: Any, ready: Callable[[], bool]) -> None:
    for _ in range(200):
        if ready():
            return
        page.wait_for_timeout(25)
    raise AssertionError("it did not come to that")
