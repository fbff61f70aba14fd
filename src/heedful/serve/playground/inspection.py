"""Runs the playground's computations on a served model: in the model's own thread, in float32, with a cache.

A request is one job of the model's worker, between two steps of the engine. Results are cached (256 MB for all models
together), so that moving between layers and heads does not run the model again.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from starlette.requests import Request as HttpRequest
from torch import Tensor

from heedful.kernels.accelerate import packed_precision, stored_precision
from heedful.loaded import Loaded, load
from heedful.models.base import DecoderModel, Model
from heedful.observe.inputs import token_label
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, client_errors, from_exception
from heedful.serve.handle import HandleGroup, client_of
from heedful.serve.worker import Worker
from heedful.text.tokenizer import Tokenizer
from heedful.text.warn import collect_warnings, collected_warnings, repeat_warnings

T = TypeVar("T")

CACHE_BYTES = 256 * 2**20
MAX_COPIED_PARAMETERS = 50_000_000  # of a larger model no float32 copy is made
HALF_PRECISION = ("bfloat16", "float16")


class LRUCache:
    """A cache bounded by the memory of its values; the least recently used go first. Safe for several threads."""

    def __init__(self, capacity: int = CACHE_BYTES) -> None:
        self.capacity, self.size = capacity, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The value of a key; None if there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any) -> None:
        """Store a value, unless it is larger than the whole cache."""
        size = memory_size(value)
        with self._lock:
            self.size -= self._entries.pop(key, (None, 0))[1]
            if size > self.capacity:
                return
            self._entries[key] = (value, size)
            self.size += size
            while self.size > self.capacity:
                self.size -= self._entries.popitem(last=False)[1][1]


def memory_size(value: Any, counted: set[int] | None = None) -> int:
    """Approximate bytes of nested tensors, texts and numbers. Storage that several tensors share counts once; a view
    counts with all of the storage that it keeps alive."""
    counted = set() if counted is None else counted
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        known = storage.data_ptr() in counted
        counted.add(storage.data_ptr())
        return 100 + (0 if known else storage.nbytes())
    if isinstance(value, str):
        return 2 * len(value) + 50
    if isinstance(value, dict):
        return sum(memory_size(part, counted) for part in value.values()) + 100 * len(value)
    if isinstance(value, list | tuple):
        return sum(memory_size(part, counted) for part in value) + 50
    if hasattr(value, "__dict__"):
        return memory_size(vars(value), counted)
    return 50


class Inspector:
    """A loaded model with its part of the cache. All but `loaded` belongs to the model's thread."""

    def __init__(self, served: Loaded, path: Path, cache: LRUCache, number: int) -> None:
        self.served, self._path, self._cache, self._number = served, path, cache, number
        self._float32: Loaded | None = None
        self._tokens: dict[tuple[bool, int], dict[str, Any]] = {}

    @property
    def loaded(self) -> Loaded:
        """The model in float32: a copy of a small one that is served in half precision, so that attention weights sum
        to 1 and all numbers are those of `heedful show`. A large or quantized model is inspected as it is served."""
        if self._float32 is None:
            model = self.served.model
            half = (packed_precision(model) or stored_precision(model)) in HALF_PRECISION
            if half and model.n_parameters() <= MAX_COPIED_PARAMETERS:
                model = self._float32_copy(model)
            self._float32 = Loaded(model, self.served.tokenizer, self.served.name)
        return self._float32

    def _float32_copy(self, model: Model) -> Model:
        if packed_precision(model) is None:
            return copy.deepcopy(model).float()
        try:
            return load(self._path, device=model.device, dtype=torch.float32).model
        except (OSError, ValueError):  # a run has gone on, and its checkpoint is no longer there
            return model

    @property
    def model(self) -> Model:
        """The model in float32, where there is a copy."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a model of token ids or of images."""
        return self.served.tokenizer

    def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The cached value of a key, computed if there is none."""
        found = self.cache_get(key)
        if found is None:
            found = compute()
            self.cache_put(key, found)
        return cast(T, found)

    def cache_get(self, key: Hashable) -> Any:
        """The cached value of a key of this model; None if there is none. What was warned of with it is again."""
        value, told = self._cache.get((self._number, key)) or (None, ())
        repeat_warnings(told)
        return value

    def cache_put(self, key: Hashable, value: Any) -> None:
        """Cache a value for this model, with what this request was warned of."""
        self._cache.put((self._number, key), (value, collected_warnings()))

    # --- tokens ----------------------------------------------------------------------------------------------------

    def token(self, id: int, *, target: bool = False) -> dict[str, Any]:
        """A token as a `wire.Token`; with `target`, one of an encoder-decoder's output vocabulary."""
        found = self._tokens.get((target, id))
        if found is None:
            tokenizer = self.tokenizer if self.tokenizer is None or not target else self.tokenizer.target
            has_start = target or isinstance(self.model, DecoderModel)
            raw, special = str(id), has_start and id == getattr(self.model, "start_id", None)
            if tokenizer is not None and id < tokenizer.vocab_size:
                raw = tokenizer.token(id)
                special |= raw in tokenizer.special_tokens
            found = {"id": id, "text": token_label(tokenizer, id), "raw": raw, "special": special}
            self._tokens[target, id] = found
        return found

    def tokens(self, ids: list[int], *, target: bool = False) -> list[dict[str, Any]]:
        """Several tokens as `wire.Token`."""
        return [self.token(id, target=target) for id in ids]


class Inspectors:
    """The inspectors of all loaded models, which share one cache. An unloaded model's is dropped with it."""

    def __init__(self) -> None:
        self.cache = LRUCache()
        self._by_worker: WeakKeyDictionary[Worker, Inspector] = WeakKeyDictionary()
        self._count = 0

    def of(self, worker: Worker, path: Path) -> Inspector:
        """The inspector of a worker's model, whose files are at `path`."""
        if worker not in self._by_worker:
            self._count += 1
            self._by_worker[worker] = Inspector(worker.loaded, path, self.cache, self._count)
        return self._by_worker[worker]


async def run_on_model(http: HttpRequest, name: str, compute: Callable[[Inspector], T]) -> T:
    """The result of `compute` on a model, as one job in the model's thread. A ValueError becomes status 400."""
    return await run_in_slices(http, name, lambda inspector: (compute(inspector) for _ in range(1)))


async def run_in_slices(http: HttpRequest, name: str, compute: Callable[[Inspector], Iterator[T]]) -> T:
    """The last value that `compute` yields; between two values the model's thread serves other requests.

    What it warns of is in `http.state.warnings`, see `wire.with_warnings`.
    """
    manager = http.app.state.manager
    told = http.scope["state"].setdefault("warnings", [])
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(manager.acquire(name))
            inspector = http.app.state.inspectors.of(worker, manager.path(name))
            job = worker.run_job(_with_errors(compute(inspector), told), client=client_of(http))
        results = await HandleGroup([job]).results(http)
    if results is None:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
    last = results[0][-1]
    if isinstance(last, ApiError):
        raise last
    return last


def _with_errors(slices: Iterator[T], told: list[str]) -> Iterator[T | ApiError]:
    """The same values, with the client's errors yielded: what a job raises counts as a failure of the server. Warnings
    are appended to `told`."""
    while True:
        try:
            with torch.no_grad(), collect_warnings(told):  # entered anew for each slice: between two, other jobs run
                found = next(slices)
        except StopIteration:
            return
        except ApiError as error:
            yield error
            return
        except ValueError as error:
            yield from_exception(error)
            return
        yield found
