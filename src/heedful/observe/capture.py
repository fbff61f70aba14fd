"""Record and change a model's activations with forward hooks.

    with capture(model, "decoder.*.self.weights") as acts:
        model(tokens)
    acts["decoder.3.self.weights"]                    # (B, H, T, S)

    with capture(model, "logits", edit={"decoder.3.self.heads": zero_ablation(heads=[5])}) as acts: ...

`activation_names(model)` lists the names (names.py); `*` in a pattern matches anything. Hooks exist only inside the
`with`, and only attention layers whose scores or weights are wanted switch to the explicit computation, until its end:
outside it costs nothing, and the output does not change. An activation is recorded after its edits. `forward`, `start`
and `step` are all hooked: generation gives one tensor for each call, `acts.steps(name)`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heedful.models.base import Model
from heedful.nn.attention import Watch
from heedful.observe.names import HookPoint, hook_points

Edit = Callable[[Tensor], Tensor]
COPIED = (".keys", ".values")  # views of the KV cache, which later steps overwrite


class Activations(Mapping[str, Tensor]):
    """Recorded activations by name; after several calls of the model a name has several tensors, `steps`."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._kept: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def __getitem__(self, name: str) -> Tensor:
        kept = self.steps(name)
        if not kept:
            raise ValueError(f"{name} was not computed: call the model inside the `with`")
        if len(kept) > 1:
            raise ValueError(f"{name} was computed {len(kept)} times: acts.steps({name!r}) has a list of them")
        return kept[0]

    def steps(self, name: str) -> list[Tensor]:
        """The tensors of an activation, one for each call of the model."""
        if name not in self._kept:
            raise KeyError(f"{name} was not asked for; these were: {', '.join(self._kept) or 'none'}")
        return self._kept[name]

    def layers(self, pattern: str) -> Tensor:
        """The activations that match, stacked: (L, B, H, T, S) of attention weights."""
        return torch.stack([self[name] for name in matching_names(list(self._kept), pattern)])

    def clear(self) -> None:
        """Drop the activations recorded so far."""
        for kept in self._kept.values():
            kept.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@contextmanager
def capture(
    model: Model,
    patterns: str | Sequence[str] = (),
    edit: Mapping[str, Edit] | None = None,
    *,
    graph: bool = False,
) -> Iterator[Activations]:
    """Record the activations that match the patterns; `edit` maps patterns to functions that replace an activation.

    An edit returns a tensor of the same shape. With `graph` activations are not detached, for gradients.
    """
    points = hook_points(model)
    known = list(points)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    kept = {name for pattern in wanted for name in matching_names(known, pattern)}
    edits: dict[str, list[Edit]] = {}
    for pattern, change in (edit or {}).items():
        for name in matching_names(known, pattern):
            edits.setdefault(name, []).append(change)
    acts = Activations([name for name in known if name in kept])
    with ExitStack() as stack:
        for name in known:
            if name in kept or name in edits:
                hook = _Hook(points[name], edits.get(name, []), acts._kept.get(name), graph)
                _attach(model, hook, stack)
        yield acts


def matching_names(known: Sequence[str], pattern: str) -> list[str]:
    """The names that match a pattern; ValueError with the closest ones if there is none."""
    found = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
    if found:
        return found
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    hint = f"; near are {', '.join(near)}" if near else ""
    raise ValueError(f"nothing here is called {pattern!r}{hint} (`activation_names(model)` lists all {len(known)})")


class _Hook:
    """Edits and records the activation at one hook point."""

    def __init__(self, point: HookPoint, edits: list[Edit], kept: list[Tensor] | None, graph: bool) -> None:
        self.point, self.edits, self.kept, self.graph = point, edits, kept, graph
        self.pieces: list[Tensor] = []

    def apply(self, x: Tensor) -> Tensor:
        """The activation after the edits; recorded if it is wanted."""
        for change in self.edits:
            made = change(x)
            if not isinstance(made, Tensor) or made.shape != x.shape:
                got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ValueError(f"the edit of {self.point.name} made {got} of {tuple(x.shape)}: keep the shape")
            x = made.to(x.dtype)
        if self.kept is not None:
            kept = x if self.graph else x.detach()
            kept = kept.clone() if self.point.name.endswith(COPIED) else kept
            (self.kept if self.point.within is None else self.pieces).append(kept)
        return x

    def begin(self) -> None:
        """A call of the enclosing module begins."""
        self.pieces = []

    def end(self) -> None:
        """Record the pieces of one call as one tensor: concatenated, or the first where they are all the same."""
        if self.pieces and self.kept is not None:
            along = self.point.joined
            self.kept.append(self.pieces[0] if along is None else torch.cat(self.pieces, dim=along))
        self.pieces = []

    def of_output(self, out: Any) -> Any:
        """The module's output with the activation replaced; the same object where nothing is edited."""
        item = self.point.item
        if item is None:
            return self.apply(out)
        seen = self.apply(out[item])
        if not self.edits:
            return out
        parts = [*out[:item], seen, *out[item + 1 :]]
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)


def _attach(model: Model, hook: _Hook, stack: ExitStack) -> None:
    """Install a hook until `stack` closes."""
    point = hook.point
    if point.method is not None:
        stack.enter_context(_hooked_method(model, point.method, hook))
        return
    if point.watch is not None:
        stack.enter_context(_explicit_attention(point.watch))
    call = stack.enter_context(_hooked_method(model, point.during)) if point.during is not None else None
    handles = []
    if point.within is not None:
        handles.append(point.within.register_forward_pre_hook(lambda _module, _inputs: hook.begin()))
        handles.append(point.within.register_forward_hook(lambda _module, _inputs, _out: hook.end()))
    if point.side == "input":
        handles.append(point.module.register_forward_pre_hook(lambda _m, inputs: (hook.apply(inputs[0]), *inputs[1:])))
    else:
        handles.append(
            point.module.register_forward_hook(
                lambda _m, _inputs, out: hook.of_output(out) if call is None or call.depth else out
            )
        )
    for handle in handles:
        stack.callback(handle.remove)


class _HookedMethod:
    """A method of a model, wrapped to know when it runs and to hook its return value; PyTorch hooks modules alone."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.depth, self.n_users = run, 0, 0
        self.hooks: list[_Hook] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.depth += 1
        try:
            out = self.run(*given, **named)
        finally:
            self.depth -= 1
        for hook in self.hooks:
            out = hook.of_output(out)
        return out


@contextmanager
def _hooked_method(model: Model, method: str, hook: _Hook | None = None) -> Iterator[_HookedMethod]:
    """Wrap a method of this model until the last user of the wrapper is done."""
    call = model.__dict__.get(method)
    if not isinstance(call, _HookedMethod):
        call = _HookedMethod(getattr(model, method))
        setattr(model, method, call)
    call.n_users += 1
    call.hooks += [] if hook is None else [hook]
    try:
        yield call
    finally:
        call.n_users -= 1
        if hook is not None:
            call.hooks.remove(hook)
        if call.n_users == 0:
            delattr(model, method)


_explicit: WeakKeyDictionary[Watch, tuple[int, bool]] = (
    WeakKeyDictionary()
)  # number of users, and the state before the first


@contextmanager
def _explicit_attention(watch: Watch) -> Iterator[None]:
    """Switch an attention layer to the explicit computation until the last user is done."""
    count, before = _explicit.get(watch, (0, watch.on))
    _explicit[watch] = (count + 1, before)
    watch.on = True
    try:
        yield
    finally:
        count, before = _explicit[watch]
        _explicit[watch] = (count - 1, before)
        if count == 1:
            watch.on = before
            del _explicit[watch]
