"""The memory of an engine that is not running: the arithmetic of `worker/memory_plan.py` without a worker.

Reads `config.json` and the headers of the weight files. Imports no torch, so that it takes a fraction of a second; only
a model of which these do not show the layers is built without memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, env
from penstock.config.load import SHARDED_STATE
from penstock.config.resolve import resolve_metadata_folder
from penstock.config.sampling import LOGITS_PROCESSORS_GROUP
from penstock.contract import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from penstock.device.dtypes import DtypeChoice, choose_cpu_dtype, choose_cuda_dtype, choose_kv_cache_dtype
from penstock.device.limits import DEFAULT_MEMORY_FRACTION, MemoryLimit, cpu_quota, memory_limit
from penstock.device.nvml import gpu_memory
from penstock.device.threads import plan_threads
from penstock.engine.kv_cache_size import choose_max_model_len, size_kv_cache
from penstock.engine.model_sizes import ModelSizes, PlannedModel, size_model
from penstock.errors import CheckpointError, ModelNotFound, OutOfMemory, UnsupportedFeature
from penstock.loader.headers import TensorHeader, read_all_headers, read_headers, stored_dtype
from penstock.loader.weight_files import parts_of_rank, what_is_there
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import max_concurrency, num_tokens_that_fit
from penstock.worker.estimate import PROCESS_BYTES, resident_step
from penstock.worker.memory_plan import MemoryPlan, check_plan, choose_memory_fraction, runner_state_bytes
from penstock.worker.split_contexts import split_context_bytes


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """layers: what each keeps. memory: the arithmetic, as the worker would print it. kv_bytes_per_token: in all layers
    together, where none has a window. concurrency: requests of `max_model_len` tokens at once. num_tokens: in requests
    of that length. remark: where weights and activations come from, if not from config.json and headers; or "".
    """

    model: str
    architecture: str
    device: str
    dtype: DtypeChoice
    layers: tuple[FullAttentionSpec | SlidingWindowSpec, ...]
    num_parameters: int
    memory: MemoryPlan
    block_size: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_cache: KVCacheConfig
    max_model_len: int
    num_tokens: int
    concurrency: float
    remark: str

    def table(self) -> str:
        """All of it, for a person to check."""
        in_all = f"In all, once the KV cache is filled: {format_bytes(self.engine_bytes)}"
        memory, cache = ["Memory", self.memory.table()], ["KV cache", *self._cache_lines()]
        return "\n".join([*self._model_lines(), "", *memory, "", *cache, "", in_all])

    @property
    def engine_bytes(self) -> int:
        """What the engine takes in all, once its KV cache is filled and full steps have run."""
        return self.memory.without_kv_cache + self.kv_cache.size_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        memory = asdict(self.memory)
        memory |= {"budget": self.memory.budget, "left_for_kv_cache": self.memory.left_for_kv_cache}
        return {
            "model": self.model,
            "architecture": self.architecture,
            "device": self.device,
            "dtype": self.dtype.name,
            "weights_dtype": self.dtype.weights,
            "num_parameters": self.num_parameters,
            "remark": self.remark,
            "max_model_len": self.max_model_len,
            "engine_bytes": self.engine_bytes,
            "memory": memory,
            "kv_cache": {
                "bytes": self.kv_cache.size_bytes,
                "dtype": self.kv_cache_dtype,
                "bytes_per_token": self.kv_bytes_per_token,
                "block_size": self.block_size,
                "num_blocks": self.kv_cache.num_blocks,
                "num_tokens": self.num_tokens,
                "num_full_length_requests": round(self.concurrency, 2),
            },
        }

    def _model_lines(self) -> list[str]:
        windows = sum(isinstance(layer, SlidingWindowSpec) for layer in self.layers)
        layers = f"{len(self.layers)} layers" + (f" ({windows} with a window)" if windows else "")
        return [
            f"{self.model}: {self.architecture}, {self.num_parameters / 1e6:,.1f} million parameters, {layers}",
            f"on {self.device} in {self.dtype.name} ({self.dtype.reason})",
            *([self.remark] if self.remark else []),
        ]

    def _cache_lines(self) -> list[str]:
        heads = Counter((layer.num_kv_heads, layer.head_size) for layer in self.layers)
        sizes = [f"2 x {num_heads} heads x {size} x {count} layers" for (num_heads, size), count in heads.items()]
        per_token = f"{' + '.join(sizes)} in {self.kv_cache_dtype}"
        rows = [
            ("size", format_bytes(self.kv_cache.size_bytes), ""),
            ("per token", format_bytes(self.kv_bytes_per_token), per_token),
            ("blocks", f"{self.kv_cache.num_blocks:,}", f"of {self.block_size} tokens, one of them empty"),
            ("tokens that fit", f"{self.num_tokens:,}", ""),
            ("full-length requests", f"{self.concurrency:,.1f}", f"of {self.max_model_len:,} tokens, at once"),
        ]
        return [f"  {name:<34}  {value:>10}  {note}".rstrip() for name, value, note in rows]


def plan_engine(model: str, *, revision: str | None = None, **options: Any) -> EnginePlan:
    """Plan an engine with these options (those of `EngineConfig.create`) on this machine, as it is now.

    Of a hub id that is not in the local cache, the configuration and the headers are fetched, and no weights.
    Raises OutOfMemory when the engine could not start, and what reading the model raises.
    """
    folder, hub_headers = _find_model(model, revision)
    config = EngineConfig.create(str(folder), **options)
    device = _choose_device(config.device.device)
    has_checkpoint = config.load.load_format != "dummy"
    headers = hub_headers or (_headers(config) if has_checkpoint else None)
    dtype = _choose_dtype(config, headers, device)
    kv_cache_dtype = choose_kv_cache_dtype(config.cache.kv_cache_dtype, dtype.name, device)
    sizes = size_model(PlannedModel(config, headers, dtype, kv_cache_dtype, device, _longest_context(config)))
    memory, specs = _plan_memory(config, sizes, device), sizes.specs
    kv_bytes_per_token = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    try:
        check_plan(memory)
        max_model_len = choose_max_model_len(config, specs, memory)
        kv_cache = size_kv_cache(config, specs, memory, max_model_len)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}\n  A token takes {format_bytes(kv_bytes_per_token)} of KV cache.") from error
    limits = {"max_model_len": max_model_len, "max_num_batched_tokens": config.scheduler.max_num_batched_tokens}
    return EnginePlan(
        model=model,
        architecture=config.model.architecture,
        device=device,
        dtype=dtype,
        layers=tuple(specs.values()),
        num_parameters=sizes.num_parameters,
        memory=memory,
        block_size=config.cache.block_size,
        kv_cache_dtype=kv_cache_dtype,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        num_tokens=num_tokens_that_fit(kv_cache, **limits),
        concurrency=max_concurrency(kv_cache, **limits),
        remark=sizes.remark,
    )


def _find_model(model: str, revision: str | None) -> tuple[Path, dict[str, TensorHeader] | None]:
    """The folder with the model's configuration, and its headers if the weights are not there but on the hub."""
    folder, is_on_hub = resolve_metadata_folder(model, revision)
    if not is_on_hub or read_headers(folder) is not None:
        return folder, None
    if env.hub_is_offline():
        raise ModelNotFound(
            f"model={model!r}: its weight files are not in the local hub cache, and the network is forbidden "
            "(HF_HUB_OFFLINE), so their headers cannot be read."
        )
    return folder, _fetch_headers(model, revision)


