"""Helpers that scripts of vLLM's import beside an engine; `config/vllm.toml` says from where."""

from __future__ import annotations

import enum
import gc
import sys
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class UsageContext(enum.StrEnum):
    """Kind of program that starts an engine; it has no effect."""

    UNKNOWN_CONTEXT = enum.auto()
    LLM_CLASS = enum.auto()
    API_SERVER = enum.auto()
    OPENAI_API_SERVER = enum.auto()
    OPENAI_BATCH_RUNNER = enum.auto()
    ENGINE_CONTEXT = enum.auto()


def random_uuid() -> str:
    """New id for a request."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect engines that were dropped, and give cached GPU memory back.

    shutdown_ray: disconnect from Ray, too.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if shutdown_ray and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def destroy_model_parallel() -> None:
    """Do nothing: groups of ranks belong to their engine, and end with it."""


def get_tokenizer(tokenizer_name: str, *, revision: str | None = None, **_: Any) -> PreTrainedTokenizerBase:
    """Tokenizer of a model, as Transformers loads it. tokenizer_name: "demo", a folder, or a hub id."""
    from penstock.checkpoints.hf_tokenizer import load_hf_tokenizer
    from penstock.checkpoints.resolve import resolve_model_folder

    return load_hf_tokenizer(resolve_model_folder(tokenizer_name, revision, option="tokenizer_name"))
