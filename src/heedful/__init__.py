"""heedful: the whole Transformer family in one package.

    import heedful
    model = heedful.load("folder, file.gguf, or org/name")
    model = heedful.create("gpt2")

Nothing heavy is imported until it is used: `import heedful` costs milliseconds. Import it before PyTorch, which then
shares the cores fairly with other programs (heedful/openmp.py).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from heedful import openmp  # noqa: F401  sets how threads wait, before anything imports PyTorch

if TYPE_CHECKING:
    from heedful.loaded import Loaded, load, save
    from heedful.models.registry import create
    from heedful.text.tokenizer import Tokenizer
    from heedful.weights.pull import pull

if sys.platform == "darwin":  # read when PyTorch is imported: operators that Apple's GPUs lack run on the CPU
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

__version__ = "0.1.0"

__all__ = ["Loaded", "Tokenizer", "__version__", "create", "load", "pull", "save"]

_WHERE = {
    "Loaded": "heedful.loaded",
    "load": "heedful.loaded",
    "create": "heedful.models.registry",
    "pull": "heedful.weights.pull",
    "save": "heedful.loaded",
    "Tokenizer": "heedful.text.tokenizer",
}


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"heedful has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
