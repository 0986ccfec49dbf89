"""Log of a core's last steps, for live views: token counts by kind, kept only while a view watches."""

from __future__ import annotations

import time

import msgspec

from penstock.contract import SchedulerOutput

# Shortest interval between two deliveries of the log.
_INTERVAL_S = 0.5


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Record of a core's step.

    ended_at: Unix seconds. seconds: duration. num_prefill_tokens: tokens of prompts, and of preempted requests that are
    computed again. num_decode_tokens: last known tokens, one per request. num_draft_tokens: verified draft tokens.
    """

    ended_at: float
    seconds: float
    num_reqs: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_draft_tokens: int


class StepLog:
    """Records steps until the end of the last watch.

    A watch ends by itself, so that a core which was replaced, or whose viewer is gone, needs no message about it.
    launched: the last launched step, set by the core; it is counted at its end only, and only while a view watches.
    """

    __slots__ = ("_due_at", "_records", "_watched_until", "launched")

    def __init__(self) -> None:
        self._watched_until = 0.0
        self._due_at = 0.0
        self.launched: SchedulerOutput | None = None
        self._records: list[StepRecord] = []

    def watch(self, seconds: float) -> None:
        """Record the steps of the next seconds."""
        self._watched_until = max(self._watched_until, time.monotonic() + seconds)

    def take(self, step_s: float, *, is_last: bool) -> list[StepRecord]:
        """End the launched step. Returns the records since the last delivery, twice a second at most.

        is_last: whether no step follows for now, so that all are returned.
        """
        output, self.launched = self.launched, None
        if not self._watched_until:
            return []
        now = time.monotonic()
        if output is not None and output.total_num_scheduled_tokens:
            self._records.append(record_of(output, step_s))
        if now > self._watched_until:
            self._watched_until = 0.0
        elif now < self._due_at and not is_last:
            return []
        self._due_at = now + _INTERVAL_S
        records, self._records = self._records, []
        return records


def record_of(output: SchedulerOutput, step_s: float) -> StepRecord:
    """Record of a step that ends now.

    A request that is not new to the workers and gets one token beside its drafts decodes.
    """
    num_reqs, num_tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
    new = {request.req_id for request in output.scheduled_new_reqs}
    drafts = output.scheduled_spec_decode_tokens
    num_drafts = sum(map(len, drafts.values()))
    if num_tokens == num_reqs + num_drafts and not new:
        num_decodes = num_reqs
    else:
        counts = output.num_scheduled_tokens.items()
        num_decodes = sum(count == 1 + len(drafts.get(req_id, ())) for req_id, count in counts if req_id not in new)
    return StepRecord(
        ended_at=time.time(),
        seconds=step_s,
        num_reqs=num_reqs,
        num_prefill_tokens=num_tokens - num_decodes - num_drafts,
        num_decode_tokens=num_decodes,
        num_draft_tokens=num_drafts,
    )
