"""The ASGI application: all routes, the guard around them, errors in one shape, and a truthful /openapi.json."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from heedful import __version__
from heedful.serve import chat, completions, embeddings, errors, metrics, models, playground, tokenize
from heedful.serve.metrics import Metrics
from heedful.serve.middleware import OPEN_PATHS, Middleware
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.serve.playground.desk import Desks

ABOUT = "OpenAI's API on models of the whole Transformer family."
# FastAPI's own tracing would note the bodies of requests wherever OpenTelemetry is set up; ours are private.
NO_TRACES: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def create_app(manager: ModelManager, options: Options, counts: Metrics | None = None) -> FastAPI:
    """The server's application for the models of a manager, which it stops at its own end."""
    counts = counts or getattr(manager, "metrics", None) or Metrics()

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await manager.stop()

    app = FastAPI(
        title="heedful",
        version=__version__,
        description=ABOUT,
        docs_url=None,  # its page would come from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=life,
        responses=errors.error_responses(*errors.DESCRIPTIONS),
        telemetry=NO_TRACES,
    )
    app.state.manager, app.state.options, app.state.metrics = manager, options, counts
    app.state.desks = Desks()
    for part in (completions, chat, embeddings, models, tokenize, metrics, playground):
        app.include_router(part.router)
    app.add_exception_handler(errors.ApiError, errors.api_error_handler)
    app.add_exception_handler(HTTPException, errors.http_error_handler)
    app.add_exception_handler(RequestValidationError, errors.validation_error_handler)
    app.add_middleware(Middleware, options=options, metrics=counts)
    app.openapi = lambda: openapi(app, options)  # type: ignore[method-assign]
    return app


def openapi(app: FastAPI, options: Options) -> dict[str, Any]:
    """The schema of the API, made once; without FastAPI's 422, which our 400 stands for."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if options.api_keys and path in OPEN_PATHS:
                    operation["security"] = []
        parts = schema.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.get("schemas", {}).pop(name, None)
        if options.api_keys:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
