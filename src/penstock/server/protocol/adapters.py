"""Bodies of requests and answers of the routes that load and unload LoRA adapters, with vLLM's names."""

from __future__ import annotations

from pydantic import BaseModel, Field

from penstock.server.protocol.base import StrictModel


class LoadAdapterRequest(StrictModel):
    """lora_path: folder of the server's machine, in PEFT's format. load_inplace: load it again if it is there."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapterRequest(StrictModel):
    """lora_int_id: accepted, and not needed."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


class AdapterLoaded(BaseModel):
    loaded: str


class AdapterUnloaded(BaseModel):
    unloaded: str
