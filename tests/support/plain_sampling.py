"""Reference sampling in plain Python and numpy, one request at a time, and a driver of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.config import DeviceConfig, SamplingConfig
from penstock.contract import NewRequestData, SamplingParams
from penstock.device import create_device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.random import gumbel_noise, token_bits
from penstock.runner.sampling import Sampler, SamplerOutput
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.step.logits_rows import LogitsRows

DEVICE = create_device(DeviceConfig(device="cpu", num_threads=1))
VOCAB_SIZE = 60
NUM_SLOTS = 20
MAX_LEN = 64


def shaped(params: SamplingParams, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Apply masks, bias and penalties, in float32 as the engine computes them."""
    result = logits.astype(np.float32).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(result)):
            if token not in params.allowed_token_ids:
                result[token] = -np.inf
    for word in params.bad_words_token_ids:
        *prefix, last = word
        if not prefix or list(output[-len(prefix) :]) == prefix:
            result[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *params.all_stop_token_ids}:
            result[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        result[token] += np.float32(bias)
    for token in range(len(result)):
        if token in prompt or token in output:
            factor = np.float32(params.repetition_penalty)
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        count = list(output).count(token)
        result[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        result[token] -= np.float32(params.presence_penalty) * np.float32(count > 0)
    return result


def truncated(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """Probabilities in float64 after temperature, min-p, top-k and top-p."""
    scaled = (logits / np.float32(params.temperature)).astype(np.float64)
    if params.min_p:
        scaled[scaled < scaled.max() + np.log(np.float32(params.min_p))] = -np.inf
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[::-1][params.top_k - 1]] = -np.inf
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass_before = np.cumsum(probs[order]) - probs[order]
        weakest = probs[order][mass_before < params.top_p].min()
        probs[probs < weakest] = 0
        probs /= probs.sum()
    return probs


def next_token(params: SamplingParams, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]) -> int | None:
    """Expected next token; None if no token is allowed."""
    values = shaped(params, logits, prompt, output)
    if not np.isfinite(values.max()):
        return None
    if params.temperature == 0:
        return int(values.argmax())
    assert params.seed is not None
    position = torch.tensor([len(prompt) + len(output) - 1])
    noise = gumbel_noise(token_bits(torch.tensor([params.seed]), position, 0, len(values)))[0].numpy()
    with np.errstate(divide="ignore"):
        return int((np.log(truncated(params, values)) + noise).argmax())


def request_of(params: SamplingParams, prompt: list[int], prefill: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id="r",
        prompt_token_ids=prompt,
        prefill_token_ids=prefill,
        sampling_params=params,
        block_ids=(),
        num_computed_tokens=0,
    )


class HandDriven:
    """Sampler with a token table; acts as the runner: gathers rows and appends sampled tokens."""

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        num_slots: int = NUM_SLOTS,
        transforms: Sequence[LogitsTransform] = (),
        **config: object,
    ) -> None:
        self.token_ids = torch.zeros(num_slots, MAX_LEN, dtype=torch.int32)
        sampling = SamplingConfig(**config)  # type: ignore[arg-type]
        self.sampler = Sampler(DEVICE, num_slots, vocab_size, self.token_ids, sampling, transforms=transforms)
        self.lengths: dict[int, int] = {}

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        tokens = [*prompt, *output]
        self.token_ids[slot, : len(tokens)] = torch.tensor(tokens)
        self.lengths[slot] = len(tokens)
        self.sampler.add(slot, request_of(params, list(prompt), tokens))

    def remove(self, slot: int) -> None:
        del self.lengths[slot]
        self.token_ids[slot] = 0
        self.sampler.remove(slot)

    def rows(self, slots: Sequence[int]) -> LogitsRows:
        positions = torch.tensor([self.lengths[slot] - 1 for slot in slots])
        return LogitsRows(torch.tensor(list(slots)), np.array(slots), positions)

    def step(
        self, slots: Sequence[int], logits: torch.Tensor, num_sampled: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample one token for each of these slots, and append the valid ones."""
        rows = self.rows(slots)
        counts = torch.tensor([1] * len(slots) if num_sampled is None else list(num_sampled))
        result = self.sampler.sample(logits, rows)
        columns = [result.sampled_token_ids, counts, torch.zeros_like(counts), result.failures.to(torch.int64)]
        frame: Any = SimpleNamespace(
            batch=SimpleNamespace(layout=SimpleNamespace(slots=rows.slots, slots_np=rows.slots_np))
        )
        self.sampler.commit(frame, StepOutcome(torch.stack(columns, dim=1)))
        for slot, token, count in zip(slots, result.sampled_token_ids.tolist(), counts.tolist(), strict=True):
            if count:
                self.token_ids[slot, self.lengths[slot]] = token
                self.lengths[slot] += 1
        return result


def random_logits(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2
