"""Routes that change the engine; they exist with `enable_admin` only."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.http.errors import json_response
from penstock.server.protocol.responses import PrefixCacheReset, errors
from penstock.server.routes.common import served_model

router = APIRouter()


@router.post("/reset_prefix_cache", responses={200: {"model": PrefixCacheReset}, **errors(401, 500, 503)})
async def reset_prefix_cache(http: Request) -> Response:
    """Clear the prefix cache; `reset` is false, and nothing is done, while requests hold blocks."""
    return json_response({"reset": await served_model(http).engine.reset_prefix_cache()})
