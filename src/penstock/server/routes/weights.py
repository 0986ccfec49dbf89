"""Routes by which a trainer sends weights to the running engine, with vLLM's names; they exist as `ServerOptions` says.

Their errors have statuses that clients do not repeat: a call that the engine's state refuses gets 409.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.errors import (
    ConfigError,
    EngineAsleep,
    LifecycleError,
    ModelError,
    UnsupportedFeature,
    WaitTimeout,
    WeightTransferFailed,
)
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response
from penstock.server.protocol.responses import errors
from penstock.server.protocol.weights import (
    FinishUpdateRequest,
    InitTransferRequest,
    StartUpdateRequest,
    UpdateRequest,
    WeightTransferred,
    WorldSize,
)
from penstock.server.routes.common import served_model

router = APIRouter(route_class=BodyRoute)
_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"model": WeightTransferred}, **errors(400, 401, 409, 500)}


@router.get("/get_world_size", responses={200: {"model": WorldSize}, **errors(401)})
async def get_world_size(http: Request) -> Response:
    """Number of workers that get weights: of all engines, stages and shares."""
    parallel = served_model(http).engine.config.parallel
    return json_response({"world_size": parallel.world_size * parallel.data_parallel_size})


@router.post("/init_weight_transfer_engine", responses=_RESPONSES)
async def init_weight_transfer_engine(request: InitTransferRequest, http: Request) -> Response:
    """Let the workers join the trainer's group; answers when all ranks are there."""
    with _refusals():
        await served_model(http).engine.init_weight_transfer_engine({"init_info": request.init_info})
    return json_response({"message": "Weight transfer initialized"})


@router.post("/start_weight_update", responses=_RESPONSES)
async def start_weight_update(http: Request, request: StartUpdateRequest | None = None) -> Response:
    """Begin an update, whose tensors `/update_weights` announces."""
    asked = request or StartUpdateRequest()
    with _refusals():
        await served_model(http).engine.start_weight_update(is_checkpoint_format=asked.is_checkpoint_format)
    return json_response({"message": "Weight update started"})


@router.post("/update_weights", responses=_RESPONSES)
async def update_weights(request: UpdateRequest, http: Request) -> Response:
    """Receive the announced tensors; answers when the workers have them."""
    with _refusals():
        await served_model(http).engine.update_weights({"update_info": request.update_info})
    return json_response({"message": "Weights updated"})


@router.post("/finish_weight_update", responses=_RESPONSES)
async def finish_weight_update(http: Request, request: FinishUpdateRequest | None = None) -> Response:
    """End an update: the engine runs with the new weights."""
    version = None if request is None else request.weight_version
    with _refusals():
        await served_model(http).engine.finish_weight_update(version)
    return json_response({"message": "Weight update finished"})


@contextmanager
def _refusals() -> Iterator[None]:
    """Answer 400 for what is not valid, and 409 for what the state of the engine, or of the trainer, does not allow."""
    try:
        yield
    except (ConfigError, UnsupportedFeature) as error:
        raise ApiError(400, str(error)) from error
    except (EngineAsleep, LifecycleError, ModelError, WeightTransferFailed, WaitTimeout) as error:
        raise ApiError(409, str(error), code="weight_update_refused") from error
