"""Integers of quantized weights between files and parameters: converted as the weight map converts tensors.

A parameter keeps its integers (`keep_integers`) beside the floats that they stand for; kernels and files take them from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from heedful.kernels.quantize import QuantizedWeight


@runtime_checkable
class IntegerSource(Protocol):
    """A `TensorSource` whose matrices may be stored as integers."""

    def integers(self, name: str) -> QuantizedWeight | None:
        """The integers of a matrix as the kernels take them; None if it has none such."""
        ...


def convert_integers(
    convert: Callable[[list[Tensor]], list[Tensor]], given: Sequence[QuantizedWeight | None]
) -> list[QuantizedWeight] | None:
    """Integers converted as their tensors are, by an operation of the weight map on rows; None if one of the tensors
    has none, or another precision than the others."""
    forms = [form for form in given if form is not None]
    if len(forms) != len(given) or len({form.precision for form in forms}) != 1:
        return None
    parts = [convert([form.ints for form in forms]), convert([form.scale for form in forms])]
    if zeros := [form.zero for form in forms if form.zero is not None]:
        parts.append(convert(zeros))
    return [QuantizedWeight(*tensors) for tensors in zip(*parts, strict=True)]
