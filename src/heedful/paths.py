"""Folders of the user's that heedful writes to without being asked."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: ~/.cache/heedful, or under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heedful"
