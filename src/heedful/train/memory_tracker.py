"""Memory of a training step, from running it on fake tensors: shapes and dtypes without storage, in half a second.

PyTorch's fake tensors go through the same operators as real ones, chosen for the same device. Control flow that depends
on values (which targets count, say) still works: the integers of a batch are real, and every operator whose inputs are
all known integers is also computed on the real values. Where a choice follows from weights that are not there (which
token goes to which expert of a mixture), every outcome is assumed equally likely.

    with MemoryTracker.for_model("cpu", model) as tracker:
        fake_model, fake_batch = tracker.fake_copy(model), tracker.fake_batch(batch)
        tracker.reset()  # the weights and the batch are not counted
        objective(fake_model, fake_batch).sum.backward()
    tracker.peak  # bytes by kind at the highest point
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
MAX_KNOWN = 2**22  # integers of a tensor whose values are tracked; masks of all pairs of positions are larger


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that runs operators on fake tensors and tracks the memory that real ones would take."""

    def __init__(self, device: torch.device, share: float = 1.0, n_logits: int = 0, *, padded: bool = True) -> None:
        """`share` of an unknown mask is assumed True; `n_logits` is the width that identifies logits; without `padded`
        the padding of a batch counts as tokens (recurrent layers leave it out, but not on fake tensors)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.share, self.n_logits, self.padded = device, share, n_logits, padded
        self.live = {"activations": 0, "logits": 0, "gradients": 0}
        self.peak = dict(self.live)
        self._kinds: dict[int, str] = {}  # of live storages, by their address
        self._held: dict[int, weakref.ref[Any]] = {}
        self._known: Any = WeakTensorKeyDictionary()  # the real values of a fake integer tensor

    @staticmethod
    @contextmanager
    def for_model(device: torch.device | str, model: nn.Module) -> Iterator[MemoryTracker]:
        """A tracker for a step of this model on this device."""
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("the memory of a training on a GPU can only be traced where there is one")
        experts = [len(m.experts) for m in model.modules() if isinstance(m, MixtureOfExperts)]
        recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
        tracker = MemoryTracker(device, 1 / max(experts, default=1), logits_width(model), padded=not recurrent)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield stack.enter_context(tracker)

    # --- fake models and batches -----------------------------------------------------------------------------------

    def fake_copy(self, thing: Any) -> Any:
        """A copy of a model, or of an objective that holds one, with fake weights; tied weights stay tied."""
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

    def fake_batch(self, batch: Batch) -> Batch:
        """A fake copy of a batch whose integers stay known."""

        def without(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if not tensor.is_floating_point() and tensor.device.type == "cpu":
                with _disable_current_modes():
                    self._known[empty] = tensor.clone()
            return empty

        batch = batch if self.padded else dataclasses.replace(batch, lengths=None, source_lengths=None)
        return Batch(**{f.name: without(getattr(batch, f.name)) for f in dataclasses.fields(batch)})

    # --- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # called before nearly every operator
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        real = self._on_real_values(func, given, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return 1 if real is None else real
        out: Any
        if func is aten.nonzero.default:
            out = self._nonzero(given[0], real)
        elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            out = func(args[0], self._integer_indices(args[1]), *args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
            if func is aten.mkldnn_rnn_layer.default:
                out = (*out[:3], _lstm_workspace(out[0]))
        self._remember(out, real)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _on_real_values(self, func: Any, given: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's result on real values if all its inputs are known integers, else None."""
        if not all(t in self._known for t in given) or (not given and not _makes_integers(func, args, kwargs)):
            return None
        real_args, real_kwargs = tree_map_only(Tensor, self._known.__getitem__, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _remember(self, out: Any, real: Any) -> None:
        if isinstance(out, Tensor) and isinstance(real, Tensor):
            whole = not real.is_floating_point() and not real.is_complex()
            if whole and real.numel() <= MAX_KNOWN and real.shape == out.shape:
                self._known[out] = real

    def _nonzero(self, mask: Tensor, real: Tensor | None) -> Tensor:
        """Fake indices of the True elements of a mask, `share` of them if its values are unknown."""
        n = math.ceil(mask.numel() * self.share) if real is None else len(real)
        return torch.empty((n, mask.ndim), dtype=torch.int64, device=mask.device)

    def _integer_indices(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Boolean index tensors as integer ones."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                found.append(index)
            else:
                known = self._known[index].nonzero() if index in self._known else None
                found += self._nonzero(index, known).unbind(1)
        return found

    # --- accounting ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Stop counting what is allocated now, and start the peak from zero."""
        self.live = dict.fromkeys(self.live, 0)
        self.peak = dict(self.live)
        self._kinds = dict.fromkeys(self._held, "")

    def relabel(self, kind: str) -> None:
        """Count everything allocated since `reset` as `kind`, and start the peak from here."""
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
    """The parameters and buffers of a module, or of the modules among an object's attributes, each once."""
    held = [thing] if isinstance(thing, nn.Module) else list(getattr(thing, "__dict__", {}).values())
    modules = [m for m in held if isinstance(m, nn.Module)]
    every = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return list({id(t): t for t in every}.values())


def logits_width(model: nn.Module) -> int:
    """The number of logits per position: the rows of the head's matrix, 0 without a head."""
    head = getattr(model, "head", None)
    head = getattr(head, "vocabulary", None) or getattr(head, "classifier", head)
    matrices = [p for p in head.parameters() if p.ndim == 2] if isinstance(head, nn.Module) else []
    return max((len(p) for p in matrices), default=0)


def _lstm_workspace(out: Tensor) -> Tensor:
    """The workspace that oneDNN's LSTM saves for backward, which fake tensors lack: measured, 15 floats per element of
    the output (T, B, E) and 20 per element of the state."""
    n_steps, n_rows, width = out.shape
    return torch.empty((15 * n_steps + 20) * n_rows * width * 4, dtype=torch.uint8, device=out.device)


def _makes_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator without tensor inputs (arange, full, ...) makes an integer tensor."""
    dtype = kwargs.get("dtype")
    if func.overloadpacket in (aten.arange, aten.full, aten.zeros, aten.ones, aten.scalar_tensor):
        numbers = [x for x in tree_leaves(args) if isinstance(x, int | float | bool)]
        if dtype is None:
            whole = func.overloadpacket in (aten.arange, aten.full) and all(isinstance(x, int) for x in numbers)
        else:
            whole = not (dtype.is_floating_point or dtype.is_complex)
        size = args[0] if args and isinstance(args[0], list | tuple) else ()
        return whole and math.prod(size) <= MAX_KNOWN
    return False
