"""The messages between scheduler and worker: plain data, typed, versioned, comparable. Nothing else lives here."""

from penstock.contract.codec import CONTRACT_VERSION, ContractVersionError, decode, encode
from penstock.contract.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from penstock.contract.runner_output import (
    LogprobsLists,
    ModelRunnerOutput,
)
from penstock.contract.sampling_params import SamplingParams
from penstock.contract.scheduler_output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

__all__ = [
    "CONTRACT_VERSION",
    "CachedRequestData",
    "ContractVersionError",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "LogprobsLists",
    "ModelRunnerOutput",
    "NewRequestData",
    "SamplingParams",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "decode",
    "encode",
]
