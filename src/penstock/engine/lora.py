"""LoRA adapter of a request, as programs written for vLLM name it. Engines refuse it until they have adapters."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter.

    lora_name: for people. lora_int_id: its number, from 1 on. lora_path: a folder with the adapter in PEFT's format.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
