"""Options of weight loading: format, progress bar."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.checks import check_choice, check_flag
from penstock.config.flags import listed
from penstock.errors import ConfigError

SHARDED_STATE = "sharded_state"
SHARDED_STATE_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
TENSORIZER = "tensorizer"
# Formats of weights as they are in memory.
STATES = (SHARDED_STATE, TENSORIZER)
# A pebibyte.
_MOST_GIB = 1 << 20
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", *STATES, "dummy")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """load_format: "auto" takes safetensors, else PyTorch `.bin`, else GGUF files; "sharded_state" takes the
        files of `save_sharded_state`, "tensorizer" that of `save_tensorized_model`; "dummy" takes random weights.
    use_tqdm_on_load: show a progress bar when standard error is a terminal.
    weight_cache_dir: folder where quantised weights are kept as they are in memory, so that a later start with the same
        checkpoint, options and kernels reads them in place of quantising, packing and calibrating; None keeps none.
    cpu_offload_gb: GiB of each worker's weights that stay in its file of `weight_cache_dir`, on a CPU: steps read them
        from there, and the system drops them from memory as it needs. 0 takes what exceeds the memory, if
        `weight_cache_dir` is given.
    model_loader_extra_config: options of one load format; "sharded_state" has `pattern`, for the names of its files,
        "tensorizer" has `tensorizer_uri`, with %03d for the rank of several.
    """

    load_format: str = field(default="auto", metadata=listed(", ".join(LOAD_FORMATS[1:])))
    use_tqdm_on_load: bool = True
    model_loader_extra_config: Mapping[str, Any] | None = None
    weight_cache_dir: str | Path | None = None
    cpu_offload_gb: float = 0

    def __post_init__(self) -> None:
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_flag("use_tqdm_on_load", self.use_tqdm_on_load)
        if self.weight_cache_dir is not None and not isinstance(self.weight_cache_dir, str | Path):
            raise ConfigError(f"weight_cache_dir={self.weight_cache_dir!r} is not valid. Allowed: a folder, or None.")
        size = self.cpu_offload_gb
        if not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size <= _MOST_GIB:
            raise ConfigError(
                f"cpu_offload_gb={size!r} is not valid. Allowed: a number of GiB from 0 to {_MOST_GIB:,}."
            )
        if self.cpu_offload_gb and self.weight_cache_dir is None:
            raise ConfigError(
                f"cpu_offload_gb={self.cpu_offload_gb!r} keeps weights in a file of weight_cache_dir, which is not "
                "given. Name a folder on a fast disk."
            )
        if self.cpu_offload_gb and self.load_format in ("dummy", *STATES):
            raise ConfigError(
                f"cpu_offload_gb={self.cpu_offload_gb!r} is not valid with load_format={self.load_format!r}, whose "
                "weights weight_cache_dir does not keep. Load the checkpoint that they were made from."
            )
        extra = self.model_loader_extra_config
        if extra is None:
            return
        if not isinstance(extra, Mapping):
            raise ConfigError(f"model_loader_extra_config={extra!r} is not valid. Allowed: a dictionary.")
        allowed = {SHARDED_STATE: {"pattern"}, TENSORIZER: {"tensorizer_uri"}}.get(self.load_format, set())
        unknown = sorted(map(str, set(extra) - allowed))
        if unknown:
            raise ConfigError(
                f"model_loader_extra_config has {', '.join(unknown)}, which load_format={self.load_format!r} does not "
                f"take. Allowed: {', '.join(sorted(allowed)) or 'nothing'}."
            )
        check_sharded_state_pattern(self.sharded_state_pattern)
        if not isinstance(self.tensorizer_uri, str | None):
            raise ConfigError(f"tensorizer_uri={self.tensorizer_uri!r} is not valid. Allowed: a path or an address.")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of a worker's weights that are asked to stay in a file."""
        return int(self.cpu_offload_gb * 2**30)

    @property
    def tensorizer_uri(self) -> str | None:
        """File of `load_format="tensorizer"`; None for that of the model's folder."""
        return (self.model_loader_extra_config or {}).get("tensorizer_uri")

    @property
    def sharded_state_pattern(self) -> str:
        return str((self.model_loader_extra_config or {}).get("pattern", SHARDED_STATE_PATTERN))


def check_sharded_state_pattern(pattern: Any) -> None:
    """Raise ConfigError unless the pattern makes file names that differ by rank and part."""
    try:
        fields = sorted(field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None)
        is_valid = fields == ["part", "rank"] and Path(pattern).name == pattern and pattern.endswith(".safetensors")
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"pattern={pattern!r} is not valid. Allowed: a file name that ends in .safetensors and has {{rank}} and "
            f"{{part}} once each, such as {SHARDED_STATE_PATTERN!r}."
        )
