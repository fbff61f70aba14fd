"""JSON and TOML from outside, parsed so that nesting too deep for the parser is an error of the text like any other."""

from __future__ import annotations

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """`json.loads`; JSONDecodeError, a ValueError, for what is nested too deeply too."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads`; TOMLDecodeError, a ValueError, for what is nested too deeply too."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None
