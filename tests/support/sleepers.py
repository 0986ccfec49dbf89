"""Engine cores that are put to sleep, and what their workers hold meanwhile."""

from __future__ import annotations

from typing import Any

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.features.sleep.state import EngineState
from penstock.layers.tensors_of import tensors_of
from penstock.worker.worker import Worker
from support.engines import Result


def call(core: EngineCore, method: str, *args: Any) -> Any:
    """First answer of the core."""
    return core.collective_rpc(RpcCall(method, args))[0]


def put_to_sleep(core: EngineCore, *args: Any, results: dict[str, Result] | None = None) -> None:
    """args: of `sleep`. results: of requests that finish before."""
    until_done(core, "sleep", *args, results=results)


def until_done(core: EngineCore, method: str, *args: Any, results: dict[str, Result] | None = None) -> None:
    """Repeat a call that says whether it is done, with a step between two calls, as callers do."""
    found = {} if results is None else results
    for _ in range(1000):
        is_done = call(core, method, *args)
        if is_done and not core.has_unfinished_requests():
            return
        for output in core.step():
            found.setdefault(output.req_id, Result()).take(output)
        if is_done:
            return
    raise AssertionError(f"{method}{args} is not done after 1,000 steps")


def state_of(core: EngineCore) -> EngineState:
    state = call(core, "engine_state")
    assert isinstance(state, EngineState)
    return state


def zeroed_weights(worker: Worker) -> list[bool]:
    """Whether the middle of each large weight is zero, as it is once its pages are given back."""
    large = [one.tensor for one in tensors_of(worker.weights.model) if one.is_weight and one.num_bytes >= 4 * 4096]
    return [not tensor.flatten()[tensor.numel() // 2 :][:16].any() for tensor in large]


def has_written_blocks(worker: Worker) -> bool:
    """Whether whole pages of the KV cache have values."""
    return any(bool(memory.flatten()[4096:-4096].any()) for memory in worker.runner.kv_cache.memory)
