"""A device that is neither the CPU nor CUDA, for tests: its tensors are computed on the CPU. It refuses what Apple's
GPUs refuse, float64 and operators on tensors of two devices.

It shows which paths are taken, and that they compute what the CPU computes; not that Apple's own operators do.
Registering it changes PyTorch for the whole process, so that it runs in one of its own:

    python -m support.emulated_device     # what on_emulated_device.py checks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "emulated"
aten = torch.ops.aten
MAY_MIX = {aten.copy_.default, aten.index.Tensor, aten.index_put_.default}  # the source, or the indices


class EmulatedTensor(torch.Tensor):
    """A tensor of the device; `held` is the CPU tensor that has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> EmulatedTensor:
        if held.dtype == torch.float64:
            raise TypeError("this device has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operator, args, kwargs or {})


def compute(operator: Any, args: Any, kwargs: Any) -> Any:
    """The operator on the CPU; results are on the device if the operator's tensors are, or if it is told so."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in given if isinstance(x, EmulatedTensor)]
    others = [x for x in given if not isinstance(x, EmulatedTensor) and x.ndim]
    if ours and others and operator not in MAY_MIX:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, found {NAME} and cpu")
    wanted = kwargs.get("device")
    here = bool(ours) if wanted is None else torch.device(wanted).type == NAME
    if operator is aten.copy_.default:
        here = isinstance(args[0], EmulatedTensor)

    def on_cpu(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.held if isinstance(x, EmulatedTensor) else x

    cpu_args, cpu_kwargs = tree_map(on_cpu, (args, kwargs))
    found = operator(*cpu_args, **cpu_kwargs)
    known = {id(x.held): x for x in ours}  # of operators in place: the tensor that they were given

    def placed(x: Any) -> Any:
        if not here or not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else EmulatedTensor(x)

    return tree_map(placed, found)


class Emulation(TorchDispatchMode):
    """Sends every operator to `compute`."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operator, args, kwargs or {})


class FromLists(TorchFunctionMode):
    """Makes tensors of lists, and of indices, on the CPU first: for them PyTorch asks the device's own operators."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        makes = function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if function is torch.Tensor.new_tensor:
            return torch.tensor(*args[1:], dtype=args[0].dtype).to(args[0].device)
        if makes and device is not None and torch.device(device).type == NAME:
            return function(*args, **kwargs | {"device": "cpu"}).to(device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = tuple(torch.tensor(x) if isinstance(x, list) else x for x in parts)
            args = (args[0], parts, *args[2:])
        return function(*args, **(kwargs or {}))


@contextmanager
def emulated_device() -> Iterator[torch.device]:
    """The device; inside, its tensors compute."""
    module = backend_registration._DummyBackendModule()
    module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[attr-defined]
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    no_inference_mode = mock.patch.object(torch, "inference_mode", torch.no_grad)  # wrapped tensors cannot be in it
    with Emulation(), FromLists(), no_inference_mode:
        yield torch.device(NAME, 0)


if __name__ == "__main__":
    with emulated_device() as chosen:
        from support import on_emulated_device  # decorators find the emulation

        on_emulated_device.main(chosen)
