"""Generation: sampling and prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from penstock.contract import SampledOutput
from penstock.models.interface import LanguageModel
from penstock.runner.async_output import AsyncOutput, ReadyOutput
from penstock.runner.execute.execution import PROMPT_LOGITS
from penstock.runner.output_heads.base import HeadServices, OutputHead
from penstock.runner.output_heads.earlier_stage import sampling_requests
from penstock.runner.sampling.heaviest import profile_prompt_logprobs, profile_sampling
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.step.frame import Frame, RowOutput, WantedOutputs


class Generation(OutputHead):
    """Samples tokens from the logits rows."""

    memory_name, memory_why = "sampling", "logits and sampling"

    def __init__(self, services: HeadServices) -> None:
        self._device = services.device
        self._requests = services.requests
        self._owners = services.owners
        self._sampler = services.sampler
        self._prompt_logprobs = services.prompt_logprobs
        self._speculator = services.speculator
        self._stage = services.stage
        self._execution = services.execution
        self._rank = services.rank

    def wants(self, frame: Frame) -> WantedOutputs:
        batch, speculator = frame.batch, self._speculator
        prompt_rows = self._prompt_logprobs.rows(batch.layout, self._requests)
        is_greedy = self._sampler.is_plain_greedy(batch.logits_rows)
        return WantedOutputs(
            RowOutput.GREEDY if is_greedy else RowOutput.LOGITS,
            all_rows=prompt_rows is not None or speculator.needs_hidden,
            aux_layers=self._stage.aux_here(speculator.aux_layers),
            prompt_rows=prompt_rows,
        )

    def finish(self, frame: Frame) -> AsyncOutput | ReadyOutput:
        errors, step_id = frame.errors, frame.output.step_id
        if not frame.has_tokens:
            return ReadyOutput(SampledOutput(step_id=step_id, errors=errors))
        layout, step = frame.batch.layout, frame.batch.step
        req_ids = layout.req_ids
        prompt_logprobs = None
        if frame.wants.prompt_rows is not None:
            arguments = frame.wants.prompt_rows, frame.model, frame.all_hidden, frame.inputs.named
            prompt_logprobs = self._execution.compute(partial(self._prompt_logprobs.compute, *arguments), PROMPT_LOGITS)
        sampled = self._sample(frame)
        outcome, on_host = step.outcome(sampled.sampled_token_ids, sampled.failures)
        tells = self._stage.has_others and bool(sampling_requests(layout, self._requests))
        if tells:
            self._stage.send_outcome(step_id, outcome)
        if sampled.errors:
            errors = _by_request(sampled.errors, req_ids) | errors
        result: AsyncOutput | ReadyOutput
        if on_host is not None and on_host[1] is None and sampled.logprobs is None and prompt_logprobs is None:
            tokens = SampledOutput(step_id=step_id, req_ids=req_ids, sampled_token_ids=on_host[0], errors=errors)
            result = ReadyOutput(tokens)
        else:
            result = AsyncOutput(
                self._device,
                step_id=step_id,
                req_ids=req_ids,
                outcome=outcome,
                on_host=on_host,
                first_rows=layout.first_rows,
                logprobs=sampled.logprobs,
                prompt_logprobs=prompt_logprobs,
                errors=errors,
                processor_names=self._sampler.processor_names,
                rank=self._rank,
            )
        self._owners.commit(frame, outcome)
        if tells and frame.num_drafts and self._speculator.drafts_for_all_stages:
            self._stage.share_drafts(step_id, self._requests.draft_token_ids.tensor, layout.slots)
        if frame.logits is not None or frame.wants.all_rows:
            frame.drop_outputs()
        return result

    def profile(self, num_reqs: int, num_rows: int) -> None:
        profile_sampling(self._device, self._sampler, num_reqs, num_rows)

    def profile_prompt(self, model: LanguageModel, hidden_TD: Tensor) -> None:
        profile_prompt_logprobs(self._prompt_logprobs, model, hidden_TD, self._sampler.most_logprobs)

    def _sample(self, frame: Frame) -> SamplerOutput:
        if frame.chosen is not None:
            return SamplerOutput(*frame.chosen, None, {})
        assert frame.logits is not None, "a frame has either chosen tokens or logits"
        assert frame.sampling is not None, "it asks for the sampling"
        self._sampler.begin_step(frame.sampling.parts, self._requests.slot_of)
        return self._sampler.sample(frame.logits, frame.batch.logits_rows)


def _by_request(errors: Mapping[int, str], req_ids: Sequence[str]) -> dict[str, str]:
    return {req_ids[row]: error for row, error in errors.items()}
