"""All options of one engine."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.cache import CacheConfig
from penstock.config.device import DeviceConfig
from penstock.config.load import LoadConfig
from penstock.config.model import MODEL_OPTIONS, ModelConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.sampling import SamplingConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.errors import UnknownOption

# Names that people bring from other engines.
_OTHER_NAMES = {"gpu_memory_utilization": "memory_fraction", "kv_cache_memory": "kv_cache_memory_bytes"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Composes one options object per concern. Derived decisions are not stored here but in plans."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    load: LoadConfig
    device: DeviceConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    @classmethod
    def create(cls, model: str | Path, **options: Any) -> EngineConfig:
        """Sort flat options, as the API and the command line take them, into their concerns.

        Raises UnknownOption for a name that no concern has, ConfigError for a value that is not allowed.
        """
        options = {_OTHER_NAMES.get(name, name): value for name, value in options.items()}
        _refuse_unknown(options, option_names())
        return cls(
            model=ModelConfig.load(model, **_take(options, MODEL_OPTIONS)),
            **{name: config(**_take(options, _fields(config))) for name, config in _CONCERNS.items()},
        )


_CONCERNS: dict[str, type[Any]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "load": LoadConfig,
    "device": DeviceConfig,
    "sampling": SamplingConfig,
    "profiler": ProfilerConfig,
}


def option_names() -> list[str]:
    """Names of all options that `EngineConfig.create` takes, besides the model."""
    return [*MODEL_OPTIONS, *(name for config in _CONCERNS.values() for name in _fields(config))]


def _fields(config: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _take(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _refuse_unknown(options: Mapping[str, Any], known: list[str]) -> None:
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Known options: {', '.join(sorted(known))}."
            raise UnknownOption(f"There is no option {name} (given: {value!r}).{hint}")
