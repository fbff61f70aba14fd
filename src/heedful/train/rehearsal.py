"""A training step on tensors that have a shape and no memory: what it would compute and allocate, in half a second.

PyTorch's fake tensors go through the same operators as real ones, chosen for the same device. What depends on numbers
(which targets count, say) is known all the same: the few whole numbers of a batch are real, and what is computed from
them alone is computed beside. Where a choice follows from weights that are not there (which token goes to which of a
mixture's experts), all are taken to be chosen equally often.

    with Rehearsal.on("cpu", model) as rehearsal:
        ghost, batch = rehearsal.ghost(model), rehearsal.batch(batch)
        rehearsal.forget()  # the weights and the batch are there already
        objective(ghost, batch).sum.backward()
    rehearsal.peak  # bytes by kind, when most were in use
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from heedful.models.base import Batch
from heedful.nn.feedforward import MixtureOfExperts

aten = torch.ops.aten
KEPT = 2**22  # whole numbers of a tensor that are still computed beside: masks of every pair of positions are not


class Rehearsal(TorchDispatchMode):
    """Runs operators on tensors without memory, and keeps account of the memory they would take."""

    def __init__(self, device: torch.device, share: float = 1.0, n_logits: int = 0) -> None:
        """`share` is how much of an unknown choice is taken; `n_logits` the width by which logits are recognized."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.share, self.n_logits = device, share, n_logits
        self.live = {"activations": 0, "logits": 0, "gradients": 0}
        self.peak = dict(self.live)
        self._kinds: dict[int, str] = {}  # of what is in use, by its number
        self._held: dict[int, weakref.ref[Any]] = {}
        self._known: Any = WeakTensorKeyDictionary()  # the real numbers beside a tensor

    @staticmethod
    @contextmanager
    def on(device: torch.device | str, model: nn.Module) -> Iterator[Rehearsal]:
        """A rehearsal of this model."""
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("a training on a GPU can only be rehearsed where there is one")
        experts = [len(m.experts) for m in model.modules() if isinstance(m, MixtureOfExperts)]
        rehearsal = Rehearsal(device, 1 / max(experts, default=1), logits_width(model))
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield stack.enter_context(rehearsal)

    # --- what takes part -------------------------------------------------------------------------------------------

    def ghost(self, thing: Any) -> Any:
        """A copy of a model, or of an objective that holds one, whose weights have no memory; ties stay ties."""
        memo: dict[int, Any] = {}
        for tensor in tensors_of(thing):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
        copied = copy.deepcopy(thing, memo)
        for p in tensors_of(copied):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._found_gradient)
        return copied

    def batch(self, batch: Batch) -> Batch:
        """The same batch without memory; its whole numbers stay known."""

        def without(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if not tensor.is_floating_point() and tensor.device.type == "cpu":
                with _disable_current_modes():
                    self._known[empty] = tensor.clone()
            return empty

        return Batch(**{f.name: without(getattr(batch, f.name)) for f in dataclasses.fields(batch)})

    # --- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked before nearly every operator
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        beside = self._beside(func, given, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return 1 if beside is None else beside
        out: Any
        if func is aten.nonzero.default:
            out = self._chosen(given[0], beside)
        elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            out = func(args[0], self._by_number(args[1]), *args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
            if func is aten.mkldnn_rnn_layer.default:
                out = (*out[:3], _lstm_workspace(out[0]))
        self._remember(out, beside)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _beside(self, func: Any, given: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator on the real numbers, if all that it reads are known; None if they are not."""
        if not all(t in self._known for t in given) or (not given and not _makes_whole_numbers(func, args, kwargs)):
            return None
        real_args, real_kwargs = tree_map_only(Tensor, self._known.__getitem__, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _remember(self, out: Any, beside: Any) -> None:
        if isinstance(out, Tensor) and isinstance(beside, Tensor):
            whole = not beside.is_floating_point() and not beside.is_complex()
            if whole and beside.numel() <= KEPT and beside.shape == out.shape:
                self._known[out] = beside

    def _chosen(self, mask: Tensor, beside: Tensor | None) -> Tensor:
        n = math.ceil(mask.numel() * self.share) if beside is None else len(beside)
        return torch.empty((n, mask.ndim), dtype=torch.int64, device=mask.device)

    def _by_number(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices of True and False as the numbers of the places that are True."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                found.append(index)
            else:
                known = self._known[index].nonzero() if index in self._known else None
                found += self._chosen(index, known).unbind(1)
        return found

    # --- the account -----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """What is in use by now is not counted."""
        self.live = dict.fromkeys(self.live, 0)
        self.peak = dict(self.live)
        self._kinds = dict.fromkeys(self._held, "")

    def name(self, kind: str) -> None:
        """What is in use by now and was not forgotten is called `kind`; the peak is looked for from here on."""
        self._kinds = {number: was and kind for number, was in self._kinds.items()}
        self.live = dict.fromkeys(self.live, 0) | {kind: sum(self.live.values())}
        self.peak = dict(self.live)

    def _count(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        number, n_bytes = memory._cdata, memory.nbytes()
        if number in self._held:
            return
        is_logits = tensor.ndim > 1 and self.n_logits > 1 and tensor.shape[-1] == self.n_logits
        kind = "logits" if is_logits else "activations"
        self._kinds[number] = kind
        self._held[number] = weakref.ref(memory, self._freeing(number, n_bytes))
        self.live[kind] += n_bytes
        if sum(self.live.values()) > sum(self.peak.values()):
            self.peak = dict(self.live)

    def _freeing(self, number: int, n_bytes: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self._held.pop(number, None)
            kind = self._kinds.pop(number, "")
            if kind:
                self.live[kind] -= n_bytes

        return free

    def _found_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        memory = parameter.grad.untyped_storage()
        was = self._kinds.get(memory._cdata, "")
        if was and was != "gradients":
            self._kinds[memory._cdata] = "gradients"
            self.live[was] -= memory.nbytes()
            self.live["gradients"] += memory.nbytes()


def tensors_of(thing: Any) -> list[Tensor]:
    """The parameters and buffers of a module, or of the modules that something else holds, each once."""
    held = [thing] if isinstance(thing, nn.Module) else list(getattr(thing, "__dict__", {}).values())
    modules = [m for m in held if isinstance(m, nn.Module)]
    every = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return list({id(t): t for t in every}.values())


def logits_width(model: nn.Module) -> int:
    """How many logits a position has: the rows of the head's matrix; 0 without a head."""
    head = getattr(model, "head", None)
    matrices = [p for p in head.parameters() if p.ndim == 2] if isinstance(head, nn.Module) else []
    return max((len(p) for p in matrices), default=0)


def _lstm_workspace(out: Tensor) -> Tensor:
    """What oneDNN's LSTM keeps for its backward, which fake tensors do not tell: measured, 15 numbers for each output
    (T, B, E) and 20 for each of its states."""
    n_steps, n_rows, width = out.shape
    return torch.empty((15 * n_steps + 20) * n_rows * width * 4, dtype=torch.uint8, device=out.device)


def _makes_whole_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """arange and the like: operators that make whole numbers of nothing."""
    dtype = kwargs.get("dtype")
    if func.overloadpacket in (aten.arange, aten.full, aten.zeros, aten.ones, aten.scalar_tensor):
        numbers = [x for x in tree_leaves(args) if isinstance(x, int | float | bool)]
        if dtype is None:
            whole = func.overloadpacket in (aten.arange, aten.full) and all(isinstance(x, int) for x in numbers)
        else:
            whole = not (dtype.is_floating_point or dtype.is_complex)
        size = args[0] if args and isinstance(args[0], list | tuple) else ()
        return whole and math.prod(size) <= KEPT
    return False
