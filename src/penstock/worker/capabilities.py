"""Combinations of options that an engine refuses at start, and worker methods that are not implemented yet.

Everything else works with everything. `penstock env --capabilities` and docs/capabilities.md show the refusals;
`tests/worker/test_capabilities.py` starts each of them, and runs what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.errors import UnsupportedArgument, UnsupportedFeature


@dataclass(frozen=True, slots=True)
class Option:
    """Option of an engine. name: for tables. given: the option as the user wrote it; None if the engine lacks it."""

    name: str
    given: Callable[[EngineConfig], str | None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refused combination of options. why: a clause. instead: a sentence. device: "cuda", "cpu", or None for all."""

    options: tuple[Option, ...]
    why: str
    instead: str
    device: str | None = None

    def message(self, config: EngineConfig) -> str | None:
        """Return the error text, whatever the device; None if the configuration lacks one of the options."""
        given = [option.given(config) for option in self.options]
        if None in given:
            return None
        on = "" if self.device is None else f" on {self.device}"
        return f"{' with '.join(map(str, given))}{on}: {self.why}. {self.instead}"


def _size(name: str, option: str) -> Option:
    def given(config: EngineConfig) -> str | None:
        value = getattr(config.parallel, option)
        return None if value == 1 else f"{option}={value}"

    return Option(name, given)


def _method(name: str, method: str) -> Option:
    text = f"speculative_config={{'method': {method!r}}}"
    return Option(name, lambda config: text if config.speculative.method == method else None)


def _core_process(config: EngineConfig) -> str | None:
    if not config.parallel.has_core_process:
        return None
    is_several = config.parallel.num_engines_here > 1
    return f"data_parallel_size={config.parallel.data_parallel_size}" if is_several else "enable_multiprocessing=True"


def _adaptive(config: EngineConfig) -> str | None:
    is_given = config.speculative.method is not None and config.speculative.adaptive
    return "speculative_config={'adaptive': True}" if is_given else None


def _transformers(config: EngineConfig) -> str | None:
    from penstock.models.registry import runs_through_transformers

    return f"{config.model.architecture} of Transformers" if runs_through_transformers(config.model) else None


def _latents(config: EngineConfig) -> str | None:
    from penstock.models.registry import LATENT_ATTENTION

    return _native_one_of(LATENT_ATTENTION, config)


def _without_attention(config: EngineConfig) -> str | None:
    from penstock.models.registry import WITHOUT_ATTENTION

    return _native_one_of(WITHOUT_ATTENTION, config)


def _native_one_of(architectures: Container[str], config: EngineConfig) -> str | None:
    from penstock.models.registry import runs_through_transformers

    architecture = config.model.architecture
    is_native = architecture in architectures and not runs_through_transformers(config.model)
    return architecture if is_native else None


def _pooling(config: EngineConfig) -> str | None:
    return None if config.model.pooling is None else f"runner='pooling' ({config.model.architecture})"


def _head_that_pools(config: EngineConfig) -> str | None:
    return f"output_head={config.model.output_head!r}" if config.model.pools else None


def _whole_texts(config: EngineConfig) -> str | None:
    pooling = config.model.pooling
    is_whole = pooling is not None and not pooling.is_pooled_in_chunks
    return f"{config.model.architecture} (attention over whole texts)" if is_whole else None


def _drafts(config: EngineConfig) -> str | None:
    method = config.speculative.method
    return None if method is None else f"speculative_config={{'method': {method!r}}}"


def _int8_cache(config: EngineConfig) -> str | None:
    return "kv_cache_dtype='int8'" if config.cache.kv_cache_dtype == "int8" else None


def _calibration(config: EngineConfig) -> str | None:
    path = config.model.calibration_file
    return None if path is None else f"quantization_calibration={str(path)!r}"


def _float8_cache(config: EngineConfig) -> str | None:
    """Return the dtype, unless the attention backend is given by name, which is asked itself."""
    is_open = config.device.attention_backend is None
    return "kv_cache_dtype='fp8'" if config.cache.kv_cache_dtype == "fp8" and is_open else None


def _cache_dtype(config: EngineConfig) -> str | None:
    """Return a KV cache dtype other than the compute dtype of a GPU, and than FP8."""
    wanted = config.cache.kv_cache_dtype
    if wanted in ("auto", "fp8"):
        return None
    from penstock.device.dtypes import choose_cuda_dtype

    computed_in = choose_cuda_dtype(config.model.dtype, config.model.checkpoint_dtype).name
    return None if wanted == computed_in else f"kv_cache_dtype={wanted!r}"


def _torchrun(config: EngineConfig) -> str | None:
    is_given = config.parallel.executor == "external_launcher"
    return "distributed_executor_backend='external_launcher'" if is_given else None


def _offload(config: EngineConfig) -> str | None:
    return f"cpu_offload_gb={config.load.cpu_offload_gb!r}" if config.load.cpu_offload_gb else None


