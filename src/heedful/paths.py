"""Folders of the user's that heedful writes to without being asked."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: ~/.cache/heedful, or under XDG_CACHE_HOME. A user without a home folder, as
    in some containers, has a temporary one, which is removed when the process ends."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "heedful"
    try:
        return Path.home() / ".cache" / "heedful"
    except RuntimeError:  # no HOME, and no entry for the user id
        return Path(_temporary_cache().name)


def user_folder() -> Path:
    """Where what the user has done is kept, such as progress in lessons: ~/.local/share/heedful, or under
    XDG_DATA_HOME. Without a home folder it is a temporary one, as of the cache."""
    if given := os.environ.get("XDG_DATA_HOME"):
        return Path(given) / "heedful"
    try:
        return Path.home() / ".local" / "share" / "heedful"
    except RuntimeError:
        return Path(_temporary_cache().name)


@cache
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="heedful-", ignore_cleanup_errors=True)


def data_cache_folder() -> Path:
    """Where what was made of training data is kept, tokenizers and tokenized text: in what HEEDFUL_DATA_CACHE names, or
    in the cache folder."""
    given = os.environ.get("HEEDFUL_DATA_CACHE")
    return Path(given).expanduser() if given else cache_folder()


def models_folder() -> Path:
    """Where pulled models are: what HEEDFUL_MODELS names, or "models" in the cache folder."""
    given = os.environ.get("HEEDFUL_MODELS")
    return Path(given).expanduser() if given else cache_folder() / "models"
