"""The `heedful` operators of torch.library: C kernels with schemas and shape functions, for tracing and estimating.

A call through PyTorch's dispatcher into Python takes longer than the ctypes call itself (6 µs
more for `packed_linear`, 50 µs more for a training block with its thirty arguments). So the functions call the library
directly, and the operators only when someone traces (`is_traced`): a dispatch mode, a fake tensor, a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("heedful", "DEF")


def register(schema: str, cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define heedful::NAME: its implementation on a CPU, and what shapes it returns."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"heedful::{name}", fake, lib=_LIBRARY)


def is_traced(x: Tensor) -> bool:
    """Whether operators on x are seen by someone."""
    return type(x) is not Tensor or torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()
