"""Options of the KV cache: memory, block size, dtype, prefix caching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from penstock.config.checks import check_choice, check_flag, check_integer, size_in_bytes
from penstock.config.flags import listed
from penstock.errors import ConfigError, UnsupportedFeature

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")
# Where requests leave snapshots of recurrent states.
Snapshots: TypeAlias = Literal["align", "all", "none"]
STATE_DTYPES = ("auto", "float32", "bfloat16")


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
    mamba_cache_mode: which states of recurrent layers are kept for prefix caching: "align", those where later requests
        may begin; "all", one at every `mamba_block_size` tokens; "none", so that nothing is found.
    mamba_block_size: tokens between two positions whose state can be kept; a multiple of `block_size`, and by default
        equal to it.
    mamba_cache_dtype: dtype of what recurrent layers keep; "auto" is float32; bfloat16 rounds it after each token.
    mamba_ssm_cache_dtype: dtype of states alone, without convolutions' inputs; "auto" is `mamba_cache_dtype`.
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
    mamba_cache_mode: str = "align"
    mamba_block_size: int | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"

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
        check_choice("mamba_cache_mode", self.mamba_cache_mode, get_args(Snapshots))
        check_choice("mamba_cache_dtype", self.mamba_cache_dtype, STATE_DTYPES)
        check_choice("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, STATE_DTYPES)
        if self.mamba_block_size is not None:
            check_integer("mamba_block_size", self.mamba_block_size, 1)
            if self.mamba_block_size % self.block_size:
                raise ConfigError(
                    f"mamba_block_size={self.mamba_block_size} is not valid with block_size={self.block_size}. "
                    "Allowed: its multiples, since a request that begins from a state needs whole blocks before it."
                )

    @property
    def snapshots(self) -> Snapshots:
        """Mode of the snapshots of recurrent states: without prefix caching there are none."""
        return cast(Snapshots, self.mamba_cache_mode) if self.enable_prefix_caching else "none"

    @property
    def state_dtypes(self) -> tuple[str, str]:
        """Dtypes of convolutions' inputs and of recurrent states on their pages, by name."""
        convolution = "float32" if self.mamba_cache_dtype == "auto" else self.mamba_cache_dtype
        return convolution, convolution if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype

    def check_has_states(self) -> None:
        """Raise UnsupportedFeature for options of recurrent states: the model has none."""
        asked = {
            "mamba_cache_mode": self.mamba_cache_mode == "all",
            "mamba_block_size": self.mamba_block_size is not None,
            "mamba_cache_dtype": self.mamba_cache_dtype == "bfloat16",
            "mamba_ssm_cache_dtype": self.mamba_ssm_cache_dtype == "bfloat16",
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise UnsupportedFeature(
                    f"{name}={getattr(self, name)!r} is of no use to this model, which has no recurrent layers. "
                    "Leave it out."
                )
