"""Looking at a served model: in the thread it lives in, with float32 numbers, and not twice at the same thing.

What a visitor asks runs as one job of the model's worker, between two steps of the engine. What it computed is kept
for a while (256 MB for all models together), so that moving between layers and heads does not run the model again.
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

from heedful.loaded import Loaded, load
from heedful.models.base import DecoderModel, Model
from heedful.observe.inputs import token_label
from heedful.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, client_errors
from heedful.serve.handle import HandleGroup
from heedful.serve.worker import Worker
from heedful.text.tokenizer import Tokenizer

T = TypeVar("T")

ROOM = 256 * 2**20  # bytes of what is kept
MOST_COPIED = 50_000_000  # parameters
HALVES = ("bfloat16", "float16")


class Kept:
    """What was computed, the least recently used forgotten first. Several threads use it."""

    def __init__(self, room: int = ROOM) -> None:
        self.room, self.size = room, 0
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """None if it is not there."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: Hashable, value: Any) -> None:
        """Larger things than all the room are not kept."""
        size = n_bytes(value)
        with self._lock:
            self.size -= self._found.pop(key, (None, 0))[1]
            if size > self.room:
                return
            self._found[key] = (value, size)
            self.size += size
            while self.size > self.room:
                self.size -= self._found.popitem(last=False)[1][1]


def n_bytes(value: Any, counted: set[int] | None = None) -> int:
    """About the memory of tensors, texts and numbers, however they are nested; what several tensors share counts once,
    and of a view all that it keeps alive."""
    counted = set() if counted is None else counted
    if isinstance(value, Tensor):
        memory = value.untyped_storage()
        known = memory.data_ptr() in counted
        counted.add(memory.data_ptr())
        return 100 + (0 if known else memory.nbytes())
    if isinstance(value, str):
        return 2 * len(value) + 50
    if isinstance(value, dict):
        return sum(n_bytes(part, counted) for part in value.values()) + 100 * len(value)
    if isinstance(value, list | tuple):
        return sum(n_bytes(part, counted) for part in value) + 50
    if hasattr(value, "__dict__"):
        return n_bytes(vars(value), counted)
    return 50


class Desk:
    """One loaded model, as the page's visitors look at it. All but `loaded` belongs to the model's thread."""

    def __init__(self, served: Loaded, path: Path, kept: Kept, number: int) -> None:
        self.served, self._path, self._kept, self._number = served, path, kept, number
        self._exact: Loaded | None = None
        self._spelled: dict[tuple[bool, int], dict[str, Any]] = {}

    @property
    def loaded(self) -> Loaded:
        """The model in float32: of a small one that is served in half precision a copy, so that weights add up to 1
        and all numbers are those of `heedful show`. A larger one, or one in fewer bits, is looked at as served."""
        if self._exact is None:
            model = self.served.model
            half = (model.packed or str(next(model.parameters()).dtype).removeprefix("torch.")) in HALVES
            if half and model.n_parameters() <= MOST_COPIED:
                model = self._copied(model)
            self._exact = Loaded(model, self.served.tokenizer, self.served.name)
        return self._exact

    def _copied(self, model: Model) -> Model:
        if model.packed is None:
            return copy.deepcopy(model).float()
        try:
            return load(self._path, device=model.device, dtype=torch.float32).model
        except (OSError, ValueError):  # a run has gone on, and its checkpoint is no longer there
            return model

    @property
    def model(self) -> Model:
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.served.tokenizer

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for this key, now or before."""
        found = self._kept.get((self._number, key))
        if found is None:
            found = make()
            self._kept.put((self._number, key), found)
        return cast(T, found)

    def kept(self, key: Hashable) -> Any:
        return self._kept.get((self._number, key))

    def put(self, key: Hashable, value: Any) -> None:
        self._kept.put((self._number, key), value)

    # --- tokens ----------------------------------------------------------------------------------------------------

    def token(self, id: int, *, target: bool = False) -> dict[str, Any]:
        """A token as the page shows it; `target` says that it is of the language an encoder-decoder writes."""
        found = self._spelled.get((target, id))
        if found is None:
            writer = self.tokenizer if self.tokenizer is None or not target else self.tokenizer.target
            begins = target or isinstance(self.model, DecoderModel)
            raw, special = str(id), begins and id == getattr(self.model, "start_id", None)
            if writer is not None and id < writer.vocab_size:
                raw = writer.token(id)
                special |= raw in writer.special_tokens
            found = {"id": id, "text": token_label(writer, id), "raw": raw, "special": special}
            self._spelled[target, id] = found
        return found

    def tokens(self, ids: list[int], *, target: bool = False) -> list[dict[str, Any]]:
        return [self.token(id, target=target) for id in ids]


class Desks:
    """The desks of all loaded models; that of a model which is let go goes with it."""

    def __init__(self) -> None:
        self.kept = Kept()
        self._desks: WeakKeyDictionary[Worker, Desk] = WeakKeyDictionary()
        self._count = 0

    def of(self, worker: Worker, path: Path) -> Desk:
        """That of a model whose files are at `path`."""
        if worker not in self._desks:
            self._count += 1
            self._desks[worker] = Desk(worker.loaded, path, self.kept, self._count)
        return self._desks[worker]


async def ask(http: HttpRequest, name: str, look: Callable[[Desk], T]) -> T:
    """What `look` finds at a model's desk, in one turn. What it raises as a ValueError is the asker's mistake."""
    return await ask_in_turns(http, name, lambda desk: (look(desk) for _ in range(1)))


async def ask_in_turns(http: HttpRequest, name: str, look: Callable[[Desk], Iterator[T]]) -> T:
    """The last thing that `look` yields; between two of them others have their turns."""
    manager = http.app.state.manager
    async with AsyncExitStack() as held:
        with client_errors():
            worker = await held.enter_async_context(manager.acquire(name))
            job = worker.run_job(_attempt(look(http.app.state.desks.of(worker, manager.path(name)))))
        results = await HandleGroup([job]).results(http)
    if results is None:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
    last = results[0][-1]
    if isinstance(last, ApiError):
        raise last
    return last


def _attempt(turns: Iterator[T]) -> Iterator[T | ApiError]:
    """The job. A worker takes what it raises for the server's own failure, so mistakes are handed over."""
    while True:
        try:
            with torch.no_grad():  # not while somebody else has his turn
                found = next(turns)
        except StopIteration:
            return
        except ApiError as error:
            yield error
            return
        except ValueError as error:
            yield ApiError(400, str(error))
            return
        yield found
