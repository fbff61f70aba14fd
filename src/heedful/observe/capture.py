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
COPIED = (".keys", ".values")  # views of a cache, whose memory is written again


class Activations(Mapping[str, Tensor]):
    """What was captured, by name. After several calls of the model a name has several tensors: `steps`."""

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
        """One tensor for each call of the model."""
        if name not in self._kept:
            raise KeyError(f"{name} was not asked for; these were: {', '.join(self._kept) or 'none'}")
        return self._kept[name]

    def layers(self, pattern: str) -> Tensor:
        """All that match as one tensor, the first dimension counts them: (layers, B, H, T, S) of weights."""
        return torch.stack([self[name] for name in matching_names(list(self._kept), pattern)])

    def clear(self) -> None:
        """Forget what was captured so far."""
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
    """Keep what the patterns name; `edit` replaces what its patterns name by what a function makes of it.

    An edit returns a tensor of the same shape. `graph` keeps what gradients need.
    """
    places = hook_points(model)
    known = list(places)
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
                spy = _Hook(places[name], edits.get(name, []), acts._kept.get(name), graph)
                _attach(model, spy, stack)
        yield acts


def matching_names(known: Sequence[str], pattern: str) -> list[str]:
    """The names that a pattern means; ValueError with the nearest if there is none."""
    found = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
    if found:
        return found
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    hint = f"; near are {', '.join(near)}" if near else ""
    raise ValueError(f"nothing here is called {pattern!r}{hint} (`activation_names(model)` lists all {len(known)})")


class _Hook:
    """Sees one place: edits what passes, and keeps it."""

    def __init__(self, place: HookPoint, edits: list[Edit], kept: list[Tensor] | None, graph: bool) -> None:
        self.place, self.edits, self.kept, self.graph = place, edits, kept, graph
        self.pieces: list[Tensor] = []

    def see(self, x: Tensor) -> Tensor:
        for change in self.edits:
            made = change(x)
            if not isinstance(made, Tensor) or made.shape != x.shape:
                got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ValueError(f"the edit of {self.place.name} made {got} of {tuple(x.shape)}: keep the shape")
            x = made.to(x.dtype)
        if self.kept is not None:
            kept = x if self.graph else x.detach()
            kept = kept.clone() if self.place.name.endswith(COPIED) else kept
            (self.kept if self.place.within is None else self.pieces).append(kept)
        return x

    def begin(self) -> None:
        self.pieces = []

    def end(self) -> None:
        """Put together what one call of the model computed in pieces; what does not change is kept once."""
        if self.pieces and self.kept is not None:
            along = self.place.joined
            self.kept.append(self.pieces[0] if along is None else torch.cat(self.pieces, dim=along))
        self.pieces = []

    def of_output(self, out: Any) -> Any:
        """The output to go on with; the same object where nothing is edited."""
        item = self.place.item
        if item is None:
            return self.see(out)
        seen = self.see(out[item])
        if not self.edits:
            return out
        parts = [*out[:item], seen, *out[item + 1 :]]
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)


def _attach(model: Model, spy: _Hook, stack: ExitStack) -> None:
    """Let a spy see its place until `stack` closes."""
    place = spy.place
    if place.method is not None:
        stack.enter_context(_hooked_method(model, place.method, spy))
        return
    if place.watch is not None:
        stack.enter_context(_explicit_attention(place.watch))
    call = stack.enter_context(_hooked_method(model, place.during)) if place.during is not None else None
    hooks = []
    if place.within is not None:
        hooks.append(place.within.register_forward_pre_hook(lambda _module, _inputs: spy.begin()))
        hooks.append(place.within.register_forward_hook(lambda _module, _inputs, _out: spy.end()))
    if place.side == "input":
        hooks.append(place.module.register_forward_pre_hook(lambda _m, inputs: (spy.see(inputs[0]), *inputs[1:])))
    else:
        hooks.append(
            place.module.register_forward_hook(
                lambda _m, _inputs, out: spy.of_output(out) if call is None or call.depth else out
            )
        )
    for hook in hooks:
        stack.callback(hook.remove)


class _HookedMethod:
    """Knows when a method of a model runs, and shows spies what it returns: no hook of PyTorch's does."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.depth, self.n_users = run, 0, 0
        self.spies: list[_Hook] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.depth += 1
        try:
            out = self.run(*given, **named)
        finally:
            self.depth -= 1
        for spy in self.spies:
            out = spy.of_output(out)
        return out


@contextmanager
def _hooked_method(model: Model, method: str, spy: _Hook | None = None) -> Iterator[_HookedMethod]:
    """The method replaced on this one model, until the last of those who look has gone."""
    call = model.__dict__.get(method)
    if not isinstance(call, _HookedMethod):
        call = _HookedMethod(getattr(model, method))
        setattr(model, method, call)
    call.n_users += 1
    call.spies += [] if spy is None else [spy]
    try:
        yield call
    finally:
        call.n_users -= 1
        if spy is not None:
            call.spies.remove(spy)
        if call.n_users == 0:
            delattr(model, method)


_explicit: WeakKeyDictionary[Watch, tuple[int, bool]] = WeakKeyDictionary()  # how many look, and if it was on before


@contextmanager
def _explicit_attention(watch: Watch) -> Iterator[None]:
    """The explicit path, until the last of those who look has gone."""
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
