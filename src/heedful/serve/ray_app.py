"""`heedful serve` behind Ray Serve: replicas of the application, as many as a configuration or the load asks for.

    applications:
      - name: heedful
        import_path: heedful.serve.ray_app:build
        args: {models: [chat]}

`args` are the options of `heedful serve`, by the names of `heedful.serve.options`. Ray's proxy has the port and the
connections; each replica has its own models, engine, queue and metrics. A replica cannot know who reaches the proxy: it
asks for an API key unless `host` says that the proxy listens on 127.0.0.1.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve

from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options


def build(args: dict[str, Any]) -> serve.Application:
    """The application that a configuration names; ValueError for options that there are not."""
    return deployment(replica_options(args)).bind()


def deployment(options: Options) -> serve.Deployment:
    """The application as a deployment; the number of its replicas is Ray's to say."""

    def create() -> FastAPI:
        return replica_app(options)

    # Ray's default, 5 requests at once, would leave the engine's batch empty.
    most = options.max_rows + options.queue
    return serve.deployment(name="heedful", max_ongoing_requests=most)(serve.ingress(create)())


def replica_options(args: dict[str, Any]) -> Options:
    """The options of a replica; the keys are those given, or that of the environment."""
    known = Options.__dataclass_fields__
    if unknown := sorted(set(args) - set(known)):
        raise ValueError(f"heedful serve has no option {', '.join(unknown)}; it has {', '.join(known)}")
    given: dict[str, Any] = {"host": "0.0.0.0"}
    given |= {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    if "api_keys" not in given and "HEEDFUL_API_KEY" in os.environ:
        given["api_keys"] = (os.environ["HEEDFUL_API_KEY"],)
    options = Options(**given)
    options.check_exercises()
    options.check_public()
    return options


def replica_app(options: Options) -> FastAPI:
    """The application of a replica, which has loaded its first model when it starts."""
    manager = ModelManager(options.models, options, Metrics())
    app = create_app(manager, options)
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def load_first(app: FastAPI) -> AsyncIterator[Any]:
        if not options.lazy:
            await manager.worker(manager.names[0])
        async with lifespan(app) as state:
            yield state

    app.router.lifespan_context = load_first
    return app
