"""Messages between scheduler and worker: plain data, typed, versioned, comparable."""

from penstock.contract.array_bytes import ArrayBytes
from penstock.contract.codec import CONTRACT_VERSION, ContractVersionError, decode, encode
from penstock.contract.kv_cache import (
    AttentionSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    KVCacheSpec,
    KVCacheTensor,
    LocalAttentionSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from penstock.contract.parts import Part, Parts, part_of, register_part
from penstock.contract.pooling_params import POOLING_TASKS, PoolingParams
from penstock.contract.rpc import RpcCall
from penstock.contract.runner_output import (
    DraftTokenIds,
    LogprobsLists,
    ModelRunnerOutput,
    PooledOutput,
    SampledOutput,
    StepResult,
)
from penstock.contract.sampling_params import RequestOutputKind, SamplingParams
from penstock.contract.scheduler_output import (
    CachedRequestData,
    NewRequestData,
    SamplingInput,
    SchedulerOutput,
)
from penstock.contract.structured_outputs import StructuredOutputsParams

__all__ = [
    "CONTRACT_VERSION",
    "POOLING_TASKS",
    "ArrayBytes",
    "AttentionSpec",
    "CachedRequestData",
    "ChunkedLocalSpec",
    "ContractVersionError",
    "CrossAttentionSpec",
    "DraftTokenIds",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCachePool",
    "KVCacheSpec",
    "KVCacheTensor",
    "LocalAttentionSpec",
    "LogprobsLists",
    "MLAAttentionSpec",
    "ModelRunnerOutput",
    "NewRequestData",
    "Part",
    "Parts",
    "PooledOutput",
    "PoolingParams",
    "RecurrentStateSpec",
    "RequestOutputKind",
    "RpcCall",
    "SampledOutput",
    "SamplingInput",
    "SamplingParams",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "StepResult",
    "StructuredOutputsParams",
    "decode",
    "encode",
    "part_of",
    "register_part",
]
