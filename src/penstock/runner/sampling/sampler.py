"""The order in which logits become tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.sampling import LogprobsTensors, greedy_tokens
from penstock.runner.sampling.draw import Draw
from penstock.runner.sampling.logprobs import Logprobs
from penstock.runner.sampling.min_p import MinP
from penstock.runner.sampling.stage import LogitsRows, SamplingStage
from penstock.runner.sampling.temperature import Temperature
from penstock.runner.sampling.top_k_top_p import TopKTopP


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """sampled_token_ids: int64 [rows], on the device."""

    sampled_token_ids: Tensor
    logprobs: LogprobsTensors | None


class Sampler:
    """Stages in the field's order: temperature, min-p, top-k and top-p, the draw; log-probabilities of raw logits."""

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self.stages: list[SamplingStage] = [
            Temperature(device, num_slots),
            MinP(device, num_slots),
            TopKTopP(device, num_slots, vocab_size),
        ]
        self._draw = Draw(device, num_slots)
        self._logprobs = Logprobs(num_slots, vocab_size)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        for stage in self.stages:
            stage.add_request(slot, params)
        self._draw.add_request(slot, params)
        self._logprobs.add_request(slot, params)

    def sample(self, logits: Tensor, rows: LogitsRows) -> SamplerOutput:
        """Choose one token per row from float32 logits [rows, vocabulary], which stay as they are."""
        if self._draw.is_all_greedy(rows):
            sampled = greedy_tokens(logits)
        else:
            sampled = self._draw.sample(logits, self._process(logits, rows), rows)
        return SamplerOutput(sampled, self._logprobs.compute(logits, sampled, rows))

    def _process(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        needed = [stage for stage in self.stages if stage.is_needed(rows)]
        processed = logits.clone() if needed else logits
        for stage in needed:
            processed = stage.apply(processed, rows)
        return processed
