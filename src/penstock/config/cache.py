"""Options of the KV cache: memory, block size, dtype, prefix caching."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config.checks import check_choice, check_flag, check_integer, size_in_bytes
from penstock.config.flags import listed
from penstock.errors import ConfigError

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """block_size: tokens per block.
    memory_fraction: share of the device's memory that weights, activations and KV cache may take together;
        None bounds the KV cache by a default (0.9 of a GPU; a quarter of the CPU memory that a process may use, or up
        to half of it where one request of `max_model_len` needs more), and all together by 0.9 of the free memory, as
        does a share of a CPU machine that is not free.
    kv_cache_memory_bytes: size of the KV cache in bytes, or as a text such as "1GiB"; None takes what
        `memory_fraction` leaves, but no more than `max_num_seqs` requests, and as many cached prefixes, can use.
    enable_prefix_caching: reuse the KV cache of common prompt prefixes.
    kv_cache_dtype: dtype of the KV cache; "auto" is the model's, and bfloat16 for attention in bfloat16 arithmetic
        (`cpu_arithmetic`); "int8" is quantised, one scale per token and head;
        "fp8" (e4m3), on a GPU, takes the checkpoint's scales; without them keys and values beyond 448 saturate.
    """

    block_size: int = field(default=16, metadata=listed("Tokens per block of the KV cache"))
    memory_fraction: float | None = field(
        default=None, metadata=listed("Share of the device's memory (also: --gpu-memory-utilization)")
    )
    kv_cache_memory_bytes: int | None = field(
        default=None, metadata=listed("KV cache size, such as 1GiB", metavar="SIZE")
    )
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = field(default="auto", metadata=listed(", ".join(KV_CACHE_DTYPES)))

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 1)
        if self.memory_fraction is not None:
            is_number = isinstance(self.memory_fraction, (int, float)) and not isinstance(self.memory_fraction, bool)
            if not is_number or not 0.0 < self.memory_fraction <= 1.0:
                raise ConfigError(
                    f"memory_fraction={self.memory_fraction!r} is not valid. Allowed: more than 0, at most 1."
                )
        if self.kv_cache_memory_bytes is not None:
            size = size_in_bytes("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
            object.__setattr__(self, "kv_cache_memory_bytes", size)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
