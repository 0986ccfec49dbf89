"""The messages between scheduler and worker: plain data, typed, versioned, comparable. Nothing else lives here."""

from penstock.contract.codec import CONTRACT_VERSION, ContractVersionError, decode, encode
from penstock.contract.kv_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from penstock.contract.runner_output import (
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)
from penstock.contract.sampling_params import SamplingParams
from penstock.contract.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

__all__ = [
    "CONTRACT_VERSION",
    "CachedRequestData",
    "ContractVersionError",
    "CrossAttentionSpec",
    "DraftTokenIds",
    "FullAttentionSpec",
    "GrammarOutput",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVConnectorOutput",
    "LogprobsLists",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModelRunnerOutput",
    "NewRequestData",
    "SamplingParams",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "decode",
    "encode",
]
