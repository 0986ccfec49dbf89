"""The sampling that takes most memory, for profile runs and warm-up."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.attention import NO_INPUTS
from penstock.contract import NewRequestData, SamplingParams
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.runner.sampling.prompt_logprobs import PromptLogprobs
from penstock.runner.sampling.sampler import Sampler
from penstock.step.logits_rows import LogitsRows, PromptRows

_PROFILED = "profile"


def heaviest_params(most_logprobs: int) -> SamplingParams:
    """Parameters that take most memory. most_logprobs: log-probabilities that a request may ask for."""
    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        seed=0,
        logprobs=most_logprobs,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
    )


def profile_sampling(device: Device, sampler: Sampler, num_reqs: int, num_rows: int) -> None:
    """Run all logits transforms at once over `num_rows` rows of `num_reqs` requests, with log-probabilities."""
    params = heaviest_params(sampler.most_logprobs)
    # On the CPU penalties allocate nothing beside their table (`kernels.logits_shaping`); more of them only take time.
    without_penalties = msgspec.structs.replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    for slot in range(num_reqs):
        is_penalised = slot == 0 or device.kind != "cpu"
        sampler.add(slot, _request(params if is_penalised else without_penalties))
    slots_np = np.arange(num_rows) % num_reqs
    slots = device.upload(slots_np)
    logits = torch.zeros(num_rows, sampler.vocab_size, device=device.torch_device)
    sampler.sample(logits, LogitsRows(slots, slots_np, positions=slots))


def profile_prompt_logprobs(
    prompt_logprobs: PromptLogprobs, model: LanguageModel, hidden_TD: Tensor, most_logprobs: int
) -> None:
    """Compute prompt log-probabilities of one prompt with these hidden states."""
    num_tokens = len(hidden_TD)
    rows = PromptRows(
        req_ids=[_PROFILED],
        counts=[num_tokens],
        hidden_indices=np.arange(num_tokens),
        target_indices=np.zeros(num_tokens, dtype=np.int64),
        num_logprobs=most_logprobs,
    )
    prompt_logprobs.compute(rows, model, hidden_TD, NO_INPUTS)


def _request(params: SamplingParams) -> NewRequestData:
    return NewRequestData(
        req_id=_PROFILED,
        prompt_token_ids=[],
        prefill_token_ids=[],
        sampling_params=params,
        block_ids=(),
        num_computed_tokens=0,
    )
