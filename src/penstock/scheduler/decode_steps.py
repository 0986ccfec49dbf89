"""Steps that follow one another with nothing in between: the same requests, each with one more token.

What such a step's messages have in common is made once and shared by them: messages are never changed.
"""

from __future__ import annotations

import msgspec

from penstock.contract import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from penstock.scheduler.request import Request
from penstock.scheduler.step import ScheduledRequest

# Where steps are run at once, the next blocks are given when fewer steps than this have room: seldom, and for many.
_FEW_STEPS = 4


class DecodeStep(msgspec.Struct, frozen=True, gc=False):
    """A step in flight in which every request samples its next token; or its next `max_steps` tokens at most.

    num_computed_tokens: per request, before the step.
    """

    requests: list[Request]
    req_ids: list[str]
    num_computed_tokens: list[int]
    max_steps: int = 1

    def has_plain_results(self, results: ModelRunnerOutput) -> bool:
        """Whether the results are tokens for each request, in this order, and nothing else."""
        return (
            results.req_ids == self.req_ids
            and results.logprobs is None
            and not results.prompt_logprobs
            and not results.errors
        )

    def num_steps(self, results: ModelRunnerOutput) -> int:
        """How often the step was run, as its first request tells; 1 where that cannot be."""
        num_tokens = len(results.sampled_token_ids[0]) if results.sampled_token_ids else 0
        return num_tokens if 1 <= num_tokens <= self.max_steps else 1

    def part(self, row: int, num_steps: int = 1) -> ScheduledRequest:
        """One request's part in the step, which was run so often."""
        num_computed_tokens = self.num_computed_tokens[row] + num_steps
        return ScheduledRequest(self.requests[row], num_computed_tokens, samples=True, num_steps=num_steps)

    def by_request(self, num_steps: int = 1) -> dict[str, ScheduledRequest]:
        """All parts, by request id."""
        return {req_id: self.part(row, num_steps) for row, req_id in enumerate(self.req_ids)}


class DecodeSteps:
    """Continues a step in which all running requests decoded.

    Good for as long as no request comes, goes or is preempted, and none of them reaches its limit, which is known
    beforehand: `num_left` steps. Every request must have sampled one token in the step before.

    A step may be run several times at once, as long as no request reaches its limit or the end of its blocks, and none
    has stop strings, which only its text shows. Blocks are therefore given ahead of their use, where there are enough:
    among many requests there is one at almost every step that needs another block.

    num_steps: steps since then.
    """

    __slots__ = (
        "_counts",
        "_due",
        "_most_at_once",
        "_next_due",
        "_no_blocks",
        "_req_ids",
        "num_left",
        "num_steps",
        "requests",
    )

    def __init__(
        self,
        requests: list[Request],
        named: tuple[list[str], dict[str, int]] | None = None,
        *,
        most_at_once: int = 1,
    ) -> None:
        """named: the ids of these requests and their tokens, one each, as the step before had them in its message."""
        self.requests = requests
        self._req_ids = [request.req_id for request in requests] if named is None else named[0]
        self._no_blocks: list[tuple[list[int], ...] | None] = [None] * len(requests)
        self._counts = dict.fromkeys(self._req_ids, 1) if named is None else named[1]
        self.num_steps = 0
        self.num_left = min(request.length_limit - 1 - request.num_computed_tokens for request in requests)
        self._most_at_once = 1 if any(request.sampling_params.stop for request in requests) else most_at_once
        # By `num_steps`, the rows whose requests need a block for the step that comes next.
        self._due: dict[int, list[int]] = {}
        for row in range(len(requests)):
            self._note_capacity(row)
        self._next_due = min(self._due)

    def rows_due(self) -> list[int]:
        """Rows whose requests need a block for the next step."""
        return self._due.get(self.num_steps, [])

    def rows_due_soon(self) -> list[int]:
        """Rows whose requests need a block for any of the steps that may be run at once; none while a few have room."""
        if self._next_due >= self.num_steps + min(_FEW_STEPS, self._most_at_once):
            return []
        end = self.num_steps + min(self._most_at_once, self.num_left)
        return [row for num_steps, rows in self._due.items() if num_steps < end for row in rows]

    def next(self, step_id: int, new_block_ids: dict[int, tuple[list[int], ...]]) -> tuple[SchedulerOutput, DecodeStep]:
        """The next step, for the worker and to be remembered; moves the requests ahead as if it were done.

        new_block_ids: by row; of those that are due, and of those that are due soon if they get theirs now.
        """
        blocks = self._take_blocks(new_block_ids) if new_block_ids else self._no_blocks
        max_steps = self._most_at_once
        if max_steps > 1:
            max_steps = min(max_steps, self.num_left, self._next_due - self.num_steps)
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
            max_steps=max_steps,
        )
        return output, DecodeStep(self.requests, self._req_ids, num_computed_tokens, max_steps)

    def count_more(self, num_steps: int) -> None:
        """The last step was run so many times more."""
        self.num_left -= num_steps
        self.num_steps += num_steps

    def _take_blocks(self, new_block_ids: dict[int, tuple[list[int], ...]]) -> list[tuple[list[int], ...] | None]:
        for num_steps in [num_steps for num_steps, rows in self._due.items() if rows[0] in new_block_ids]:
            del self._due[num_steps]
        blocks = self._no_blocks.copy()
        for row, block_ids in new_block_ids.items():
            blocks[row] = block_ids
            self._note_capacity(row)
        self._next_due = min(self._due)
        return blocks

    def _note_capacity(self, row: int) -> None:
        request = self.requests[row]
        num_steps = request.kv_capacity - request.num_computed_tokens
        self._due.setdefault(self.num_steps + num_steps, []).append(row)
