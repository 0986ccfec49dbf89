"""Prompt log-probabilities: of each prompt token after the first, given those before it.

They are computed with each prefill chunk, and nothing is kept between steps. Within a step the logits are computed and
reduced a few rows at a time, so memory is bounded whatever the prompt's length and the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.config.sampling import MAX_PROMPT_RESULTS, rows_at_once
from penstock.contract import LogprobsLists, NewRequestData
from penstock.device import Device
from penstock.device.base import PendingCopy, wait_until
from penstock.kernels.sampling import LogprobsTensors, top_logprobs
from penstock.models.interface import LanguageModel
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import count
from penstock.runner.slot_owner import SlotOwner
from penstock.step.batch import BatchLayout
from penstock.step.logits_rows import PromptRows

_NONE = -1
# Results beyond this are copied to the host before more are computed.
_MAX_RESULTS = MAX_PROMPT_RESULTS
_TIMEOUT_S = 300.0


class PendingPromptLogprobs:
    """Prompt log-probabilities of a step in copy to the host. `copies` are consecutive rows."""

    def __init__(self, rows: PromptRows, copies: Sequence[PendingCopy]) -> None:
        self._rows = rows
        self._copies = copies

    def is_done(self) -> bool:
        return all(copy.is_done() for copy in self._copies)

    def by_request(self) -> dict[str, LogprobsLists]:
        """Rows of each request, as wide as the step's `num_logprobs`; call once `is_done`."""
        columns: list[list[list[object]]] = [[], [], []]
        for copy in self._copies:
            for column, tensor in zip(columns, copy.tensors, strict=True):
                column += tensor.tolist()
        result, start = {}, 0
        for req_id, num_rows in zip(self._rows.req_ids, self._rows.counts, strict=True):
            ids, logprobs, ranks = (column[start : start + num_rows] for column in columns)
            result[req_id] = LogprobsLists(
                logprob_token_ids=ids,  # type: ignore[arg-type]
                logprobs=logprobs,  # type: ignore[arg-type]
                sampled_token_ranks=ranks,  # type: ignore[arg-type]
            )
            start += num_rows
        return result


class PromptLogprobs(SlotOwner):
    """token_ids_SL: the runner's token table, int32 [slots, positions]."""

    def __init__(self, device: Device, num_slots: int, vocab_size: int, token_ids_SL: Tensor) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._token_ids_SL = token_ids_SL
        self._num_logprobs = np.full(num_slots, _NONE, dtype=np.int64)
        # Slots of requests with prompt_logprobs; empty in most steps.
        self._asking: set[int] = set()
        self._prompt_len = np.zeros(num_slots, dtype=np.int64)
        self.max_rows = rows_at_once(vocab_size, device.kind)

    def add(self, slot: int, request: NewRequestData) -> None:
        asked, num_prompt_tokens = request.sampling_params.prompt_logprobs, len(request.prompt_token_ids)
        # A preempted request with output has had its prompt log-probabilities.
        is_wanted = asked is not None and len(request.prefill_token_ids) == num_prompt_tokens
        self._num_logprobs[slot] = count(asked, self._vocab_size) if asked is not None and is_wanted else _NONE
        self._prompt_len[slot] = num_prompt_tokens
        self._asking.discard(slot)
        if is_wanted:
            self._asking.add(slot)

    def remove(self, slot: int) -> None:
        self._asking.discard(slot)

    def rows(self, layout: BatchLayout, requests: RequestStates) -> PromptRows | None:
        """Select the tokens of the step with prompt log-probabilities; None for none.

        During prefill the host's count of computed tokens is exact: no sampled token, which could be rejected, is
        included.
        """
        if not self._asking:
            return None
        slots = layout.slots_np
        asked = self._num_logprobs[slots]
        computed = requests.num_computed_tokens_upper_bound(slots)
        # The prompt's last token predicts the first output token.
        counts = np.minimum(layout.counts_np, self._prompt_len[slots] - 1 - computed)
        counts = np.where(asked == _NONE, 0, counts.clip(min=0))
        which = np.flatnonzero(counts)
        if not len(which):
            return None
        starts, firsts = layout.query_start_loc_np[:-1], slots * self._token_ids_SL.shape[1] + computed + 1
        return PromptRows(
            req_ids=[layout.req_ids[index] for index in which.tolist()],
            counts=counts[which].tolist(),
            hidden_indices=np.concatenate([starts[index] + np.arange(counts[index]) for index in which]),
            target_indices=np.concatenate([firsts[index] + np.arange(counts[index]) for index in which]),
            num_logprobs=int(asked[which].max()),
        )

    def compute(
        self,
        rows: PromptRows | None,
        model: LanguageModel,
        hidden: Tensor | None,
        named: Mapping[str, Tensor],
    ) -> PendingPromptLogprobs | None:
        """Start computing and copying prompt log-probabilities. hidden: [tokens of the step, hidden size].

        named: step inputs of all tokens, from which the LM head gets those of its rows.
        """
        if rows is None or hidden is None:
            return None
        hidden_indices = self._device.upload(rows.hidden_indices)
        targets = self._token_ids_SL.view(-1).index_select(0, self._device.upload(rows.target_indices)).long()
        num_rows, width = len(rows.hidden_indices), 1 + rows.num_logprobs
        rows_per_part = max(1, min(self.max_rows, _MAX_RESULTS // width))
        rows_per_copy = max(1, _MAX_RESULTS // (width * rows_per_part)) * rows_per_part
        copies: list[PendingCopy] = []
        of_all = NO_CONTEXT.with_inputs(named)
        for start in range(0, num_rows, rows_per_copy):
            if copies:
                wait_until(copies[-1].is_done, _TIMEOUT_S, _describe_wait)
            stop = min(start + rows_per_copy, num_rows)
            results = self._new_results(stop - start, width)
            for first in range(start, stop, rows_per_part):
                part = slice(first, min(first + rows_per_part, stop))
                select = partial(torch.index_select, dim=0, index=hidden_indices[part])
                logits = model.compute_logits(select(hidden), of_all.of_rows(select))
                found = top_logprobs(logits, targets[part], rows.num_logprobs)
                del logits
                for result, values in zip(results, found, strict=True):
                    result[part.start - start : part.stop - start] = values
            copies.append(self._device.download(results))
        return PendingPromptLogprobs(rows, copies)

    def _new_results(self, num_rows: int, width: int) -> LogprobsTensors:
        """Allocate the results before the logits of any part, which would leave gaps in memory otherwise."""
        device = self._device.torch_device
        return LogprobsTensors(
            torch.empty(num_rows, width, dtype=torch.int64, device=device),
            torch.empty(num_rows, width, device=device),
            torch.empty(num_rows, dtype=torch.int64, device=device),
        )


def _describe_wait() -> str:
    return f"The runner waited {_TIMEOUT_S:g} s for the device to deliver a part of the prompt log-probabilities."
