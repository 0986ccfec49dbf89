"""All options of one engine."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.config.cache import CacheConfig
from penstock.config.device import DeviceConfig
from penstock.config.load import LoadConfig
from penstock.config.model import ModelConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.sampling import SamplingConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.errors import UnknownOption

_Config = TypeVar("_Config")
_MODEL_OPTIONS = (
    "tokenizer",
    "revision",
    "dtype",
    "max_model_len",
    "seed",
    "model_impl",
    "quantization",
    "quantization_calibration",
)
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
    def create(cls, model: str, **options: Any) -> EngineConfig:
        """Sort flat options, as the API and the command line take them, into their concerns.

        Raises UnknownOption for a name that no concern has, ConfigError for a value that is not allowed.
        """
        options = {_OTHER_NAMES.get(name, name): value for name, value in options.items()}
        _refuse_unknown(options, option_names())
        return cls(
            model=ModelConfig.load(model, **_take(options, _MODEL_OPTIONS)),
            cache=_build(CacheConfig, options),
            scheduler=_build(SchedulerConfig, options),
            parallel=_build(ParallelConfig, options),
            load=_build(LoadConfig, options),
            device=_build(DeviceConfig, options),
            sampling=_build(SamplingConfig, options),
            profiler=_build(ProfilerConfig, options),
        )


def option_names() -> list[str]:
    """Names of all options that `EngineConfig.create` takes, besides the model."""
    names = list(_MODEL_OPTIONS)
    for config in (
        CacheConfig,
        SchedulerConfig,
        ParallelConfig,
        LoadConfig,
        DeviceConfig,
        SamplingConfig,
        ProfilerConfig,
    ):
        names += [field.name for field in dataclasses.fields(config)]
    return names


def _build(config: type[_Config], options: Mapping[str, Any]) -> _Config:
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return config(**_take(options, names))


def _take(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _refuse_unknown(options: Mapping[str, Any], known: list[str]) -> None:
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Known options: {', '.join(sorted(known))}."
            raise UnknownOption(f"There is no option {name} (given: {value!r}).{hint}")
