"""The ASGI application: routes, middleware, exception handlers, and /openapi.json."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from heedful import __version__
from heedful.serve import (
    chat,
    completions,
    embeddings,
    errors,
    messages,
    metrics,
    models,
    playground,
    responses,
    tokenize,
)
from heedful.serve.middleware import OPEN_PATHS, RequestMiddleware
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.serve.playground.inspection import Inspectors
from heedful.serve.playground.lesson_process import LessonProcesses
from heedful.serve.playground.training import TrainingProcess
from heedful.serve.response_store import ResponseStore

ABOUT = "OpenAI's API, and Anthropic's messages, on models of the whole Transformer family."
# FastAPI's tracing would record request bodies wherever OpenTelemetry is set up; they are private.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def create_app(manager: ModelManager, options: Options) -> FastAPI:
    """The application that serves the models of a manager, which it stops at shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await app.state.training.stop()
        await app.state.lesson_processes.stop()
        await manager.stop()

    app = FastAPI(
        title="heedful",
        version=__version__,
        description=ABOUT,
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=errors.error_responses(*errors.DESCRIPTIONS),
        telemetry=NO_TELEMETRY,
    )
    app.state.manager, app.state.options, app.state.metrics = manager, options, manager.metrics
    app.state.inspectors, app.state.training = Inspectors(), TrainingProcess(options)
    app.state.lesson_processes = LessonProcesses()
    app.state.responses = ResponseStore()
    for module in (completions, chat, responses, messages, embeddings, models, tokenize, metrics, playground):
        app.include_router(module.router)
    app.add_exception_handler(errors.ApiError, errors.api_error_handler)
    app.add_exception_handler(HTTPException, errors.http_error_handler)
    app.add_exception_handler(RequestValidationError, errors.validation_error_handler)
    app.add_middleware(RequestMiddleware, options=options, metrics=manager.metrics)
    app.openapi = lambda: openapi(app, options)  # type: ignore[method-assign]
    return app


def openapi(app: FastAPI, options: Options) -> dict[str, Any]:
    """The OpenAPI schema, made once; without FastAPI's 422, since validation errors are 400 here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if options.api_keys and path in OPEN_PATHS:
                    operation["security"] = []
        components = schema.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(name, None)
        if options.api_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
