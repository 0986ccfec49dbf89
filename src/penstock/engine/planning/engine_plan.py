"""Memory plan of an engine that is not running, as data and as a table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.contract import AttentionSpec, KVCacheConfig, KVCacheSpec, LocalAttentionSpec, MLAAttentionSpec
from penstock.device.dtypes import DtypeChoice
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import named_pools, num_snapshots
from penstock.worker.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Memory plan of each worker of a pipeline stage; without pipeline parallelism there is one stage.

    specs: KV cache specs by layer. memory: memory plan of each worker. lookup_bytes: weights of which a step reads only
    its tokens' rows, such as embeddings. kv_cache: the stage's part of the engine's KV cache.
    """

    specs: Mapping[str, KVCacheSpec]
    num_parameters: int
    lookup_bytes: int
    memory: MemoryPlan
    kv_cache: KVCacheConfig

    @property
    def worker_bytes(self) -> int:
        """Memory of a worker once its KV cache is filled and full steps have run."""
        return self.memory.without_kv_cache + self.kv_cache.size_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        return {
            "num_layers": len(self.specs),
            "num_parameters": self.num_parameters,
            "worker_bytes": self.worker_bytes,
            "memory": self.memory.to_dict(),
            "kv_cache_bytes": self.kv_cache.size_bytes,
        }


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Memory plan of an engine.

    stages: pipeline stages in order; one without pipeline parallelism. kv_cache: KV cache of the layers of all stages.
    kv_cache_reason: what decides its size.
    concurrency: requests of `max_model_len` tokens that fit at once. num_tokens: tokens that fit in such requests.
    num_workers: tensor parallel workers per stage; all sizes but `engine_bytes` are those of one worker.
    num_engines: engines on this machine.
    quantization: method of the linear layers' weights, by the option or in the checkpoint; None without.
    products: arithmetic of matrix products with 16-bit weights in a float32 computation; None without such products.
    """

    model: str
    architecture: str
    device: str
    dtype: DtypeChoice
    stages: tuple[StagePlan, ...]
    block_size: int
    kv_cache_dtype: str
    kv_cache: KVCacheConfig
    kv_cache_reason: str
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    concurrency: float
    num_workers: int = 1
    num_engines: int = 1
    quantization: str | None = None
    products: str | None = None

    def table(self) -> str:
        """Format the plan as a table of text."""
        in_all = f"In all, once the KV cache is filled: {format_bytes(self.engine_bytes)}"
        if self.num_engines > 1:
            total = format_bytes(self.num_engines * self.engine_bytes)
            in_all += f" for an engine, {total} for {self.num_engines} engines"
        cache = [f"KV cache{self._whose}", *self._cache_lines()]
        memory = [line for number, stage in enumerate(self.stages) for line in self._memory_lines(number, stage)]
        return "\n".join([*self._model_lines(), "", *memory, *cache, "", in_all])

    @property
    def memory(self) -> MemoryPlan:
        """Memory plan of the stage with the least room, which limits the number of blocks."""
        return min((stage.memory for stage in self.stages), key=lambda memory: memory.kv_cache_bytes)

    @property
    def layers(self) -> tuple[KVCacheSpec, ...]:
        """KV cache specs of the layers of all stages."""
        return tuple(spec for stage in self.stages for spec in stage.specs.values())

    @property
    def num_parameters(self) -> int:
        """Parameters of all stages; those that two stages have, such as a tied embedding, count twice."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def weights(self) -> int:
        """Bytes of all stages' weights."""
        return sum(stage.memory["weights"] + stage.memory["mapped_weights"] for stage in self.stages)

    @property
    def lookup_bytes(self) -> int:
        """Bytes of the weights of which a step reads only its tokens' rows."""
        return sum(stage.lookup_bytes for stage in self.stages)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache per token, in bytes over all layers, without sliding windows."""
        return kv_bytes_per_token(self.layers)

    @property
    def engine_bytes(self) -> int:
        """Memory of all workers of an engine, once their KV cache is filled and full steps have run."""
        return self.num_workers * sum(stage.worker_bytes for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "device": self.device,
            "dtype": self.dtype.name,
            "weights_dtype": self.dtype.weights,
            "num_parameters": self.num_parameters,
            "max_model_len": self.max_model_len,
            "num_workers": self.num_workers * len(self.stages),
            "num_engines": self.num_engines,
            "engine_bytes": self.engine_bytes,
            "quantization": self.quantization,
            "products": self.products,
            "memory": self.memory.to_dict(),
            "stages": [stage.to_dict() for stage in self.stages],
            "kv_cache": {
                "bytes": self.kv_cache.size_bytes,
                "reason": self.kv_cache_reason,
                "dtype": self.kv_cache_dtype,
                "bytes_per_token": self.kv_bytes_per_token,
                "block_size": self.block_size,
                "num_blocks": sum(pool.num_blocks for pool in self.kv_cache.pools),
                "pools": [
                    {"holds": name, "num_blocks": pool.num_blocks, "bytes": pool.size_bytes}
                    for pool, name in named_pools(self.kv_cache)
                ],
                "num_snapshots": sum(num_snapshots(self.kv_cache, self.max_num_seqs).values()),
                "num_tokens": self.num_tokens,
                "num_full_length_requests": round(self.concurrency, 2),
            },
        }

    @property
    def _whose(self) -> str:
        whose = "" if self.num_workers == 1 else f" of each of {self.num_workers} workers"
        return whose if len(self.stages) == 1 else f"{whose}, of all stages together"

    def _model_lines(self) -> list[str]:
        windows = sum(isinstance(layer, LocalAttentionSpec) for layer in self.layers)
        layers = f"{len(self.layers)} layers" + (f" ({windows} with a window or chunks)" if windows else "")
        where = "" if self.num_workers == 1 else " on each worker"
        where = where if len(self.stages) == 1 else f"{where} in {len(self.stages)} stages"
        quantized = "" if self.quantization is None else f"{self.quantization} weights; otherwise "
        reason = "; ".join(filter(None, (self.dtype.reason, self.products)))
        return [
            f"{self.model}: {self.architecture}, {self.num_parameters / 1e6:,.1f} million parameters{where}, {layers}",
            textwrap.fill(f"on {self.device} in {self.dtype.name} ({quantized}{reason})", 100, subsequent_indent="  "),
        ]

    def _memory_lines(self, number: int, stage: StagePlan) -> list[str]:
        if len(self.stages) == 1:
            return [f"Memory{self._whose}", stage.memory.table(), ""]
        whose = "" if self.num_workers == 1 else f", each of {self.num_workers} workers"
        return [
            f"Memory of stage {number + 1} of {len(self.stages)} ({len(stage.specs)} layers{whose})",
            stage.memory.table(),
            f"  {'its part of the KV cache':<34}  {format_bytes(stage.kv_cache.size_bytes):>10}",
            "",
        ]

    def _cache_lines(self) -> list[str]:
        attention = [layer for layer in self.layers if isinstance(layer, AttentionSpec)]
        kinds = Counter(
            f"latents of {layer.head_size}"
            if isinstance(layer, MLAAttentionSpec)
            else f"2 x {layer.num_kv_heads} heads x {layer.head_size}"
            for layer in attention
        )
        sizes = [f"{kind} x {count} layers" for kind, count in kinds.items()]
        size = format_bytes(self.kv_cache.size_bytes)
        per_token = f"{' + '.join(sizes)} in {self.kv_cache_dtype}" if sizes else "no layer has attention"
        rows = [
            ("size, taken as it fills" if self.device == "cpu" else "size", size, self.kv_cache_reason),
            ("per token", format_bytes(self.kv_bytes_per_token), per_token),
            *self._pool_rows(),
            ("tokens that fit", f"{self.num_tokens:,}", ""),
            ("full-length requests", f"{self.concurrency:,.1f}", f"of {self.max_model_len:,} tokens, at once"),
        ]
        return [f"  {name:<34}  {value:>10}  {note}".rstrip() for name, value, note in rows]

    def _pool_rows(self) -> Iterator[tuple[str, str, str]]:
        snapshots = num_snapshots(self.kv_cache, self.max_num_seqs)
        for index, (pool, name) in enumerate(named_pools(self.kv_cache)):
            kind, _, size = name.partition(" ")
            yield kind, f"{pool.num_blocks:,}", f"{size}, one of them empty; {format_bytes(pool.size_bytes)}"
            if index in snapshots:
                note = f"states for later requests, while {self.max_num_seqs:,} run; more while fewer do"
                yield "snapshots", f"{snapshots[index]:,}", note


def kv_bytes_per_token(layers: tuple[KVCacheSpec, ...]) -> int:
    """KV cache per token, in bytes over these layers, without sliding windows and recurrent states."""
    return sum(spec.page_size_bytes // spec.block_size for spec in layers if isinstance(spec, AttentionSpec))
