"""Requests that the workers hold, rebuilt from the messages that they get and send."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.contract import ModelRunnerOutput, NewRequestData, SchedulerOutput
from penstock.contract.runner_output import SampledOutput


@dataclass(slots=True)
class _Held:
    """A request in the workers.

    token_ids: prompt and every token sampled so far. block_ids: whole block table, per KV-cache group.
    """

    added: NewRequestData
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int

    def copy(self) -> _Held:
        return replace(self, token_ids=self.token_ids.copy(), block_ids=tuple(ids.copy() for ids in self.block_ids))

    def as_new(self) -> NewRequestData:
        return NewRequestData(
            req_id=self.added.req_id,
            prompt_token_ids=self.added.prompt_token_ids,
            prefill_token_ids=self.token_ids,
            sampling_params=self.added.sampling_params,
            block_ids=self.block_ids,
            num_computed_tokens=self.num_computed_tokens,
            parts=self.added.parts,
            pooling_params=self.added.pooling_params,
        )


@dataclass(slots=True)
class HeldRequests:
    """Requests in the workers, by id. Counts of computed tokens are exact once all steps have been read."""

    _held: dict[str, _Held] = field(default_factory=dict)

    def launch(self, step: SchedulerOutput) -> None:
        """Apply a step's added, removed and extended requests."""
        held = self._held
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            held.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            block_ids = tuple(ids.copy() for ids in new.block_ids)
            held[new.req_id] = _Held(new, new.prefill_token_ids.copy(), block_ids, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=False):
            for ids, more in zip(held[req_id].block_ids, added or (), strict=False):
                ids.extend(more)

    def settle(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Apply a step's result: its tokens, and the positions that it computed."""
        sampled = result.sampled_token_ids if isinstance(result, SampledOutput) else [[]] * len(result.req_ids)
        for req_id, token_ids in zip(result.req_ids, sampled, strict=True):
            one = self._held.get(req_id)
            if one is None or req_id in result.errors:
                continue
            one.num_computed_tokens += step.num_scheduled_tokens[req_id]
            if token_ids:
                # Draft tokens behind the first rejected one are computed again.
                num_drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
                one.num_computed_tokens -= num_drafts - (len(token_ids) - 1)
                one.token_ids += token_ids

    def as_new(self) -> list[NewRequestData]:
        """All requests as the messages that would add them to other workers, in the order of their arrival."""
        return [one.as_new() for one in self._held.values()]

    def copy(self) -> HeldRequests:
        return HeldRequests({req_id: one.copy() for req_id, one in self._held.items()})
