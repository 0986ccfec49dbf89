"""Messages between the front end and an engine core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.contract import Parts, PoolingParams, SamplingParams
from penstock.engine.statistics.metric_totals import StepTotals
from penstock.engine.statistics.step_log import StepRecord
from penstock.errors import ErrorData
from penstock.scheduler.outputs import NO_STATS, EngineCoreOutput, SchedulerStats


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: tokens, and parameters whose seed is set.

    arrival_time: monotonic seconds (time.monotonic).
    priority: lower runs first, under the "priority" policy.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    parts: the request's data for plugins' features.
    pooling_params: of a pooling request, with its task; None for one that generates.
    eos_token_ids: end-of-sequence tokens, unless the parameters ignore them.
    output_token_ids: tokens generated earlier by a core that was lost; generation continues after them.
    is_admitted: another core has admitted it, or another request that it belongs to, so no limit of the queue applies.
    num_choices: requests that are admitted or refused with it, itself included: samples, prompts of one HTTP request.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    parts: Parts | None = None
    pooling_params: PoolingParams | None = None
    output_token_ids: list[int] = []
    is_admitted: bool = False
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class CoreStart:
    """First message to a child process, pickled.

    sent: the function that the process runs, and its argument, serialised by themselves. log_levels: log level of each
    logger whose lines are sent back (`CoreLog`).
    """

    sent: bytes
    log_levels: dict[str, int]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Message between a core in a process of its own and its client. Each numbered call gets one `Answer`."""


class AddRequest(_Message, frozen=True, kw_only=True, tag="add"):
    call_id: int
    request: EngineRequest


class AbortRequests(_Message, frozen=True, kw_only=True, tag="abort"):
    call_id: int
    req_ids: list[str]


class UtilityCall(_Message, frozen=True, kw_only=True, tag="utility"):
    """Call of another method of `CoreClient`. arguments: pickled, since workers take any type."""

    call_id: int
    method: str
    arguments: bytes


class CloseCore(_Message, frozen=True, kw_only=True, tag="close"):
    """Close the core and exit."""


class CoreStarted(_Message, frozen=True, kw_only=True, tag="started"):
    """The core is ready. kv_cache_bytes: size of the KV cache per worker. stage_s: seconds of its start by stage.

    stats: of the scheduler before its first step.
    """

    max_model_len: int
    vocab_size: int
    kv_cache_bytes: int
    stage_s: dict[str, float] = {}
    stats: SchedulerStats = NO_STATS


class Drain(_Message, frozen=True, kw_only=True, tag="drain"):
    """End a front end: refuse new requests, abort those that run after `timeout_s` seconds, and exit."""

    timeout_s: float


class FrontStarted(_Message, frozen=True, kw_only=True, tag="front"):
    """The front end's process accepts requests."""


class FrontEnded(_Message, frozen=True, kw_only=True, tag="drained"):
    """Last message of a front end that was asked to end. num_aborted: requests that had not finished."""

    num_aborted: int


class CoreBusy(_Message, frozen=True, kw_only=True, tag="busy"):
    """Heartbeat of a core that runs no steps because of a call or a recovery.

    is_recovering: whether its workers are being replaced.
    """

    is_recovering: bool = False


class StepOutputs(_Message, frozen=True, kw_only=True, tag="step"):
    """Outputs of a step, possibly none. stats: after the step; None between a broker and its front ends.

    step_s: seconds that the step took; phase_s: by `StepPhase`, with the sending of the last message.
    num_worker_restarts: replacements of the workers since the last message. recent_steps: see `StepLog`.
    """

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    step_s: float = 0.0
    phase_s: dict[str, float] = {}
    num_worker_restarts: int = 0
    recent_steps: list[StepRecord] = []


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """Answer to a call. result: pickled result of a utility call. error: exception of the call."""

    call_id: int
    result: bytes = b""
    error: ErrorData | None = None


class BrokerStatus(_Message, frozen=True, kw_only=True, tag="status"):
    """Heartbeat of a broker, several times a second; and state of an engine without one, which has no queue.

    stats: of all cores together, after their last steps. num_engines: cores. num_recovering: cores that are being
    replaced. num_recovering_workers: cores whose workers are. num_restarts: replaced cores so far.
    num_worker_restarts: replacements of a core's workers so far. stalled_s: longest time since a core with
    unfinished requests has computed a token. num_requests: unfinished requests. num_queued_requests,
    num_queued_tokens: those that no core could run at once, and their prompt tokens. num_refused: requests refused
    so far since the queue was full. steps: of all cores so far. recent_steps: by core, those of its `StepLog` since
    the last heartbeat.
    """

    stats: SchedulerStats
    num_engines: int
    num_recovering: int
    num_recovering_workers: int = 0
    num_restarts: int = 0
    num_worker_restarts: int = 0
    stalled_s: float = 0.0
    num_requests: int = 0
    num_queued_requests: int = 0
    num_queued_tokens: int = 0
    num_refused: int = 0
    steps: StepTotals = msgspec.field(default_factory=StepTotals)
    recent_steps: list[list[StepRecord]] = []

    @property
    def why_not_ready(self) -> str | None:
        """Why new requests would not run; None if they would."""
        if self.num_recovering == self.num_engines:
            return "the cores are being replaced"
        state = self.stats.state
        return None if state.is_ready else f"the engine does not run: {state.name}"


class FeaturesChanged(_Message, frozen=True, kw_only=True, tag="features"):
    """States of features in the broker after a change, for the broker that replaces it. states: by feature, pickled."""

    states: bytes


class CoreLog(_Message, frozen=True, kw_only=True, tag="log"):
    """A log record. fields: plain attributes of the `logging.LogRecord`; its text includes the traceback."""

    fields: dict[str, str | int | float]


class CoreEnded(_Message, frozen=True, kw_only=True, tag="ended"):
    """Last message of a core that did not start or has failed for good."""

    error: ErrorData


class ToCore(msgspec.Struct, frozen=True):
    """Any message of a client."""

    message: AddRequest | AbortRequests | UtilityCall | CloseCore


class ToFront(msgspec.Struct, frozen=True):
    """Any message to a front end's process."""

    message: Drain


# Messages that the client of a core handles; the reader thread writes log records itself.
CoreMessage: TypeAlias = (
    CoreStarted
    | FrontStarted
    | FrontEnded
    | CoreBusy
    | StepOutputs
    | Answer
    | CoreEnded
    | BrokerStatus
    | FeaturesChanged
)


class FromCore(msgspec.Struct, frozen=True):
    """Any message of a core."""

    message: CoreMessage | CoreLog
