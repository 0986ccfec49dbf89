"""Steps that repeat an earlier one: the same requests, each with one more token, and nothing of theirs in between.

A message says so by `repeats_step_id`. What such messages have in common is made once, which saves time and means
nothing: messages are never changed.
"""

from __future__ import annotations

import msgspec

from penstock.contract import CachedRequestData, SampledOutput, SchedulerOutput
from penstock.scheduler.request import Request
from penstock.scheduler.step import ScheduledRequest

_NO_BLOCKS: list[tuple[list[int], ...] | None] = []


class DecodeStep(msgspec.Struct, frozen=True, gc=False):
    """A step in flight in which every request samples its next token.

    num_computed_tokens: per request, before the step.
    """

    requests: list[Request]
    req_ids: list[str]
    num_computed_tokens: list[int]

    def has_plain_results(self, results: SampledOutput) -> bool:
        """Whether the results are a token for each request, in this order, and nothing else."""
        return (
            results.req_ids == self.req_ids
            and results.logprobs is None
            and not results.prompt_logprobs
            and not results.errors
        )

    def part(self, row: int) -> ScheduledRequest:
        """One request's part in the step."""
        return ScheduledRequest(self.requests[row], self.num_computed_tokens[row] + 1, 1)

    def by_request(self) -> dict[str, ScheduledRequest]:
        """All parts, by request id."""
        return {req_id: self.part(row) for row, req_id in enumerate(self.req_ids)}


class DecodeSteps:
    """Repeats a step in which all running requests decoded, or a part of them that takes turns with others.

    Good for as long as no request comes, goes or is preempted, and none of them reaches its limit, which is known
    beforehand: `num_left` steps. Every request must have sampled one token in the step before.

    runs_ahead: whether a step may come before the results of the one that it repeats.
    last_step_id: the one that the next step repeats.
    num_steps: steps since then. due: by that number, the rows whose requests need a block for the step that comes next.
    """

    __slots__ = (
        "_counts",
        "_num_drafts_wanted",
        "_repeats",
        "_req_ids",
        "due",
        "last_step_id",
        "num_left",
        "num_steps",
        "requests",
        "runs_ahead",
    )

    def __init__(
        self,
        requests: list[Request],
        named: tuple[list[str], dict[str, int]] | None,
        step_id: int,
        *,
        runs_ahead: bool,
        num_drafts_wanted: int = 0,
        num_steps: int = 10**9,
    ) -> None:
        """named: the ids of these requests and their tokens, one each, as the step before had them in its message.

        None where some were new to the worker in it, which is not the same step again. step_id: of that step.
        num_drafts_wanted: as in the message. num_steps: after which it may no longer be the same.
        """
        self._num_drafts_wanted = num_drafts_wanted
        self.requests = requests
        self.runs_ahead = runs_ahead
        self.last_step_id = step_id
        self._repeats = named is not None
        self._req_ids = [request.req_id for request in requests] if named is None else named[0]
        self._counts = dict.fromkeys(self._req_ids, 1) if named is None else named[1]
        self.num_steps = 0
        num_left = min(request.length_limit - 1 - request.num_computed_tokens for request in requests)
        self.num_left = min(num_left, num_steps)
        self.due: dict[int, list[int]] = {}
        for row in range(len(requests)):
            self._note_capacity(row)

    def next(
        self,
        step_id: int,
        new_block_ids: dict[int, tuple[list[int], ...]] | None = None,
        *,
        clears_blocks: bool = False,
    ) -> tuple[SchedulerOutput, DecodeStep]:
        """The next step, for the worker and to be remembered; moves the requests ahead as if it were done.

        new_block_ids: of the rows that are due; None if none are.
        """
        blocks = _NO_BLOCKS if new_block_ids is None else self._take_blocks(new_block_ids)
        self.num_left -= 1
        self.num_steps += 1
        num_computed_tokens = []
        for request in self.requests:
            num_computed_tokens.append(request.num_computed_tokens)
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
            request.num_in_flight_steps += 1
        output = SchedulerOutput(
            step_id=step_id,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self._req_ids, new_block_ids=blocks, num_computed_tokens=num_computed_tokens
            ),
            num_scheduled_tokens=self._counts,
            total_num_scheduled_tokens=len(self._req_ids),
            num_drafts_wanted=self._num_drafts_wanted,
            repeats_step_id=self.last_step_id if self._repeats else None,
            clears_blocks=clears_blocks,
        )
        self._repeats = True
        self.last_step_id = step_id
        return output, DecodeStep(self.requests, self._req_ids, num_computed_tokens)

    def _take_blocks(self, new_block_ids: dict[int, tuple[list[int], ...]]) -> list[tuple[list[int], ...] | None]:
        del self.due[self.num_steps]
        blocks: list[tuple[list[int], ...] | None] = [None] * len(self.requests)
        for row, block_ids in new_block_ids.items():
            blocks[row] = block_ids
            self._note_capacity(row)
        return blocks

    def _note_capacity(self, row: int) -> None:
        request = self.requests[row]
        num_steps = request.kv_capacity - request.num_computed_tokens
        self.due.setdefault(self.num_steps + num_steps, []).append(row)