TP = _size("TP", "tensor_parallel_size")
PP = _size("PP", "pipeline_parallel_size")
DCP = _size("DCP", "decode_context_parallel_size")
SP = Option("SP", lambda config: "enable_sp" if config.parallel.enable_sp else None)
TORCHRUN = Option("torchrun", _torchrun)
CORE_PROCESS = Option("core process", _core_process)
ASYNC_ENGINE = Option("AsyncEngine", lambda _: "AsyncEngine")
TRANSFORMERS = Option("Transformers models", _transformers)
GPT2 = Option("GPT-2", lambda config: name if (name := config.model.architecture) == "GPT2LMHeadModel" else None)
LATENTS = Option("latent attention", _latents)
WITHOUT_ATTENTION = Option("models without attention", _without_attention)
INT8_CACHE = Option("int8 KV cache", _int8_cache)
SINKS = Option(
    "attention sinks", lambda config: name if (name := config.model.architecture) == "GptOssForCausalLM" else None
)
CALIBRATED = Option("int4 with GPTQ calibration", _calibration)
CACHE_DTYPE = Option("KV cache of another dtype than the model's", _cache_dtype)
FLOAT8_CACHE = Option("FP8 KV cache", _float8_cache)
OFFLOAD = Option("weights in files", _offload)
BATCH_INVARIANT = Option(
    "batch invariance", lambda config: "batch_invariant=True" if config.model.batch_invariant else None
)
MOE_BACKEND = Option(
    "torch's products of experts",
    lambda config: None if config.model.moe_backend == "auto" else f"moe_backend={config.model.moe_backend!r}",
)
POOLING = Option("pooling", _pooling)
POOLS = Option("output heads that pool", _head_that_pools)
WHOLE_TEXTS = Option("pooling of whole texts", _whole_texts)
ENCODER_DECODER = Option(
    "encoder-decoder models",
    lambda config: config.model.architecture if config.model.is_encoder_decoder else None,
)
DRAFTS = Option("speculative decoding", _drafts)
SUFFIX = _method("suffix decoding", "suffix")
EAGLE = _method("EAGLE", "eagle")
EAGLE3 = _method("EAGLE-3", "eagle3")
ADAPTIVE = Option("adaptive draft lengths", _adaptive)

_NO_NCCL = "workers of one model exchange tensors in the memory of CPUs so far"
_NO_HIDDEN_STATES = "the drafter reads hidden states of its layers, which it does not give"
_BETWEEN_STEPS = "requests would reach the ranks' engines between different steps"

