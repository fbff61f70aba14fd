"""The `heedful` operators of torch.library: C kernels with schemas and fake implementations, for tracing.

Dispatching through PyTorch takes longer than the ctypes call itself (6 µs more for `packed_linear`, 50 µs more for a
training block with its thirty arguments). So the functions call the library directly, and the operators only under
tracing (`is_traced`): a dispatch mode, a fake tensor, a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("heedful", "DEF")


def register(schema: str, cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the operator heedful::NAME with its CPU implementation and its fake implementation (output shapes)."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"heedful::{name}", fake, lib=_LIBRARY)


def is_traced(x: Tensor) -> bool:
    """Whether operators on x are traced: by a tensor subclass, a dispatch mode or a compiler."""
    return type(x) is not Tensor or torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()
