"""Rules of Whisper's tokens: tokens that are never generated, and timestamps, which come in pairs and never go back.

As in the paper's section 4.5 and in OpenAI's decoder (https://github.com/openai/whisper).
Suffixes: S slots, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.config import ModelConfig
from penstock.contract import NewRequestData, part_of
from penstock.errors import InvalidParameter
from penstock.features.encoder_decoder.messages import SpeechPart
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import StagedTensor
from penstock.step.logits_rows import LogitsRows
from penstock.worker.feature import WorkerServices

_NONE = -1


@dataclass(frozen=True, slots=True)
class SpeechConstants:
    """Token ids of generation_config.json.

    never: tokens that are never generated. not_first: nor as the first token. no_timestamps: the token before the first
    timestamp; None where the model has no timestamps. end: the end of a text, before which all tokens are text.
    last_initial: largest timestamp of the first token, counted from 0; None for no limit.
    """

    never: tuple[int, ...]
    not_first: tuple[int, ...]
    no_timestamps: int | None
    end: int
    last_initial: int | None

    @classmethod
    def of(cls, model: ModelConfig) -> SpeechConstants:
        fields = model.hf_generation_config
        last, no_timestamps = fields.get("max_initial_timestamp_index"), fields.get("no_timestamps_token_id")

        def ids(name: str) -> tuple[int, ...]:
            return tuple(one for one in fields.get(name) or () if 0 <= one < model.vocab_size)

        return cls(
            never=ids("suppress_tokens"),
            not_first=ids("begin_suppress_tokens"),
            no_timestamps=no_timestamps if isinstance(no_timestamps, int) else None,
            end=min(model.eos_token_ids, default=model.vocab_size),
            last_initial=last if isinstance(last, int) else None,
        )


class SpeechRules(LogitsTransform):
    """State on the device, by slot: number of generated tokens, the last two, and the largest timestamp."""

    is_of_model = True

    def __init__(self, services: WorkerServices) -> None:
        self._device = services.device
        self._constants = constants = SpeechConstants.of(services.config.model)
        self._state = StagedTensor(services.device, services.num_slots, 4, torch.int64)
        self._has_rules = np.zeros(services.num_slots, dtype=bool)
        self._has_timestamps = np.zeros(services.num_slots, dtype=bool)
        self._never = services.device.upload(np.array(constants.never, dtype=np.int64))
        self._not_first = services.device.upload(np.array(constants.not_first, dtype=np.int64))

    def add_request(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, SpeechPart)
        self._has_rules[slot] = part is not None
        self._has_timestamps[slot] = part is not None and part.timestamps
        if part is None:
            return
        begin = self._constants.no_timestamps
        if part.timestamps and begin is None:
            raise InvalidParameter("timestamps=True: generation_config.json of this model has no timestamps.")
        output = request.output_token_ids
        stamps = [token for token in output if begin is not None and token > begin]
        before, last = [_NONE, _NONE, *output][-2:]
        self._state.discard(slot)
        self._state.stage(slot, 0, [len(output), before, last, max(stamps, default=_NONE)])

    def remove_request(self, slot: int) -> None:
        self._has_rules[slot] = self._has_timestamps[slot] = False

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return bool(self._has_rules[slots_np].any())

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        self._state.flush()
        which = np.flatnonzero(self._has_rules[rows.slots_np])
        index = self._device.upload(which)
        part_RV = logits.index_select(0, index)
        state_R4 = self._state.tensor.index_select(0, rows.slots.index_select(0, index))
        part_RV.index_fill_(1, self._never, float("-inf"))
        first_R1 = (state_R4[:, 0] == 0).unsqueeze(-1)
        not_first_RX = part_RV.index_select(1, self._not_first)
        part_RV.index_copy_(1, self._not_first, not_first_RX.masked_fill(first_R1, float("-inf")))
        has_timestamps = self._has_timestamps[rows.slots_np[which]]
        if has_timestamps.any():
            stamped_RV = self._with_timestamps(part_RV, state_R4)
            part_RV = torch.where(self._device.upload(has_timestamps).unsqueeze(-1), stamped_RV, part_RV)
        return logits.index_copy_(0, index, part_RV)

    def advance(self, slots: Tensor, slots_np: np.ndarray, outcome: StepOutcome) -> None:
        if not self.is_needed(slots_np):
            return
        state_R4, table = self._state.tensor.index_select(0, slots), self._state.tensor
        token_R, has_token_R = outcome.sampled_token_ids[:, 0], outcome.num_sampled > 0
        begin = self._constants.no_timestamps
        highest_R = state_R4[:, 3]
        if begin is not None:
            highest_R = torch.where(token_R > begin, torch.maximum(token_R, highest_R), highest_R)
        next_R4 = torch.stack((state_R4[:, 0] + 1, state_R4[:, 2], token_R, highest_R), dim=1)
        table.index_copy_(0, slots, torch.where(has_token_R.unsqueeze(-1), next_R4, state_R4))

    def _with_timestamps(self, logits_RV: Tensor, state_R4: Tensor) -> Tensor:
        """The logits of texts with timestamps."""
        begin, end = (self._constants.no_timestamps or 0) + 1, self._constants.end
        count_R1, before_R1, last_R1, highest_R1 = state_R4.split(1, dim=1)
        ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        is_stamp_V = ids_V >= begin
        is_pair_R1 = (last_R1 >= begin) & ((count_R1 < 2) | (before_R1 >= begin))
        is_open_R1 = (last_R1 >= begin) & ~is_pair_R1
        # The end of a segment may be its beginning; the next segment begins at the end of the last one, or later.
        lowest_R1 = torch.where(highest_R1 < 0, begin, highest_R1 + (~is_open_R1).to(torch.int64))
        forbidden_RV = (ids_V == begin - 1) | (is_pair_R1 & is_stamp_V) | (is_open_R1 & (ids_V < end))
        forbidden_RV |= is_stamp_V & (ids_V < lowest_R1)
        is_first_RV = (count_R1 == 0) & ~is_stamp_V
        if self._constants.last_initial is not None:
            is_first_RV |= (count_R1 == 0) & (ids_V > begin + self._constants.last_initial)
        logits_RV = logits_RV.masked_fill(forbidden_RV | is_first_RV, float("-inf"))
        # A timestamp is due where all of them together are likelier than any other token.
        stamps_R1 = logits_RV[:, begin:].logsumexp(dim=-1, keepdim=True)
        is_due_R1 = stamps_R1 > logits_RV[:, :begin].amax(dim=-1, keepdim=True)
        return logits_RV.masked_fill(is_due_R1 & ~is_stamp_V, float("-inf"))
