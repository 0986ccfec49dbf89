"""Helpers that scripts of vLLM's import beside an engine; `config/vllm.toml` says from where."""

from __future__ import annotations

import enum
import functools
import gc
import logging
import socket
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.system import env

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Values of variables of vLLM's; those without a meaning here have its default.
_VARIABLES: dict[str, Callable[[], Any]] = {
    "VLLM_API_KEY": lambda: next(iter(env.api_keys()), None),
    "VLLM_CACHE_ROOT": lambda: str(env.cache_folder()),
    "VLLM_HOST_IP": str,
    "VLLM_LOGGING_LEVEL": env.log_level,
    "VLLM_PLUGINS": env.allowed_plugins,
    "VLLM_PORT": lambda: None,
    "VLLM_USE_MODELSCOPE": bool,
    "VLLM_USE_V1": lambda: True,
}


def __getattr__(name: str) -> Any:
    if name not in _VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return _VARIABLES[name]()


class UsageContext(enum.StrEnum):
    """Kind of program that starts an engine; it has no effect."""

    UNKNOWN_CONTEXT = enum.auto()
    LLM_CLASS = enum.auto()
    API_SERVER = enum.auto()
    OPENAI_API_SERVER = enum.auto()
    OPENAI_BATCH_RUNNER = enum.auto()
    ENGINE_CONTEXT = enum.auto()


def init_logger(name: str) -> logging.Logger:
    """Python's logger of this name, with `debug_once`, `info_once` and `warning_once`, which pass over repetitions."""
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", functools.cache(getattr(logger, level)))
    return logger


def random_uuid() -> str:
    """New id for a request."""
    return uuid.uuid4().hex


def get_ip() -> str:
    """Address of this machine on the route to others; that of the machine itself without a route."""
    from penstock.parallel.connections import address_towards

    try:
        # Of a public name server; nothing is sent.
        return address_towards("8.8.8.8", 80)
    except OSError:
        return "127.0.0.1"


def get_open_port() -> int:
    """Port of TCP that is free now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


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


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Any = None, **_: Any
) -> str | None:
    """Chat template of a tokenizer, unless one is given; None for a tokenizer without."""
    if chat_template is not None or tokenizer.chat_template is None:
        return chat_template
    template: str = tokenizer.get_chat_template(chat_template, tools)
    return template
