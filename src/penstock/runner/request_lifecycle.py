"""How requests enter, change and leave the runner: one order, and all owners of per-slot state or none."""

from __future__ import annotations

import logging

from penstock.contract import NewRequestData, SchedulerOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.speculative import Speculator

logger = logging.getLogger(__name__)


class RequestLifecycle:
    """Applies the state changes of a step: free slots first, then add, then extend, then one flush."""

    def __init__(
        self,
        requests: RequestStates,
        block_tables: BlockTables,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        speculator: Speculator,
    ) -> None:
        self._requests = requests
        self._block_tables = block_tables
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._speculator = speculator

    def apply(self, output: SchedulerOutput) -> dict[str, str]:
        """Bring the state up to this step. Returns the requests that cannot run, with the reason."""
        for req_id in output.finished_req_ids:
            self._remove(req_id)
        for req_id in output.preempted_req_ids:
            self._remove(req_id)
        errors: dict[str, str] = {}
        for request in output.scheduled_new_reqs:
            # An id that is still held is an update of that request: the old state goes, the new one comes.
            self._remove(request.req_id)
            error = self._add(request)
            if error is not None:
                errors[request.req_id] = error
        self._extend(output, errors)
        if output.scheduled_spec_decode_tokens:
            self._take_drafts(output, errors)
        self._requests.flush()
        self._block_tables.flush()
        return errors

    def _remove(self, req_id: str) -> None:
        slot = self._requests.slot_of.get(req_id)
        if slot is not None:
            self._requests.remove(req_id)
            self._sampler.remove_request(slot)
            self._prompt_logprobs.remove_request(slot)
            self._speculator.remove_request(slot)

    def _add(self, request: NewRequestData) -> str | None:
        slot = self._requests.add(request)
        try:
            self._block_tables.set_blocks(slot, request.block_ids)
            params, prompt = request.sampling_params, request.prompt_token_ids
            output = request.prefill_token_ids[len(prompt) :]
            self._sampler.add_request(slot, params, prompt, output)
            self._prompt_logprobs.add_request(slot, params, len(prompt), len(output))
            self._speculator.add_request(slot, params, prompt, output)
        except Exception as error:  # whatever one request brings, the others go on
            self._block_tables.discard_staged(slot)
            self._requests.discard_staged(slot)
            self._remove(request.req_id)
            logger.exception("Request %s could not be added", request.req_id)
            return f"{type(error).__name__}: {error}"
        return None

    def _extend(self, output: SchedulerOutput, errors: dict[str, str]) -> None:
        cached = output.scheduled_cached_reqs
        slot_of = self._requests.slot_of
        if not all(map(slot_of.__contains__, cached.req_ids)):
            why = "the worker does not hold this request: adding it failed in an earlier step"
            errors |= {req_id: why for req_id in cached.req_ids if req_id not in slot_of}
        self._requests.note_computed(cached)
        # Between two new blocks there are as many steps as a block has positions.
        if not cached.new_block_ids or cached.new_block_ids.count(None) == len(cached.new_block_ids):
            return
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and req_id in slot_of:
                self._block_tables.append_blocks(slot_of[req_id], block_ids)

    def _take_drafts(self, output: SchedulerOutput, errors: dict[str, str]) -> None:
        most = self._requests.max_drafts
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            if len(token_ids) > most:
                errors[req_id] = f"the step has {len(token_ids)} drafts of this request; this worker takes up to {most}"
            elif req_id in self._requests.slot_of:
                self._requests.set_drafts(self._requests.slot_of[req_id], token_ids)
