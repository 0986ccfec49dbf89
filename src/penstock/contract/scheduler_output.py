"""What the scheduler asks of a worker in one step."""

from __future__ import annotations

import msgspec

from penstock.contract.parts import Parts
from penstock.contract.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the worker does not hold: new, or back after a preemption, or updated (remove, then add).

    prompt_token_ids: the user's prompt.
    prefill_token_ids: the prompt and every token generated so far; at least as long as the prompt.
    block_ids: one list per KV-cache group, the request's whole block list at this moment.
    num_computed_tokens: positions whose KV is already in those blocks (a prefix-cache hit).
    sampling_params: its seed is set; the front end draws one where the user gave none.
    parts: what features are given with the request.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    parts: Parts | None = None

    def anonymous(self) -> str:
        """A description for logs that shows lengths instead of the user's tokens."""
        parts = "" if self.parts is None else f", parts=[{self.parts.anonymous()}]"
        return (
            f"NewRequestData(req_id={self.req_id!r}, prompt={len(self.prompt_token_ids)} tokens, "
            f"prefill={len(self.prefill_token_ids)} tokens, computed={self.num_computed_tokens}, "
            f"blocks={tuple(len(ids) for ids in self.block_ids)}{parts})"
        )


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """All other scheduled requests, as parallel lists in scheduling order.

    new_block_ids: per request, the blocks appended in this step, one list per group, None when there are none; empty
        where no request got any.
    num_computed_tokens: before this step; an upper bound while earlier steps are in flight.
    """

    req_ids: list[str] = []
    new_block_ids: list[tuple[list[int], ...] | None] = []
    num_computed_tokens: list[int] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step: any mix of prefill chunks and decodes.

    num_scheduled_tokens: tokens to run per request, drafts included. Its keys are exactly the requests of
        `scheduled_new_reqs` and `scheduled_cached_reqs`.
    scheduled_spec_decode_tokens: the drafts among them, the last of the request's tokens; -1 where only the device
        knows them.
    num_drafts_wanted: drafts that the worker's speculator makes for each request after this step, at most; 0 to do
        without for now.
    finished_req_ids: ended since the last step; may name requests that the worker never saw.
    preempted_req_ids: to be forgotten like finished ones.
    repeats_step_id: the step before, or one a few steps before with nothing of its requests in between, where this one
        asks for the same: the same requests in the same order, one token each and no drafts, nobody new, finished or
        preempted. What differs is what they have computed, and perhaps new blocks. A worker may keep what it made of
        that step; to pass over this changes nothing.
    clears_blocks: whether blocks that requests get in this step may hold NaN of requests that had them before, so that
        workers clear them, but for cached prefixes.
    parts: what features on the scheduler's side tell those on the workers'.
    A step with no tokens only updates state.
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
    clears_blocks: bool = False
    parts: Parts | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to run and nothing to forget, so that it need not see this step."""
        return not (self.num_scheduled_tokens or self.finished_req_ids or self.preempted_req_ids or self.parts)

    def anonymous(self) -> str:
        """A description for logs that holds no token of any user."""
        new = ", ".join(request.anonymous() for request in self.scheduled_new_reqs)
        parts = "" if self.parts is None else f", parts=[{self.parts.anonymous()}]"
        return (
            f"SchedulerOutput(step_id={self.step_id}, new=[{new}], cached={self.scheduled_cached_reqs.req_ids}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, finished={sorted(self.finished_req_ids)}, "
            f"preempted={sorted(self.preempted_req_ids)}{parts})"
        )


class GrammarOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the host says to a step between its forward pass and its tokens.

    structured_output_request_ids: requests with structured outputs that get a token in this step, in any order.
    grammar_bitmask: little-endian int32 words, row-major: for each of them a row for its next token, and one more for
        the token after each draft; a set bit allows the token. num_words: of a row, ceil(vocabulary / 32).
    num_rows: of each request; empty where each has one.
    """

    step_id: int
    structured_output_request_ids: list[str] = []
    grammar_bitmask: bytes = b""
    num_words: int = 0
    num_rows: list[int] = []
