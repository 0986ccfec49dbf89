"""Routes that change the engine; they exist with `enable_admin` only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.errors import ConfigError, EngineAsleep, LifecycleError
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.adapters import AdapterLoaded, AdapterUnloaded, LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.protocol.profiles import StartProfileRequest
from penstock.server.protocol.responses import (
    PrefixCacheReset,
    ProfileStarted,
    ProfileStopped,
    errors,
)
from penstock.server.protocol.tokens import AbortRequest
from penstock.server.routes.common import served_model
from penstock.server.served_model import ServedModel
from penstock.version import __version__

router = APIRouter(route_class=BodyRoute)


@router.post("/reset_prefix_cache", responses={200: {"model": PrefixCacheReset}, **errors(401, 500, 503)})
async def reset_prefix_cache(http: Request) -> Response:
    """Clear the prefix cache; `reset` is false, and nothing is done, while requests hold blocks."""
    return json_response({"reset": await served_model(http).engine.reset_prefix_cache()})


@router.post("/reset_mm_cache", responses={200: {"description": "It is reset."}, **errors(401, 500, 503)})
async def reset_mm_cache(http: Request) -> Response:
    """Forget what this front end has made of images, audio and videos of earlier requests."""
    await served_model(http).engine.reset_mm_cache()
    return Response()


@router.post("/reset_encoder_cache", responses={200: {"description": "It is reset."}, **errors(401, 500, 503)})
async def reset_encoder_cache(http: Request) -> Response:
    """Drop the encoders' outputs that the workers keep."""
    await served_model(http).engine.reset_encoder_cache()
    return Response()


@router.post("/abort_requests", responses={200: {"description": "They are aborted."}, **errors(400, 401, 500, 503)})
async def abort_requests(request: AbortRequest, http: Request) -> Response:
    """End requests by the ids of their responses; those that this front end does not run are ignored."""
    await served_model(http).engine.abort(request.request_ids)
    return Response()


@router.get("/server_info", responses={200: {"description": "Options of the engine."}, **errors(400, 401)})
async def server_info(http: Request, config_format: Literal["text", "json"] = "text") -> Response:
    """Version, that of the weights, and the engine's options by section: as text, or as data, where trainers find some
    by vLLM's names.
    """
    engine = served_model(http).engine
    config = engine.config
    shown = str(config) if config_format == "text" else {**_as_data(config), **_as_vllms(served_model(http))}
    version = await engine.get_weight_version()
    return json_response({"version": __version__, "weight_version": version, "vllm_config": shown})


def _as_vllms(model: ServedModel) -> dict[str, Any]:
    """Options that trainers read, in the places where vLLM's server has them."""
    config = model.engine.config
    dtype = config.model.checkpoint_dtype if config.model.dtype == "auto" else config.model.dtype
    return {
        "model_config": {
            "model": str(config.model.model),
            "dtype": f"torch.{dtype}",
            "max_model_len": model.max_model_len,
            "logprobs_mode": config.sampling.logprobs_mode,
            "max_logprobs": config.sampling.max_logprobs,
        },
        "weight_transfer_config": config.weight_transfer.weight_transfer_config,
    }


def _as_data(config: Any) -> dict[str, Any]:
    """Fields of options that are shown, as JSON data."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.repr}
    return {name: _as_data(one) if dataclasses.is_dataclass(one) else _plain(one) for name, one in fields.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return {str(name): _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else str(value)


@router.post("/start_profile", responses={200: {"model": ProfileStarted}, **errors(400, 401, 500, 503)})
async def start_profile(http: Request, request: StartProfileRequest | None = None) -> Response:
    """Start a profile of all workers; the server needs `--profiler-dir`."""
    await _profile(http, {"is_start": True, "profile_prefix": None if request is None else request.profile_prefix})
    return json_response({"started": True})


@router.post("/stop_profile", responses={200: {"model": ProfileStopped}, **errors(400, 401, 500, 503)})
async def stop_profile(http: Request) -> Response:
    """Stop the profile, and write its traces."""
    answers = await _profile(http, {"is_start": False})
    return json_response({"paths": [path for path in answers if path is not None]})


@router.post("/v1/load_lora_adapter", responses={200: {"model": AdapterLoaded}, **errors(400, 401, 409, 500, 503)})
async def load_lora_adapter(request: LoadAdapterRequest, http: Request) -> Response:
    """Load a LoRA adapter, which requests select by its name as `model`."""
    with refusals(type(request).model_fields):
        adapters = served_model(http).adapters
        try:
            await adapters.load(request.lora_name, request.lora_path, load_inplace=request.load_inplace)
        except EngineAsleep as error:
            raise ApiError(409, str(error), code="engine_asleep") from error
    return json_response({"loaded": request.lora_name})


@router.post("/v1/unload_lora_adapter", responses={200: {"model": AdapterUnloaded}, **errors(400, 401, 404, 500, 503)})
async def unload_lora_adapter(request: UnloadAdapterRequest, http: Request) -> Response:
    """Unload a LoRA adapter; running requests keep it until they end."""
    with refusals(type(request).model_fields):
        await served_model(http).adapters.unload(request.lora_name)
    return json_response({"unloaded": request.lora_name})


async def _profile(http: Request, arguments: Mapping[str, Any]) -> list[str | None]:
    """Call `profile` of all workers. A call that they refuse gets 400."""
    try:
        answers: list[str | None] = await served_model(http).engine.collective_rpc("profile", kwargs=dict(arguments))
    except (ConfigError, LifecycleError) as error:
        raise ApiError(400, str(error)) from error
    return answers
