"""What an executor and its workers in other processes say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.contract import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from penstock.errors import ErrorData


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first that a worker is told, pickled.

    config: pickled by itself. main_path: of the program, whose own functions and classes may be sent.
    """

    config: bytes
    rank: int
    main_path: str | None


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Calls are numbered, and each gets one `Answer` from every worker."""


class ExecuteStep(_Message, frozen=True, kw_only=True, tag="execute"):
    """Run a step's forward pass.

    output: packed (`pack_step`). is_unconstrained: no grammar limits its tokens, which are to be chosen at once: there
        is no `SampleStep` of it.
    """

    output: SchedulerOutput
    is_unconstrained: bool = False


class SampleStep(_Message, frozen=True, kw_only=True, tag="sample"):
    """Choose the tokens of an executed step; the worker with the results answers by `StepDone`."""

    grammar: GrammarOutput


class CallWorker(_Message, frozen=True, kw_only=True, tag="call"):
    """call: pickled (method, args, kwargs), since workers take anything.

    unique_reply_rank: the only one whose result is wanted; None for all.
    """

    call_id: int
    call: bytes
    unique_reply_rank: int | None = None


class CloseWorker(_Message, frozen=True, kw_only=True, tag="close"):
    """Give everything back and end."""


class WorkerStarted(_Message, frozen=True, kw_only=True, tag="started"):
    """The worker exists; its device and its model are called for next. process_id: on its machine."""

    num_speculative_tokens: int
    process_id: int


class StepDone(_Message, frozen=True, kw_only=True, tag="done"):
    output: ModelRunnerOutput


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """What a call came to. result: pickled; empty where it is not wanted. error: what it raised."""

    call_id: int
    result: bytes = b""
    error: ErrorData | None = None


class WorkerFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The worker did not start, or a step failed."""

    error: ErrorData


class ToWorker(msgspec.Struct, frozen=True):
    """Anything that an executor says after `WorkerStart`."""

    message: ExecuteStep | SampleStep | CallWorker | CloseWorker


def pack_step(output: SchedulerOutput) -> SchedulerOutput:
    """The step with what new requests have generated alone as their `prefill_token_ids`: the prompt is told once."""
    if not output.scheduled_new_reqs:
        return output
    return _with_prefill(output, lambda request: request.prefill_token_ids[len(request.prompt_token_ids) :])


def unpack_step(output: SchedulerOutput) -> SchedulerOutput:
    """The step that was packed."""
    if not output.scheduled_new_reqs:
        return output
    return _with_prefill(output, lambda request: request.prompt_token_ids + request.prefill_token_ids)


def _with_prefill(output: SchedulerOutput, prefill: Callable[[NewRequestData], list[int]]) -> SchedulerOutput:
    replace = msgspec.structs.replace
    requests = [replace(request, prefill_token_ids=prefill(request)) for request in output.scheduled_new_reqs]
    return replace(output, scheduled_new_reqs=requests)


class FromWorker(msgspec.Struct, frozen=True):
    """Anything that a worker says."""

    message: WorkerStarted | StepDone | Answer | WorkerFailed