def _fetch_headers(model: str, revision: str | None) -> dict[str, TensorHeader]:
    """The headers of the safetensors files of a hub id, fetched by themselves."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    except NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"model={model!r} has no safetensors files on the hub, and the headers of others cannot be fetched by "
            "themselves. Download it, and plan for the folder."
        ) from error
    except (HfHubHTTPError, SafetensorsParsingError, OSError) as error:
        raise ModelNotFound(f"model={model!r}: the headers of its weights cannot be fetched: {error}") from error
    return {
        name: TensorHeader(str(tensor.dtype), tuple(tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _headers(config: EngineConfig) -> Mapping[str, TensorHeader]:
    folder, load = config.model.folder, config.load
    if load.load_format == SHARDED_STATE:
        parts = parts_of_rank(folder, load.sharded_state_pattern, rank=0)
        headers: dict[str, TensorHeader] | None = read_all_headers(parts[number] for number in sorted(parts)) or None
    else:
        headers = read_headers(folder, load.load_format)
    if headers is None:
        raise CheckpointError(
            f"There are no weights to plan for (load_format={load.load_format!r}). {what_is_there(folder)}"
        )
    return headers


def _choose_device(requested: str) -> str:
    if requested != "auto":
        return requested
    return "cuda" if gpu_memory() is not None else "cpu"


def _choose_dtype(config: EngineConfig, headers: Mapping[str, TensorHeader] | None, device: str) -> DtypeChoice:
    model = config.model
    if device == "cuda":
        return choose_cuda_dtype(model.dtype, model.checkpoint_dtype)
    return choose_cpu_dtype(model.dtype, model.checkpoint_dtype, None if headers is None else stored_dtype(headers))


def _plan_memory(config: EngineConfig, sizes: ModelSizes, device: str) -> MemoryPlan:
    limit, cache, vocab_size = _memory_of(device), config.cache, config.model.vocab_size
    split = split_context_bytes(
        sizes.specs.values(),
        sizes.num_heads,
        max_model_len=_longest_context(config),
        num_threads=plan_threads(config.device.num_threads, quota=cpu_quota()).num_threads,
        device=device,
    )
    step = resident_step(sizes.step, device, split)
    return MemoryPlan(
        total=limit.total_bytes,
        free_at_start=limit.free_bytes,
        fraction=choose_memory_fraction(
            cache.memory_fraction, DEFAULT_MEMORY_FRACTION[device], free=limit.free_bytes, total=limit.total_bytes
        ),
        process=PROCESS_BYTES[device],
        weights=sizes.weights,
        activations=step.activations,
        sampling=step.sampling,
        runner_state=runner_state_bytes(config.scheduler.max_num_seqs, _longest_context(config), vocab_size),
        requested_kv_cache=cache.kv_cache_memory_bytes,
        logits_processors=_plan_processors(config, vocab_size),
    )


def _plan_processors(config: EngineConfig, vocab_size: int) -> int:
    """What custom logits processors keep; they are imported and made, where there are any, and torch with them."""
    if not config.sampling.logits_processors and not entry_points(group=LOGITS_PROCESSORS_GROUP):
        return 0
    from penstock.device.cpu import CpuDevice
    from penstock.worker.processor_memory import measure_processors

    with closing(CpuDevice(config.device.num_threads)) as device:
        return measure_processors(
            config.sampling,
            device,
            max_num_reqs=config.scheduler.max_num_seqs,
            max_model_len=_longest_context(config),
            vocab_size=vocab_size,
        )


def _longest_context(config: EngineConfig) -> int:
    wanted = config.model.max_model_len
    return wanted if isinstance(wanted, int) else config.model.longest_context


def _memory_of(device: str) -> MemoryLimit:
    if device == "cpu":
        return memory_limit()
    memory = gpu_memory()
    if memory is None:
        raise UnsupportedFeature(
            "device='cuda' is not available: no NVIDIA driver, or a torch without CUDA. Use device='cpu'."
        )
    return memory
