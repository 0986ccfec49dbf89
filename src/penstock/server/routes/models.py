"""Routes of the served model: `/v1/models` and `/version`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.features.lora.request import LoRARequest
from penstock.server.http.errors import json_response
from penstock.server.protocol.responses import ModelCard, ModelList, Version, errors
from penstock.server.routes.common import served_model
from penstock.server.served_model import ServedModel
from penstock.version import __version__

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models", responses={200: {"model": ModelList}, **errors(401)})
async def list_models(http: Request) -> Response:
    """Names of the served model, and of its LoRA adapters."""
    model = served_model(http)
    adapters = [_adapter_card(model, adapter) for adapter in await model.adapters.all()]
    return json_response({"object": "list", "data": [*(_card(model, name) for name in model.names), *adapters]})


@router.get("/v1/models/{id:path}", responses={200: {"model": ModelCard}, **errors(401, 404)})
async def retrieve_model(id: str, http: Request) -> Response:
    """Retrieve a name of the served model, or a LoRA adapter."""
    model = await served_model(http).named(id)
    return json_response(_card(model, id) if model.adapter is None else _adapter_card(model, model.adapter))


@router.get("/version", responses={200: {"model": Version}})
async def version() -> Response:
    """Version of Penstock."""
    return json_response({"version": __version__})


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "penstock",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "tasks": model.tasks,
        "modalities": ["text", *model.tokenizer.media_markers],
    }


def _adapter_card(model: ServedModel, adapter: LoRARequest) -> dict[str, Any]:
    parent = adapter.base_model_name or model.base_name
    return {**_card(model, adapter.lora_name), "root": adapter.lora_path or "in memory", "parent": parent}
