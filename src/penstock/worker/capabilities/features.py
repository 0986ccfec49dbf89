"""The rows of the table: what an engine can do, and which option asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.config import EngineConfig
from penstock.config.quantized_checkpoint import AWQ, COMPRESSED_TENSORS, GPTQ, TORCHAO, quantization_of_checkpoint

# The option that asks for a feature, as given; None in an engine that does not ask.
Asked: TypeAlias = Callable[[EngineConfig], str | None]


@dataclass(frozen=True, slots=True)
class Feature:
    """name: for people. asked: None where requests and calls ask for it, of any engine that runs, or the kind of engine
    does, of which no option says anything (`check_feature`).
    """

    name: str
    asked: Asked | None = None


def _option(option: str, value: Callable[[EngineConfig], object], *wanted: object) -> Asked:
    """Asked for by one of these values of an option."""
    return lambda config: f"{option}={value(config)!r}" if value(config) in wanted else None


def _quantization(bits: str) -> Asked:
    return _option("quantization", lambda config: config.model.quantization, bits)


def _checkpoint(method: str) -> Asked:
    def asked(config: EngineConfig) -> str | None:
        is_it = quantization_of_checkpoint(config.model.hf_config) == method
        return f"quant_method={method!r}" if is_it else None

    return asked


def _method(*methods: str) -> Asked:
    def asked(config: EngineConfig) -> str | None:
        method = config.speculative.method
        return f"speculative_config={{'method': {method!r}}}" if method in methods else None

    return asked


def _adaptive(config: EngineConfig) -> str | None:
    is_it = config.speculative.method is not None and config.speculative.adaptive
    return "speculative_config={'adaptive': True}" if is_it else None


def _other_cache_dtype(config: EngineConfig) -> str | None:
    """Than what a GPU computes in; a CPU computes in float32 mostly, and takes any."""
    wanted = config.cache.kv_cache_dtype
    if wanted in ("auto", "int8"):
        return None
    from penstock.device.dtypes import choose_cuda_dtype

    computed_in = choose_cuda_dtype(config.model.dtype, config.model.checkpoint_dtype).name
    return None if wanted == computed_in else f"kv_cache_dtype={wanted!r}"


def _calibration(config: EngineConfig) -> str | None:
    path = config.model.calibration_file
    return None if path is None else f"quantization_calibration={str(path)!r}"


def _fallback(config: EngineConfig) -> str | None:
    from penstock.models.registry import runs_through_transformers

    return f"{config.model.architecture} of Transformers" if runs_through_transformers(config.model) else None


def _architecture(*names: str) -> Asked:
    return lambda config: config.model.architecture if config.model.architecture in names else None


SERVED = Feature("AsyncEngine, streaming input")
GPT2 = Feature("GPT-2", _architecture("GPT2LMHeadModel"))
FALLBACK = Feature("Transformers fallback", _fallback)
INT8_CACHE = Feature("int8 KV cache", _option("kv_cache_dtype", lambda config: config.cache.kv_cache_dtype, "int8"))
OTHER_CACHE = Feature("KV cache of another dtype than the model's", _other_cache_dtype)
INT8 = Feature("int8 quantization", _quantization("int8"))
INT4 = Feature("int4 quantization", _quantization("int4"))
CALIBRATED = Feature("int4 with GPTQ calibration", _calibration)
QUANTIZED_CHECKPOINTS = tuple(
    Feature(f"{name} checkpoints", _checkpoint(method))
    for name, method in (
        ("GPTQ", GPTQ),
        ("AWQ", AWQ),
        ("compressed-tensors", COMPRESSED_TENSORS),
        ("torchao", TORCHAO),
    )
)
SUFFIX = Feature("suffix decoding", _method("suffix"))
DRAFT_MODEL = Feature("draft models", _method("draft_model"))
HEADS = Feature("EAGLE and MTP heads", _method("eagle", "mtp"))
EAGLE3 = Feature("EAGLE-3", _method("eagle3"))
ADAPTIVE = Feature("adaptive draft length", _adaptive)

# By what they are part of.
FEATURES: dict[str, tuple[Feature, ...]] = {
    "requests": (
        Feature("sampling"),
        Feature("penalties"),
        Feature("bad words, logit bias, allowed tokens, min_tokens"),
        Feature("thinking budgets"),
        Feature("log-probabilities"),
        Feature("prompt log-probabilities"),
        Feature("parallel sampling (n > 1)"),
        Feature("beam search"),
        Feature("structured outputs"),
        SERVED,
        Feature("custom logits processors", lambda c: "logits_processors" if c.sampling.logits_processors else None),
    ),
    "scheduling": (
        Feature("chunked prefill"),
        Feature("prefix caching"),
        Feature("preemption"),
        Feature("asynchronous scheduling", _option("async_scheduling", lambda c: c.scheduler.async_scheduling, True)),
        Feature("priorities", _option("policy", lambda config: config.scheduler.policy, "priority")),
    ),
    "models": (Feature("Penstock's decoder models"), GPT2, FALLBACK),
    "weights and KV cache": (
        Feature("bfloat16 weights", _option("dtype", lambda config: config.model.dtype, "bfloat16")),
        INT8,
        INT4,
        CALIBRATED,
        *QUANTIZED_CHECKPOINTS,
        INT8_CACHE,
        OTHER_CACHE,
    ),
    "speculation": (Feature("n-gram speculation", _method("ngram")), SUFFIX, DRAFT_MODEL, HEADS, EAGLE3, ADAPTIVE),
    "calls": (
        Feature("collective_rpc, worker extensions"),
        Feature("weight reloading"),
        Feature("sharded state"),
        Feature("profiling", lambda config: "profiler_dir" if config.profiler.profiler_dir else None),
    ),
}
