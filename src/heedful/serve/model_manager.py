"""The served models by name: loaded when somebody asks for them, and let go when another needs their memory.

Names are fixed at the start. What a client calls a model is looked up among them and never anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from heedful.kernels.pack import n_bytes, pack_as_stored
from heedful.loaded import TOKENIZER_FILES, Loaded, load, model_name
from heedful.serve import memory
from heedful.serve.errors import ApiError, Overloaded, ShuttingDown
from heedful.serve.metrics import Metrics
from heedful.serve.options import Options
from heedful.serve.worker import Worker
from heedful.weights.describe import size_in_words
from heedful.weights.resolve import reject_pickle, resolve, shipped_models

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """What clients are told of a model."""

    id: str
    created: int  # when its files were written, in seconds since 1970
    abilities: tuple[str, ...]
    loaded: bool


@dataclass(eq=False)
class Slot:
    """A served model, in memory or not."""

    name: str
    source: str | Path  # what to load
    path: Path  # where its files are
    need: memory.Need
    created: int
    worker: Worker | None = None
    loading: asyncio.Task[Worker] | None = None
    memory: int = 0  # bytes, while it is loaded or being loaded
    borrowed: int = field(default=0)


class ModelManager:
    def __init__(self, names: Sequence[str], options: Options, metrics: Metrics) -> None:
        self.options, self.metrics = options, metrics
        self.budget = memory.budget(options.memory, options.device)
        self._slots: dict[str, Slot] = {}  # the least recently used first
        for text in names or _useful():
            slot = self._resolve(text)
            if slot.name in self._slots:
                raise ValueError(f"two models are called {slot.name!r}: name one of them, as other={text}")
            self._slots[slot.name] = slot
        self.names = tuple(self._slots)
        self._one_at_a_time = asyncio.Lock()  # loads and evictions, so that what is counted is what is there
        self._stopping = False

    def _resolve(self, text: str) -> Slot:
        name, given, source = text.partition("=")
        if not given or text in shipped_models() or Path(text).expanduser().exists():
            name, source = "", text
        path = resolve(source)
        reject_pickle(path)
        if not path.is_dir() and path.suffix != ".gguf":
            raise ValueError(f"{path} is a single file: give its folder (with config.json), or a .gguf file")
        need = memory.need_of(path, self.options.quantize, self.options.cache_tokens)
        name = name or (model_name(source, path) if path.is_dir() else path.stem)
        if self.budget is not None and need.least > self.budget:
            raise ValueError(
                f"{name} needs {size_in_words(need.least)} (weights {size_in_words(need.weights)}, and room for "
                f"{need.context} tokens), and all models together may take {size_in_words(self.budget)}: "
                "allow more with --memory, or make the weights smaller with --quantize"
            )
        return Slot(name, source, path, need, _written(path))

    # --- what is there ---------------------------------------------------------------------------------------------

    def about(self, name: str) -> ModelInfo:
        """LookupError if it is not served."""
        slot = self._slot(name)
        return ModelInfo(slot.name, slot.created, slot.need.abilities, slot.worker is not None)

    def path(self, name: str) -> Path:
        """Where the files of a served model are."""
        return self._slot(name).path

    def _slot(self, name: str | None) -> Slot:
        served = ", ".join(self.names[:20])
        if name is None and len(self.names) == 1:
            name = self.names[0]
        if name is None:
            raise LookupError(f"the request names no model, and several are served: {served}")
        if name not in self._slots:
            raise LookupError(f"no model is called {name[:200]!r} here; served are: {served}")
        return self._slots[name]

    # --- loading ---------------------------------------------------------------------------------------------------

    async def worker(self, name: str | None) -> Worker:
        """The model's worker, loaded if need be; it may be gone at the next `await` unless it is borrowed."""
        async with self.acquire(name) as worker:
            return worker

    @asynccontextmanager
    async def acquire(self, name: str | None) -> AsyncIterator[Worker]:
        """The model's worker, not evicted meanwhile. LookupError: not served; Overloaded: no memory for it now."""
        slot = self._slot(name)
        slot.borrowed += 1
        try:
            yield await self._ready(slot)
        finally:
            slot.borrowed -= 1

    async def _ready(self, slot: Slot) -> Worker:
        if self._stopping:
            raise ShuttingDown("the server is stopping")
        self._slots[slot.name] = self._slots.pop(slot.name)  # the most recently used
        if slot.worker is not None:
            return slot.worker
        if slot.loading is None:
            slot.loading = asyncio.ensure_future(self._load(slot))
            # Its error is nobody's if all have left.
            slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(slot.loading)  # who leaves does not stop it for the others

    async def _load(self, slot: Slot) -> Worker:
        try:
            async with self._one_at_a_time:
                await self._make_room(slot)
                slot.memory = slot.need.least
                slot.worker = worker = await self._begin(slot)
                return worker
        except (ValueError, Overloaded, ShuttingDown):
            slot.memory = 0
            raise
        except Exception as error:
            slot.memory = 0
            log.exception("%s could not be loaded", slot.name)
            problem = f"{slot.name} could not be loaded: {type(error).__name__}: {str(error)[:500]}"
            raise ApiError(500, problem, code="model_not_loaded") from None
        finally:
            slot.loading = None

    async def _begin(self, slot: Slot) -> Worker:
        try:
            loaded = await asyncio.to_thread(self._read, slot)
        except (ValueError, FileNotFoundError) as error:  # something is wrong with its files
            raise ValueError(f"{slot.name} could not be loaded: {error}") from None
        if self._stopping:
            raise ShuttingDown("the server is stopping")
        weights, options = n_bytes(loaded.model), self.options
        tokens = options.cache_tokens or memory.pool_tokens(slot.need, options.max_rows, self._left(slot, weights) / 2)
        slot.memory = weights + slot.need.per_token * tokens
        limits = {"max_rows": options.max_rows, "queue": options.queue, "chunk": options.chunk}
        worker = Worker(loaded, cache_tokens=tokens, metrics=self.metrics, **limits)
        worker.start()
        self.metrics.model(slot.name).loaded(weights)
        return worker

    def _read(self, slot: Slot) -> Loaded:
        """In a thread of its own."""
        options = self.options
        loaded = load(slot.source, device=options.device, quantize=options.quantize)
        loaded.name = slot.name
        if options.quantize is None and loaded.model.device.type == "cpu":
            pack_as_stored(loaded.model)
        return loaded

    # --- memory ----------------------------------------------------------------------------------------------------

    def _left(self, slot: Slot, weights: int = 0) -> float:
        """Bytes of the budget that nobody has, if this model's are counted as so many."""
        others = sum(other.memory for other in self._slots.values() if other is not slot)
        return float("inf") if self.budget is None else self.budget - others - weights

    async def _make_room(self, slot: Slot) -> None:
        """Let go of models that nobody uses, the least recently used first, until this one fits."""
        while self._left(slot) < slot.need.least:
            idle = [other for other in self._slots.values() if self._is_idle(other)]
            if not idle:
                used = ", ".join(other.name for other in self._slots.values() if other.memory and other is not slot)
                raise Overloaded(f"there is no memory for {slot.name} while {used} is in use: try again later")
            await self._evict(idle[0])

    @staticmethod
    def _is_idle(slot: Slot) -> bool:
        return slot.worker is not None and not slot.borrowed and not slot.worker.busy

    async def _evict(self, slot: Slot) -> None:
        worker, slot.worker = slot.worker, None  # from here on, who asks waits for it to be loaded again
        if worker is None:
            return  # somebody else was faster
        await worker.stop()
        slot.memory = 0
        self.metrics.model(slot.name).unloaded()

    async def stop(self) -> None:
        """End all workers; requests that are left get ShuttingDown."""
        self._stopping = True
        loading = [slot.loading for slot in self._slots.values() if slot.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._evict(s) for s in self._slots.values() if s.worker is not None))


def _useful() -> list[str]:
    """The models that ship: those that write text first, then those that read it, then the others, for the page."""

    def place(name: str) -> int:
        path = shipped_models()[name]
        if not any((path / file).exists() for file in TOKENIZER_FILES):
            return 2
        return 0 if "generate" in memory.need_of(path).abilities else 1

    return sorted(shipped_models(), key=place)


def _written(path: Path) -> int:
    """When the newest of its files was written."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    return int(max((file.stat().st_mtime for file in files), default=0))