# Checked when an `AsyncEngine` is created.
ASYNC_REFUSALS = (Refusal((TORCHRUN, ASYNC_ENGINE), _BETWEEN_STEPS, "Use LLM."),)
# Checked for every engine.
REFUSALS = (
    Refusal((TP,), _NO_NCCL, "Use device='cpu', or tensor_parallel_size=1.", "cuda"),
    Refusal((PP,), _NO_NCCL, "Use device='cpu', or pipeline_parallel_size=1.", "cuda"),
    Refusal(
        (TP, TRANSFORMERS),
        "its layers are those of Transformers, which are not split over workers",
        "Use tensor_parallel_size=1.",
    ),
    Refusal(
        (PP, TRANSFORMERS),
        "its layers are those of Transformers, which are not split into pipeline stages",
        "Use pipeline_parallel_size=1.",
    ),
    Refusal(
        (DCP, GPT2),
        "each of its query heads has a KV head of its own, so no two workers have the same KV heads",
        "Leave decode_context_parallel_size out.",
    ),
    Refusal(
        (DCP, LATENTS),
        "its cache of latents is not sharded by positions yet",
        "Leave decode_context_parallel_size out.",
    ),
    Refusal(
        (DCP, WITHOUT_ATTENTION),
        "its recurrent states are not sharded by positions, and it has no KV cache that would be",
        "Leave decode_context_parallel_size out.",
    ),
    Refusal(
        (LATENTS, INT8_CACHE),
        "the kernels of latent attention read float32 and bfloat16 so far",
        "Use kv_cache_dtype='bfloat16'.",
    ),
    Refusal(
        (DCP, SINKS),
        "its attention sinks are part of one softmax, which the workers share",
        "Leave decode_context_parallel_size out.",
    ),
    Refusal((SP, GPT2), "its residual stream is not split by tokens yet", "Leave enable_sp out."),
    Refusal((SP, EAGLE3), "it reads auxiliary hidden states of all tokens", "Leave enable_sp out."),
    *(
        Refusal((target, drafter), _NO_HIDDEN_STATES, "Use the method 'draft_model', 'ngram' or 'suffix'.")
        for drafter in (EAGLE, EAGLE3)
        for target in (TRANSFORMERS, GPT2)
    ),
    Refusal((PP, ENCODER_DECODER), "its stages would all need the encoder", "Use tensor_parallel_size."),
    Refusal(
        (DCP, ENCODER_DECODER),
        "each of its query heads has a KV head of its own, so no two workers have the same KV heads",
        "Leave decode_context_parallel_size out.",
    ),
    Refusal((SP, ENCODER_DECODER), "its residual stream is not split by tokens yet", "Leave enable_sp out."),
    Refusal(
        (ENCODER_DECODER, DRAFTS), "drafts are not verified by cross attention yet", "Leave speculative_config out."
    ),
    Refusal(
        (ENCODER_DECODER, CALIBRATED),
        "calibration runs texts without an encoder's output",
        "Use quantization_calibration='none'.",
    ),
    Refusal((ENCODER_DECODER,), "its attention runs on CPUs so far", "Use device='cpu'.", "cuda"),
    Refusal((POOLS, DRAFTS), "it generates no tokens that could be drafted", "Leave speculative_config out."),
    Refusal(
        (PP, POOLING),
        "a text's vector is made on the rank that has all of its layers",
        "Use tensor_parallel_size, or data_parallel_size.",
    ),
    Refusal(
        (DCP, WHOLE_TEXTS),
        "its attention reads no KV cache, which the workers would share",
        "Use tensor_parallel_size alone, or data_parallel_size.",
    ),
    Refusal(
        (POOLING, BATCH_INVARIANT),
        "its attention over whole texts is torch's",
        "Leave batch_invariant out, or use device='cpu', where it always holds.",
        "cuda",
    ),
    Refusal(
        (PP, CALIBRATED),
        "calibration runs all layers, and a pipeline stage has some of them",
        "Use quantization_calibration='none', or pipeline_parallel_size=1.",
    ),
    Refusal(
        (TORCHRUN, PP),
        "every rank's engine schedules by the sampled tokens, which only the last stage has",
        "Use tensor_parallel_size.",
    ),
    Refusal((TORCHRUN, CORE_PROCESS), _BETWEEN_STEPS, "Leave enable_multiprocessing out, and data_parallel_size too."),
    Refusal(
        (TORCHRUN, ADAPTIVE),
        "draft lengths follow measured times, which differ between ranks",
        "Use 'adaptive': False in speculative_config.",
    ),
    Refusal(
        (CALIBRATED,),
        "calibration runs on CPUs so far",
        "Use quantization_calibration='none', or device='cpu'.",
        "cuda",
    ),
    Refusal(
        (CACHE_DTYPE,),
        "there the KV cache has the model's dtype, or FP8",
        "Use kv_cache_dtype='auto' or 'fp8', or device='cpu'.",
        "cuda",
    ),
    Refusal(
        (OFFLOAD,),
        "weights are read from files by CPUs so far",
        "Use quantization='int8' or 'int4', or device='cpu'.",
        "cuda",
    ),
    Refusal(
        (TRANSFORMERS, OFFLOAD),
        "its layers are those of Transformers, which need their weights in memory",
        "Leave cpu_offload_gb out.",
    ),
    Refusal((MOE_BACKEND,), "its experts have the C++ kernels alone", "Leave moe_backend out.", "cpu"),
    Refusal(
        (FLOAT8_CACHE,),
        "its kernels are written for GPUs",
        "Use kv_cache_dtype='int8', or attention_backend='reference', which is slow.",
        "cpu",
    ),
    Refusal(
        (TRANSFORMERS, BATCH_INVARIANT),
        "its products are those of Transformers, which are cuBLAS's",
        "Leave batch_invariant out, or use device='cpu', where it always holds.",
        "cuda",
    ),
    Refusal(
        (SUFFIX,),
        "it reads tokens on the host, which a GPU does not copy there in time",
        "Use speculative_config={'method': 'ngram', ...}, or device='cpu'.",
        "cuda",
    ),
)


def check_options(config: EngineConfig, device: str | None = None) -> None:
    """Raise UnsupportedArgument for a refused combination of options.

    device: "cpu" or "cuda"; None detects it if it matters.
    """
    _check(REFUSALS, config, device)


def check_async_engine(config: EngineConfig) -> None:
    """Raise UnsupportedArgument for options that an `AsyncEngine`, and so a server, refuses."""
    _check(ASYNC_REFUSALS, config, None)
    if config.live_view.live_view is not None:
        raise UnsupportedArgument(
            f"live_view={str(config.live_view.live_view)!r} is an option of LLM. Leave it out: a server has the route "
            "/live, for penstock top."
        )


def allows_options(config: EngineConfig, device: str | None = None) -> bool:
    """Whether the options pass `check_options`."""
    try:
        check_options(config, device)
    except UnsupportedArgument:
        return False
    return True


def _check(refusals: Iterable[Refusal], config: EngineConfig, device: str | None) -> None:
    for refusal in refusals:
        message = refusal.message(config)
        if message is None:
            continue
        if refusal.device is None or refusal.device == (device or _device_of(config)):
            raise UnsupportedArgument(message)


def _device_of(config: EngineConfig) -> str:
    if config.device.device != "auto":
        return config.device.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Missing:
    """Feature that no worker implements yet. methods: worker methods that raise UnsupportedFeature."""

    feature: str
    methods: tuple[str, ...]
    instead: str


MISSING = (Missing("elastic expert parallelism", ("elastic_ep_execute",), "Start the engine again with another size."),)


def require(method: str) -> None:
    """Raise UnsupportedFeature for a method of a missing feature."""
    for missing in MISSING:
        if method in missing.methods:
            raise UnsupportedFeature(f"{method}: {missing.feature} is not supported yet. {missing.instead}")
