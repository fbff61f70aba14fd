"""GET /v1/models and /v1/models/{id}: the served models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from heedful.serve.errors import client_errors
from heedful.serve.model_manager import ModelInfo
from heedful.serve.response_schema import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
async def list_models(http: HttpRequest) -> dict[str, Any]:
    """List the served models."""
    manager = http.app.state.manager
    return {"object": "list", "data": [model_card(manager.info(name)) for name in manager.names]}


@router.get("/v1/models/{id:path}", response_model=ModelCard)
async def retrieve_model(http: HttpRequest, id: str) -> dict[str, Any]:
    """Describe one of the served models."""
    with client_errors():
        return model_card(http.app.state.manager.info(id))


def model_card(info: ModelInfo) -> dict[str, Any]:
    """A model in OpenAI's format, with its abilities, its context length (`max_model_len` as in vLLM) and whether it
    is loaded."""
    return {
        "id": info.id,
        "object": "model",
        "created": info.created,
        "owned_by": "heedful",
        "abilities": info.abilities,
        "context_length": info.context_length,
        "max_model_len": info.context_length,
        "loaded": info.loaded,
    }
