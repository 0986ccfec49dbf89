"""Redaction of recorded messages: lengths and numbers stay, tokens and texts of users go."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.contract import ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from penstock.contract.runner_output import SampledOutput

# Sampling parameters without a user's tokens or texts.
_KEPT = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "seed")


def redacted_step(step: SchedulerOutput) -> SchedulerOutput:
    """Return the step without token ids and parts."""
    drafts = {req_id: [-1] * len(ids) for req_id, ids in step.scheduled_spec_decode_tokens.items()}
    requests = [redacted_request(request) for request in step.scheduled_new_reqs]
    return replace(step, scheduled_new_reqs=requests, scheduled_spec_decode_tokens=drafts, parts=None)


def redacted_request(request: NewRequestData) -> NewRequestData:
    """Return the request with zeros for its tokens, and numeric sampling parameters alone."""
    given = request.sampling_params
    return replace(
        request,
        prompt_token_ids=[0] * len(request.prompt_token_ids),
        prefill_token_ids=[0] * len(request.prefill_token_ids),
        sampling_params=SamplingParams(**{name: getattr(given, name) for name in _KEPT}),
        parts=None,
    )


def redacted_result(result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return the numbers of tokens per request, and errors."""
    if isinstance(result, SampledOutput):
        tokens = [[0] * len(ids) for ids in result.sampled_token_ids]
        return replace(result, sampled_token_ids=tokens, logprobs=None, prompt_logprobs={}, parts=None)
    return replace(result, pooled=[None] * len(result.pooled), parts=None)
