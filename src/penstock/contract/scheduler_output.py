"""Messages of a step from the scheduler to the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.contract.parts import Parts
from penstock.contract.pooling_params import PoolingParams
from penstock.contract.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Request that the worker does not hold: new, resumed after a preemption, or updated (remove, then add).

    prompt_token_ids: the user's prompt.
    prefill_token_ids: the prompt and every token generated so far; at least as long as the prompt.
    block_ids: whole block table of the request, one list per KV cache group.
    num_computed_tokens: positions whose KV is already in those blocks (a prefix-cache hit).
    sampling_params: always with a seed; the front end draws one if unset.
    parts: data of features for the request.
    pooling_params: of a pooling request, with its task; None for one that generates.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    parts: Parts | None = None
    pooling_params: PoolingParams | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated before a preemption."""
        return self.prefill_token_ids[len(self.prompt_token_ids) :]

    @property
    def has_prompt_ids(self) -> bool:
        """Whether the ids of the prompt's tokens say what they are (`Part.has_prompt_ids`)."""
        return self.parts is None or self.parts.have_prompt_ids

    def anon_repr(self) -> str:
        """Describe the request for logs, with lengths instead of the user's tokens."""
        parts = "" if self.parts is None else f", parts=[{self.parts.anon_repr()}]"
        return (
            f"NewRequestData(req_id={self.req_id!r}, prompt={len(self.prompt_token_ids)} tokens, "
            f"prefill={len(self.prefill_token_ids)} tokens, computed={self.num_computed_tokens}, "
            f"blocks={tuple(len(ids) for ids in self.block_ids)}{parts})"
        )


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduled requests that the worker holds, as parallel lists in scheduling order.

    new_block_ids: per request, new blocks, one list per group, or None; empty if no request got any.
    num_computed_tokens: before this step; an upper bound while earlier steps are in flight.
    """

    req_ids: list[str] = []
    new_block_ids: list[tuple[list[int], ...] | None] = []
    num_computed_tokens: list[int] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Step: any mix of prefill chunks and decodes. A step without tokens only updates state.

    num_scheduled_tokens: tokens to run per request, draft tokens included. Its keys are exactly the requests of
        `scheduled_new_reqs` and `scheduled_cached_reqs`.
    scheduled_spec_decode_tokens: draft tokens, the last of the request's scheduled tokens; -1 for tokens that only the
        device knows.
    num_drafts_wanted: maximum number of drafts per request to propose after this step.
    finished_req_ids: ended since the last step; may name requests that the worker never saw.
    preempted_req_ids: also removed by the worker.
    repeats_step_id: id of an earlier decode step with the same requests in the same order, one token each, no draft
    tokens, and no request added, finished or preempted since. Only num_computed_tokens and new blocks differ; the
    worker may reuse that step's batch.
    awaiting_req_ids: requests whose sampling awaits parts of features, made while the forward pass runs
        (`SamplingInput`). Empty: workers sample as soon as the forward pass is done.
    clears_blocks: whether workers zero this step's new blocks, except prefix-cache hits, since they may hold NaN.
    parts: data of features from the scheduler to the workers.
    """

    step_id: int
    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = CachedRequestData()
    num_scheduled_tokens: dict[str, int] = {}
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    num_drafts_wanted: int = 0
    finished_req_ids: set[str] = set()
    preempted_req_ids: set[str] = set()
    repeats_step_id: int | None = None
    awaiting_req_ids: list[str] = []
    clears_blocks: bool = False
    parts: Parts | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to run or remove, so that the step need not be sent."""
        return not (self.num_scheduled_tokens or self.finished_req_ids or self.preempted_req_ids or self.parts)

    def first_positions(self) -> Iterator[tuple[str, int]]:
        """The requests that the message lists, and the position of the first token that the step computes of each."""
        yield from ((new.req_id, new.num_computed_tokens) for new in self.scheduled_new_reqs)
        yield from zip(self.scheduled_cached_reqs.req_ids, self.scheduled_cached_reqs.num_computed_tokens, strict=True)

    def with_drafts(self, drafts: Mapping[str, Sequence[int]]) -> SchedulerOutput:
        """Return the step with these draft tokens, for requests that have some in it; -1 stays beyond them."""
        scheduled = self.scheduled_spec_decode_tokens
        known = {
            req_id: [*ids, *scheduled[req_id]][: len(scheduled[req_id])]
            for req_id, ids in drafts.items()
            if req_id in scheduled
        }
        return msgspec.structs.replace(self, scheduled_spec_decode_tokens={**scheduled, **known})

    def anon_repr(self) -> str:
        """Describe the step for logs, without users' tokens."""
        new = ", ".join(request.anon_repr() for request in self.scheduled_new_reqs)
        parts = "" if self.parts is None else f", parts=[{self.parts.anon_repr()}]"
        return (
            f"SchedulerOutput(step_id={self.step_id}, new=[{new}], cached={self.scheduled_cached_reqs.req_ids}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, finished={sorted(self.finished_req_ids)}, "
            f"preempted={sorted(self.preempted_req_ids)}{parts})"
        )


class SamplingInput(msgspec.Struct, frozen=True, kw_only=True):
    """Message that asks for the sampling of an executed step.

    parts: data of features for the step's `awaiting_req_ids`, such as the bitmask of structured output.
    """

    step_id: int
    parts: Parts | None = None

    def anon_repr(self) -> str:
        """Describe the message for logs."""
        parts = "" if self.parts is None else f", parts=[{self.parts.anon_repr()}]"
        return f"SamplingInput(step_id={self.step_id}{parts})"
