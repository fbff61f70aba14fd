"""GET /metrics: counters, gauges and histograms for Prometheus. GET /health.

Every application has a registry of its own. A worker gets its model's `ModelMetrics` once and calls it from its own
thread, once per step: each method costs a lock and an addition.
"""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from heedful.serve.response_schema import Health

router = APIRouter()
TEXT_SCHEMA = {"schema": {"type": "string"}}

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """All metrics of one application."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"heedful_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"heedful_{name}", about, ("model",), registry=registry)

        def seconds(name: str, about: str, label: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"heedful_{name}_seconds", about, (label,), registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests answered", "path", "status")
        self.request_seconds = seconds("request", "From a request to the end of its answer", "path", REQUEST_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens read", "model")
        self.generated_tokens = counter("generated_tokens", "Tokens written", "model")
        self.cancelled = counter("cancelled_requests", "Requests whose client went away", "model")
        self.running = gauge("running_requests", "Requests being answered")
        self.waiting = gauge("waiting_requests", "Prompts in line")
        self.rows = gauge("running_rows", "Answers being read or written")
        self.max_rows = gauge("max_rows", "Answers that are written at once at most")
        self.preempted = counter("preempted_requests", "Requests interrupted for lack of cache", "model")
        self.first_token = seconds(
            "time_to_first_token", "From a request to its first token", "model", FIRST_TOKEN_BUCKETS
        )
        self.next_token = seconds("time_per_token", "From one token to the next", "model", TOKEN_BUCKETS)
        self.cache_used = gauge("cache_used_tokens", "Tokens that the cache holds")
        self.cache_size = gauge("cache_size_tokens", "Tokens that the cache has room for")
        self.cache_memory = gauge("cache_memory_bytes", "Memory that the cache takes when it is full")
        self.loaded = gauge("model_loaded", "1 while the model is in memory")
        self.memory = gauge("model_memory_bytes", "Memory of the model's weights")

    def model(self, name: str) -> ModelMetrics:
        """The metrics of one model."""
        return ModelMetrics(self, name)

    def request_finished(self, path: str, status: int, seconds: float) -> None:
        """Count a request; `path` is the route's template, so that clients cannot create labels."""
        self.requests.labels(path, str(status)).inc()
        self.request_seconds.labels(path).observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model, for its worker."""

    def __init__(self, all: Metrics, name: str) -> None:
        self._prompt, self._generated = all.prompt_tokens.labels(name), all.generated_tokens.labels(name)
        self._cancelled = all.cancelled.labels(name)
        self._running, self._waiting = all.running.labels(name), all.waiting.labels(name)
        self._rows, self._max_rows = all.rows.labels(name), all.max_rows.labels(name)
        self._preempted = all.preempted.labels(name)
        self._first, self._next = all.first_token.labels(name), all.next_token.labels(name)
        self._used, self._size = all.cache_used.labels(name), all.cache_size.labels(name)
        self._loaded, self._memory = all.loaded.labels(name), all.memory.labels(name)
        self._cache_memory = all.cache_memory.labels(name)

    def step(
        self,
        *,
        running: int,
        waiting: int,
        rows: int = 0,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        preempted: int = 0,
    ) -> None:
        """After a step of the engine: requests running and waiting now, and what this step did."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._rows.set(rows)
        if preempted:
            self._preempted.inc(preempted)
        if prompt_tokens:
            self._prompt.inc(prompt_tokens)
        if generated_tokens:
            self._generated.inc(generated_tokens)

    def first_token(self, seconds: float) -> None:
        """Time to first token of a request."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Time between two tokens; call it once per step, not per row."""
        self._next.observe(seconds)

    def cancelled(self) -> None:
        """Count a cancelled request."""
        self._cancelled.inc()

    def cache(self, used: int, size: int) -> None:
        """Tokens in the KV cache, and its capacity."""
        self._used.set(used)
        self._size.set(size)

    def loaded(self, memory: int, cache: int, max_rows: int = 0) -> None:
        """The model is loaded, with this many bytes of weights, at most so many of its KV cache, and rows."""
        self._loaded.set(1)
        self._max_rows.set(max_rows)
        self._memory.set(memory)
        self._cache_memory.set(cache)

    def unloaded(self) -> None:
        """The model was evicted."""
        sizes = self._memory, self._cache_memory, self._used, self._size
        for gauge in (self._loaded, self._running, self._waiting, self._rows, self._max_rows, *sizes):
            gauge.set(0)


@router.get("/health", response_model=Health)
async def health() -> Response:
    """Whether the server is up. It listens only once its first model is loaded."""
    return Response(b'{"status": "ok"}', media_type="application/json")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": TEXT_SCHEMA}}})
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    return Response(request.app.state.metrics.render(), headers={"content-type": CONTENT_TYPE})
