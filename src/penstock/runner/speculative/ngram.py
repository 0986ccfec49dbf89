"""Prompt lookup: draft tokens from an earlier occurrence of the request's last n-gram."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT, look_up, look_up_reference
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.speculative.speculator import HostSpeculator, Speculator, SpeculatorServices, on_host
from penstock.step.frame import Frame


class NgramOnHost(HostSpeculator):
    """Finds each request's last n-gram earlier in its tokens, and drafts the tokens that followed it there."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, slot: int, token_ids_L: np.ndarray, num_drafts: int) -> np.ndarray | None:
        return look_up(token_ids_L, *self._lengths, num_drafts)


class NgramOnDevice(Speculator):
    """Prompt lookup on the device, where the host cannot read the tokens: compares all positions at once."""

    def __init__(self, config: SpeculativeConfig, device: Device) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._device = device
        self._requests: RequestStates
        self._sampler: Sampler
        self._proposed: tuple[list[str], Tensor] | None = None

    def bind(self, services: SpeculatorServices) -> None:
        self._requests, self._sampler, self._proposed = services.requests, services.sampler, None

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        self._proposed = None
        if not frame.num_drafts:
            return
        requests, layout = self._requests, frame.batch.layout
        slots = layout.slots
        num_tokens_R = requests.total_len.tensor.view(-1).index_select(0, slots)
        token_ids_RL = requests.all_token_ids.tensor.index_select(0, slots)
        drafts_RD = look_up_reference(token_ids_RL, num_tokens_R, *self._lengths, frame.num_drafts)
        requests.draft_token_ids.tensor.index_fill_(0, slots, NO_DRAFT)
        requests.draft_token_ids.tensor[:, : frame.num_drafts].index_copy_(0, slots, drafts_RD)
        takes_drafts = np.array([self._sampler.takes_drafts(slot) for slot in layout.slots_np.tolist()])
        is_wanted_R = (outcome.num_sampled > 0) & self._device.upload(takes_drafts)
        self._proposed = layout.req_ids, torch.where(is_wanted_R.unsqueeze(-1), drafts_RD, NO_DRAFT)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return None if proposed is None else on_host(*proposed)
