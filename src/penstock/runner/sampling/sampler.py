"""Sampler: applies the logits transforms in order and draws tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.config import SamplingConfig
from penstock.config.sampling import rows_at_once
from penstock.contract import NewRequestData, Parts, SchedulerOutput
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.sampling import LogprobsTensors
from penstock.runner.sampling.custom_processors import CustomProcessors
from penstock.runner.sampling.draw import Draw
from penstock.runner.sampling.failures import Failure, find_failures
from penstock.runner.sampling.load_processors import load_logits_processors
from penstock.runner.sampling.logits_processor import LogitsProcessor, ProcessorContext
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.logprobs import Logprobs
from penstock.runner.sampling.min_tokens import MinTokens
from penstock.runner.sampling.penalties import Penalties
from penstock.runner.sampling.token_lists import AllowedTokens, BadWords, LogitBias
from penstock.runner.sampling.truncation import MinP, Temperature, TopKTopP
from penstock.runner.sampling.verification import EXACT, Verification
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.step.logits_rows import DraftRows, LogitsRows


class SamplerOutput(msgspec.Struct, frozen=True):
    """sampled_token_ids: int64 [rows], on the device; undefined where the row failed.

    failures: [rows], on the device: a `Failure` per row, as an integer or a bool.
    errors: errors of custom logits processors, by batch index.
    """

    sampled_token_ids: Tensor
    failures: Tensor
    logprobs: LogprobsTensors | None
    errors: dict[int, str]


class Sampler(SlotOwner):
    """Order of transforms: rules of the model, masks and bias, penalties, custom logits processors, those of features,
    then temperature, min-p, top-k and top-p, the draw. No transform after those of features, such as the bitmask of
    structured output, can allow a token that they forbid.

    The first group, `shaping`, applies to greedy requests too; the second skips their rows. A batch of more than
    `max_rows` is sampled in parts, because transforms hold several copies of their rows' logits.
    token_ids_SL: the runner's token table, int32 [slots, positions].
    processors: custom logits processors; None for the installed ones and those that `config` names.
    verification: acceptance rule of drafts. transforms: of features. most_logprobs: log-probabilities that a request
    may ask for.
    Raises ConfigError for a custom logits processor that cannot be loaded or made.
    """

    def __init__(
        self,
        device: Device,
        num_slots: int,
        vocab_size: int,
        token_ids_SL: Tensor,
        config: SamplingConfig,
        processors: Sequence[type[LogitsProcessor]] | None = None,
        verification: Verification = EXACT,
        transforms: Sequence[LogitsTransform] = (),
    ) -> None:
        context = ProcessorContext(device, num_slots, vocab_size, token_ids_SL)
        self._device = device
        self.vocab_size = vocab_size
        self.most_logprobs = config.most_logprobs(vocab_size)
        self.max_rows = rows_at_once(vocab_size, device.kind)
        classes = load_logits_processors(config.logits_processors) if processors is None else processors
        self._custom = CustomProcessors(context, classes)
        self.shaping: list[LogitsTransform] = [
            AllowedTokens(device, num_slots, vocab_size),
            BadWords(device, num_slots, vocab_size, token_ids_SL),
            MinTokens(device, num_slots, vocab_size),
            LogitBias(device, num_slots, vocab_size),
            Penalties(device, num_slots, vocab_size, token_ids_SL),
            self._custom,
            *transforms,
        ]
        self.truncating: list[LogitsTransform] = [
            Temperature(device, num_slots),
            MinP(device, num_slots),
            TopKTopP(device, num_slots, vocab_size),
        ]
        self.processor_names = self._custom.names
        # Slots of requests with shaping; empty in most steps.
        self._shaped_slots: set[int] = set()
        # Slots of requests that want more than the argmax.
        self._demanding_slots: set[int] = set()
        self._draw = Draw(device, num_slots)
        self._verification = verification
        self._logprobs = Logprobs(num_slots, vocab_size, config.logprobs_mode)

    def add(self, slot: int, request: NewRequestData) -> None:
        """Add a request, or a preempted one with its output.

        Raises InvalidParameter, and any exception of a custom logits processor.
        """
        params = request.sampling_params
        for transform in (*self.shaping, *self.truncating):
            transform.add_request(slot, request)
        self._draw.add_request(slot, params)
        self._logprobs.add_request(slot, params)
        slots_np = np.array([slot])
        self._shaped_slots.discard(slot)
        if any(transform.is_needed(slots_np) for transform in self.shaping):
            self._shaped_slots.add(slot)
        self._demanding_slots.discard(slot)
        if slot in self._shaped_slots or not params.is_greedy or params.logprobs is not None:
            self._demanding_slots.add(slot)

    def remove(self, slot: int) -> None:
        self._shaped_slots.discard(slot)
        self._demanding_slots.discard(slot)
        self._draw.remove_request(slot)
        self._logprobs.remove_request(slot)
        for transform in (*self.shaping, *self.truncating):
            transform.remove_request(slot)

    def is_plain_greedy(self, rows: LogitsRows) -> bool:
        """Whether these requests want the argmax of each row and nothing else."""
        if rows.drafts is not None and self._verification.judges_greedy:
            return False
        if not self._demanding_slots:
            return True
        return not self._shaped_slots and self._draw.is_all_greedy(rows) and self._logprobs.most(rows) is None

    def is_all_greedy(self, rows: LogitsRows) -> bool:
        """Whether all of these requests are greedy."""
        return self._draw.is_all_greedy(rows)

    def guess(self, logits: Tensor, rows: LogitsRows, probs: Tensor | None = None) -> Tensor:
        """Draw draft tokens, int64 [rows], from a drafter's logits [rows, vocabulary].

        The random numbers are those of the rows' own tokens. Temperature and truncation apply, `shaping` does not: the
        closer the draft's distribution is to the target's, the higher the acceptance. The logits may be overwritten.
        probs: [rows, vocabulary], is filled with the distributions.
        """
        parts = [slice(start, start + self.max_rows) for start in range(0, logits.shape[0], self.max_rows)]
        tokens = [self._guess(logits[part], rows.part(part), None if probs is None else probs[part]) for part in parts]
        return torch.cat(tokens)

    def _guess(self, logits: Tensor, rows: LogitsRows, probs: Tensor | None) -> Tensor:
        for transform in self.truncating:
            if transform.is_needed(rows.slots_np):
                logits = transform.apply(logits, rows)
        if probs is not None:
            torch.softmax(logits, dim=-1, out=probs)
        return self._draw.sample(logits, rows).token_ids_R

    def sample(self, logits: Tensor, rows: LogitsRows) -> SamplerOutput:
        """Choose one token per row from float32 logits [rows, vocabulary], which may be overwritten."""
        num_rows, num_logprobs = logits.shape[0], self._logprobs.most(rows)
        if num_rows <= self.max_rows:
            output = self._sample(logits, rows, num_logprobs)
        else:
            parts = [slice(start, start + self.max_rows) for start in range(0, num_rows, self.max_rows)]
            output = _join([self._sample(logits[part], rows.part(part), num_logprobs) for part in parts], self.max_rows)
        return self._by_request(output, rows.drafts) if output.errors and rows.drafts is not None else output

    def _by_request(self, output: SamplerOutput, drafts: DraftRows) -> SamplerOutput:
        """Map errors of rows to requests. A failing row after a draft gets no token: it may be rejected."""
        after_drafts = [row for row in output.errors if drafts.numbers_np[row] > 0]
        failures = output.failures.to(torch.int64)
        if after_drafts:
            failures.index_fill_(0, self._device.upload(np.array(after_drafts)), int(Failure.NOTHING_LEFT))
        errors = {
            int(drafts.batch_indices_np[row]): error
            for row, error in output.errors.items()
            if drafts.numbers_np[row] == 0
        }
        return SamplerOutput(output.sampled_token_ids, failures, output.logprobs, errors)

    def _sample(self, logits: Tensor, rows: LogitsRows, num_logprobs: int | None) -> SamplerOutput:
        shaping = self._needed(self.shaping, rows) if self._shaped_slots else []
        for transform in [one for one in shaping if one.is_of_model]:
            logits = transform.apply(logits, rows)
            shaping.remove(transform)
        transforms = shaping if self._draw.is_all_greedy(rows) else shaping + self._needed(self.truncating, rows)
        reads_raw = bool(shaping) or (num_logprobs is not None and self._logprobs.is_raw)
        processed = logits.clone() if transforms and reads_raw else logits
        for transform in transforms:
            processed = transform.apply(processed, rows)
        drawn = self._draw.sample(processed, rows)
        if rows.drafts is not None:
            greedy = self._draw.is_greedy(rows)
            drawn = self._verification.choose(drawn, processed, rows, self._draw.seeds, greedy)
        sampled, has_failed = drawn
        return SamplerOutput(
            sampled_token_ids=sampled,
            failures=find_failures(has_failed, logits if shaping else None, self._custom.take_spoilt_by()),
            logprobs=self._logprobs.compute(logits, processed, sampled, num_logprobs),
            errors=self._custom.take_errors(),
        )

    def takes_drafts(self, slot: int) -> bool:
        """Whether rows after the request's drafts can be sampled; if not, all its drafts are rejected."""
        if slot not in self._shaped_slots:
            return True
        return all(transform.takes_drafts(slot, self._verification) for transform in self.shaping)

    def begin_step(self, parts: Parts | None, slot_of: Mapping[str, int]) -> None:
        """As `LogitsTransform`, of all transforms, before the step's `sample`."""
        if self._shaped_slots:
            for transform in self.shaping:
                transform.begin_step(parts, slot_of)

    def dummy_request(self, request: NewRequestData) -> NewRequestData:
        """As `LogitsTransform`, of all transforms."""
        for transform in self.shaping:
            request = transform.dummy_request(request)
        return request

    def dummy_parts(self, message: SchedulerOutput) -> Parts:
        """Parts for the sampling of a step of dummy requests."""
        return Parts.of(part for one in self.shaping if (part := one.dummy_part(message)) is not None)

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        if self._shaped_slots:
            layout = frame.batch.layout
            for transform in self.shaping:
                transform.advance(layout.slots, layout.slots_np, outcome)

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """Do nothing: only the last stage samples."""

    @staticmethod
    def _needed(transforms: list[LogitsTransform], rows: LogitsRows) -> list[LogitsTransform]:
        return [transform for transform in transforms if transform.is_needed(rows.slots_np)]


def _join(parts: list[SamplerOutput], rows_per_part: int) -> SamplerOutput:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return SamplerOutput(
        sampled_token_ids=torch.cat([part.sampled_token_ids for part in parts]),
        failures=torch.cat([part.failures for part in parts]),
        logprobs=LogprobsTensors(*map(torch.cat, zip(*logprobs, strict=True))) if logprobs else None,
        errors={
            index * rows_per_part + row: error for index, part in enumerate(parts) for row, error in part.errors.items()
        },
    )
