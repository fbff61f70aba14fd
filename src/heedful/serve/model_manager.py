"""The model manager: the served models by name, loaded on first use and evicted, the least recently used first, when
another needs their memory.

Names are fixed at the start, but for the runs of a folder, which come and go (`refresh_runs`). The name that a client
sends is looked up among them and never anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from heedful.kernels.accelerate import accelerate_as_stored, n_bytes
from heedful.kernels.cpu.memory import release_file
from heedful.loaded import Loaded, load
from heedful.serve.errors import ApiError, Overloaded, ShuttingDown
from heedful.serve.memory import MemoryEstimate, estimate_memory, kv_cache_tokens, memory_budget
from heedful.serve.metrics import Metrics
from heedful.serve.options import Options
from heedful.serve.runs_folder import newest_runs
from heedful.serve.worker import Worker
from heedful.weights.catalog import pulled_models
from heedful.weights.describe import format_bytes
from heedful.weights.folder import has_tokenizer
from heedful.weights.resolve import model_name, reject_pickle, resolve_model, shipped_models

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """A served model as clients see it."""

    id: str
    created: int  # when its files were written, in seconds since 1970
    abilities: tuple[str, ...]
    context_length: int | None  # the most tokens of a prompt and its answer, None if there is no limit
    loaded: bool


@dataclass(eq=False)
class ServedModel:
    """A served model, in memory or not."""

    name: str
    source: str | Path  # what to load
    path: Path  # where its files are
    estimate: MemoryEstimate
    created: int
    worker: Worker | None = None
    loading: asyncio.Task[Worker] | None = None
    memory: int = 0  # bytes, while it is loaded or being loaded
    n_users: int = 0  # requests that hold it


class ModelManager:
    """Loads, hands out and evicts models within a memory budget."""

    def __init__(self, names: Sequence[str], options: Options, metrics: Metrics) -> None:
        self.options, self.metrics = options, metrics
        self.budget = memory_budget(options.memory, options.device)
        self._models: dict[str, ServedModel] = {}  # the least recently used first
        for model in map(self._resolve, names) if names else self._default_models():
            text = str(model.source)
            if model.name in self._models:
                raise ValueError(f"two models are called {model.name!r}: name one of them, as other={text}")
            self._models[model.name] = model
        self._given = self.names = tuple(self._models)
        self._refreshing = asyncio.Lock()
        self._loading_lock = asyncio.Lock()  # one load or eviction at a time, so that the memory is counted right
        self._stopping = False

    def _resolve(self, text: str) -> ServedModel:
        name, given, source = text.partition("=")
        if not given or text in shipped_models() or Path(os.path.expanduser(text)).exists():
            name, source = "", text
        path = resolve_model(source)
        reject_pickle(path)
        if not path.is_dir() and path.suffix != ".gguf":
            raise ValueError(f"{path} is a single file: give its folder (with config.json), or a .gguf file")
        options = self.options
        how = options.quantize, options.cache_tokens, options.context_length, options.kv_cache
        estimate = estimate_memory(path, *how)
        estimate = estimate.divided(options.tensor_parallel)
        name = name or (model_name(source, path) if path.is_dir() else path.stem)
        if self.budget is not None and estimate.minimum > self.budget:
            raise ValueError(
                f"{name} needs {format_bytes(estimate.minimum)} (weights {format_bytes(estimate.weights)}, and room "
                f"for {estimate.context} tokens), and all models together may take {format_bytes(self.budget)}: "
                "allow more with --memory, or make the weights smaller with --quantize, the cache with --kv-cache"
            )
        return ServedModel(name, source, path, estimate, _modified(path))

    def _default_models(self) -> Iterator[ServedModel]:
        """All shipped models, and the pulled ones that can be served here."""
        yield from sorted(map(self._resolve, shipped_models()), key=_rank)
        for name in pulled_models():
            try:
                yield self._resolve(name)
            except ValueError as error:
                log.warning("%s was pulled and is not served: %s", name, error)

    async def refresh_runs(self) -> None:
        """Serve the runs of the runs folder as well, each with its best checkpoint so far. Only on a server that no
        other machine can reach, or that may train: nobody has named these models."""
        if not self.options.may_train:
            return
        async with self._refreshing:
            found = await asyncio.to_thread(newest_runs, Path(self.options.runs))
            for name in [name for name in self.names if name not in self._given and name not in found]:
                await self._replace(name, None)
            for name, (folder, checkpoint) in found.items():
                if name in self._given or (name in self._models and self._models[name].path == checkpoint):
                    continue
                try:
                    model = await asyncio.to_thread(self._resolve, f"{name}={folder}")
                except (ValueError, OSError):  # it is being written, or needs too much memory
                    continue
                await self._replace(name, model)
            runs = [name for name in found if name in self._models and name not in self._given]
            self.names = (*self._given, *runs)

    async def _replace(self, name: str, model: ServedModel | None) -> None:
        """Forget a model that nobody uses, for another if there is one."""
        before = self._models.get(name)
        if before is not None and (before.n_users or before.loading is not None):
            return  # next time
        self._models.pop(name, None)
        if model is not None:
            self._models[name] = model
        if before is not None:
            await self._evict(before)

    # --- lookup ----------------------------------------------------------------------------------------------------

    def info(self, name: str) -> ModelInfo:
        """What clients may know of a model. LookupError if it is not served."""
        model = self._find(name)
        estimate = model.estimate
        return ModelInfo(
            model.name, model.created, estimate.abilities, estimate.context_length, model.worker is not None
        )

    def path(self, name: str) -> Path:
        """Where the files of a served model are."""
        return self._find(name).path

    def run_of(self, name: str) -> str | None:
        """The name of the run in the runs folder that a model comes from; None if it is none of those."""
        return None if name in self._given else Path(self.source(name)).name

    def source(self, name: str) -> str:
        """What `heedful.load` finds a served model by, where this server was started."""
        return str(self._find(name).source)

    def _find(self, name: str | None) -> ServedModel:
        served = ", ".join(self.names[:20])
        if name is None and len(self._given) == 1:
            name = self._given[0]
        if name is None:
            raise LookupError(f"the request names no model, and several are served: {served}")
        if name not in self._models:
            raise LookupError(f"no model is called {name[:200]!r} here; served are: {served}")
        return self._models[name]

    # --- loading ---------------------------------------------------------------------------------------------------

    async def worker(self, name: str | None) -> Worker:
        """The model's worker, loaded if necessary. It may be evicted at the next `await`: see `acquire`."""
        async with self.acquire(name) as worker:
            return worker

    @asynccontextmanager
    async def acquire(self, name: str | None) -> AsyncIterator[Worker]:
        """The model's worker, which is not evicted within the block. LookupError: not served; Overloaded: no memory."""
        model = self._find(name)
        model.n_users += 1
        try:
            yield await self._ready(model)
        finally:
            model.n_users -= 1

    async def _ready(self, model: ServedModel) -> Worker:
        if self._stopping:
            raise ShuttingDown("the server is stopping")
        self._models[model.name] = self._models.pop(model.name)  # the most recently used
        if model.worker is not None:
            return model.worker
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._load(model))
            # Retrieve its exception even if all clients have left, or asyncio would log it.
            model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(model.loading)  # a client that leaves does not cancel it for the others

    async def _load(self, model: ServedModel) -> Worker:
        try:
            async with self._loading_lock:
                await self._evict_until_fits(model)
                model.memory = model.estimate.minimum
                model.worker = worker = await self._start_worker(model)
                return worker
        except (ValueError, Overloaded, ShuttingDown):
            model.memory = 0
            raise
        except Exception as error:
            model.memory = 0
            log.exception("%s could not be loaded", model.name)
            problem = f"{model.name} could not be loaded: {type(error).__name__}: {str(error)[:500]}"
            raise ApiError(500, problem, code="model_not_loaded") from None
        finally:
            model.loading = None

    async def _start_worker(self, model: ServedModel) -> Worker:
        try:
            loaded = await asyncio.to_thread(self._read_weights, model)
        except (ValueError, FileNotFoundError) as error:  # something is wrong with its files
            raise ValueError(f"{model.name} could not be loaded: {error}") from None
        if self._stopping:
            raise ShuttingDown("the server is stopping")
        weights, options = n_bytes(loaded.model), self.options
        available = self._available(model) - weights
        tokens = options.cache_tokens or kv_cache_tokens(model.estimate, options.max_rows, available / 2)
        model.memory = weights + model.estimate.per_token * tokens
        limits = {"max_rows": options.max_rows, "queue": options.queue, "chunk": options.chunk}
        worker = Worker(loaded, cache_tokens=tokens, step_time=options.step_time, metrics=self.metrics, **limits)
        worker.start()
        self.metrics.model(model.name).loaded(weights, model.memory - weights, options.max_rows)
        return worker

    def load_first(self) -> Loaded:
        """The first model, in a process that has a part of it and does not serve."""
        return self._read_weights(self._find(self.names[0]))

    def _read_weights(self, model: ServedModel) -> Loaded:
        """Load the weights; runs in a thread."""
        options = self.options
        parallel = options.tensor_parallel > 1
        loaded = load(
            model.source,
            device=options.device,
            quantize=options.quantize,
            context_length=options.context_length,
            kv_cache=options.kv_cache if model.estimate.per_token else None,
            tensor_parallel=parallel,
        )
        loaded.name = model.name
        _ = loaded.chat_eos_ids  # renders the chat template once: here, and not on the event loop
        if options.quantize is None and not parallel and loaded.model.device.type == "cpu":
            accelerate_as_stored(loaded.model)
        release_file(loaded.model)
        return loaded

    # --- memory ----------------------------------------------------------------------------------------------------

    def _available(self, model: ServedModel) -> float:
        """Bytes of the budget that the other models leave to this one."""
        others = sum(other.memory for other in self._models.values() if other is not model)
        return float("inf") if self.budget is None else self.budget - others

    async def _evict_until_fits(self, model: ServedModel) -> None:
        """Evict idle models, the least recently used first, until this one fits."""
        while self._available(model) < model.estimate.minimum:
            idle = [other for other in self._models.values() if self._is_idle(other)]
            if not idle:
                used = ", ".join(other.name for other in self._models.values() if other.memory and other is not model)
                raise Overloaded(f"there is no memory for {model.name} while {used} is in use: try again later")
            await self._evict(idle[0])

    @staticmethod
    def _is_idle(model: ServedModel) -> bool:
        return model.worker is not None and not model.n_users and not model.worker.busy

    async def _evict(self, model: ServedModel) -> None:
        worker, model.worker = model.worker, None  # from here on, a request loads it again
        if worker is None:
            return  # evicted meanwhile
        await worker.stop()
        model.memory = 0
        self.metrics.model(model.name).unloaded()

    async def stop(self) -> None:
        """Stop all workers; unfinished requests fail with ShuttingDown."""
        self._stopping = True
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._evict(model) for model in self._models.values() if model.worker is not None))


def _rank(model: ServedModel) -> int:
    """First those that continue a text, then those that translate it, read it, then the others."""
    if model.path.is_dir() and not has_tokenizer(model.path):
        return 3
    abilities = model.estimate.abilities
    return (1 if "translate" in abilities else 0) if "generate" in abilities else 2


def _modified(path: Path) -> int:
    """When the newest of a model's files was written, in seconds since 1970."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    return int(max((file.stat().st_mtime for file in files), default=0))
