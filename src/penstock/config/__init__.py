"""Options, one file per concern: frozen, validated once, composed by `EngineConfig`."""

from typing import Any

from penstock.config.cache import CacheConfig
from penstock.config.device import DeviceConfig
from penstock.config.engine import EngineConfig
from penstock.config.expert_stats import ExpertStatsConfig
from penstock.config.graphs import GraphConfig
from penstock.config.live_view import LiveViewConfig
from penstock.config.load import LoadConfig
from penstock.config.lora import LoRAConfig
from penstock.config.model import ModelConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.recording import RecordingConfig
from penstock.config.sampling import SamplingConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.config.sleep import SleepConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.config.structured import StructuredOutputsConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "ExpertStatsConfig",
    "GraphConfig",
    "LiveViewConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProfilerConfig",
    "RecordingConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "SleepConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]


def __getattr__(name: str) -> Any:
    from penstock.config.vllm import attribute

    return attribute(__name__, name)
