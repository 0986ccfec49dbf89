"""Messages between an executor and its workers in other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.contract import ModelRunnerOutput, NewRequestData, SamplingInput, SchedulerOutput
from penstock.errors import ErrorData


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """First message to a worker, pickled. config: `EngineConfig`, serialised by itself."""

    config: bytes
    rank: int


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages. Calls are numbered, and each gets one `Answer` from every worker."""


class ExecuteStep(_Message, frozen=True, kw_only=True, tag="execute"):
    """Run a step's forward pass, and sample at once without `awaiting_req_ids`; no `SampleStep` follows then.

    output: packed (`pack_step`).
    """

    output: SchedulerOutput


class SampleStep(_Message, frozen=True, kw_only=True, tag="sample"):
    """Sample an executed step; the worker with the results answers with `StepDone`."""

    sampling: SamplingInput


class CallWorker(_Message, frozen=True, kw_only=True, tag="call"):
    """Call a worker. call: `RpcCall`, pickled."""

    call_id: int
    call: bytes


class CloseWorker(_Message, frozen=True, kw_only=True, tag="close"):
    """Free all resources and end."""


class WorkerStarted(_Message, frozen=True, kw_only=True, tag="started"):
    """The worker exists, without its device and its model yet. process_id: on the worker's machine."""

    num_speculative_tokens: int
    process_id: int


class StepDone(_Message, frozen=True, kw_only=True, tag="done"):
    output: ModelRunnerOutput


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """Result of a call. result: pickled; empty where it is not wanted. error: the exception that the call raised."""

    call_id: int
    result: bytes = b""
    error: ErrorData | None = None


class WorkerFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The worker did not start, or a step failed."""

    error: ErrorData


class ToWorker(msgspec.Struct, frozen=True):
    """Envelope of an executor's messages after `WorkerStart`."""

    message: ExecuteStep | SampleStep | CallWorker | CloseWorker


def pack_step(output: SchedulerOutput) -> SchedulerOutput:
    """Return the step without the prompt in new requests' `prefill_token_ids`, so that it is sent once."""
    if not output.scheduled_new_reqs:
        return output
    return _with_prefill(output, lambda request: request.output_token_ids)


def unpack_step(output: SchedulerOutput) -> SchedulerOutput:
    """Undo `pack_step`."""
    if not output.scheduled_new_reqs:
        return output
    return _with_prefill(output, lambda request: request.prompt_token_ids + request.prefill_token_ids)


def _with_prefill(output: SchedulerOutput, prefill: Callable[[NewRequestData], list[int]]) -> SchedulerOutput:
    replace = msgspec.structs.replace
    requests = [replace(request, prefill_token_ids=prefill(request)) for request in output.scheduled_new_reqs]
    return replace(output, scheduled_new_reqs=requests)


class FromWorker(msgspec.Struct, frozen=True):
    """Envelope of a worker's messages."""

    message: WorkerStarted | StepDone | Answer | WorkerFailed
