"""Bodies of requests and answers of the routes by which a trainer sends weights, with vLLM's names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from penstock.server.protocol.base import StrictModel


class InitTransferRequest(StrictModel):
    """init_info: what the backend needs, such as master_address, master_port, rank_offset, world_size and packed."""

    init_info: dict[str, Any]


class StartUpdateRequest(StrictModel):
    """is_checkpoint_format: whether names and shapes are those of the model's checkpoint."""

    is_checkpoint_format: bool = True


class UpdateRequest(StrictModel):
    """update_info: names, dtype_names and shapes of the tensors, in the order in which they are sent; and what else the
    backend needs."""

    update_info: dict[str, Any]


class FinishUpdateRequest(StrictModel):
    """weight_version: number of the new weights, which outputs have; None counts."""

    weight_version: int | None = None


class WorldSize(BaseModel):
    world_size: int


class WeightTransferred(BaseModel):
    message: str
