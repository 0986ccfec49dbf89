"""Warm-up of devices that compile kernels at their first use: dummy requests with every kind of sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import numpy as np
from msgspec.structs import replace

from penstock.contract import CachedRequestData, NewRequestData, SamplingInput, SamplingParams, SchedulerOutput
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sampling.heaviest import heaviest_params

_PROMPT = (0, 0)
# Numbers of requests beside the largest. Kernels are compiled anew for 1, for multiples of 16, and for other numbers.
_FEW = (16, 3, 1)
_TIMEOUT_S = 300.0


def warm_up_requests(runner: ModelRunner) -> None:
    """Run dummy requests through prefills, steps that verify drafts, and decodes, in the runner's own steps.

    As many at once as a step has room for, and a few. Nothing stays of them: the runner must be idle, and begins anew.
    Does nothing where the context length or the KV cache has no room for such a request.
    """
    limits = runner.limits
    tokens_per_step = max(len(_PROMPT), 1 + limits.max_drafts)
    most = min(limits.max_num_reqs, limits.max_num_tokens // tokens_per_step)
    length = len(_PROMPT) + 3 * (1 + limits.max_drafts)
    block_ids = _block_ids(runner, length)
    config = runner.kv_cache.config
    has_room = all(max(ids) < config.num_blocks_of(group) for group, ids in enumerate(block_ids))
    if not most or length > limits.max_model_len or not has_room:
        return
    step_ids = count()
    for num_reqs in dict.fromkeys([most, *(few for few in _FEW if few < most)]):
        for request in _kinds_of_requests(runner, block_ids):
            requests = [replace(request, req_id=f"warm-up {number}") for number in range(num_reqs)]
            for output in _steps(requests, limits.max_drafts, step_ids):
                runner.execute_model(output)
                runner.sample_tokens(_sampling(runner, output)).get_output(_TIMEOUT_S)
    for group, ids in enumerate(block_ids):
        runner.kv_cache.clear_blocks(group, runner.device.upload(np.array(ids)))
    runner.begin_anew()


def _block_ids(runner: ModelRunner, length: int) -> tuple[list[int], ...]:
    """Blocks for so many tokens in each KV-cache group; all requests write to the same ones."""
    block_ids: list[list[int]] = []
    num_taken: Counter[int] = Counter()
    for group in runner.kv_cache.config.groups:
        ids = group.spec.blocks_of_one_request(length)[: group.spec.table_width(runner.limits.max_model_len)]
        block_ids.append([num_taken[group.pool] + one if one else 0 for one in ids])
        num_taken[group.pool] += max(ids)
    return tuple(block_ids)


def _kinds_of_requests(runner: ModelRunner, block_ids: tuple[list[int], ...]) -> list[NewRequestData]:
    """Greedy, drawn, drawn from the most likely tokens, and all logits transforms at once with log-probabilities."""
    params = heaviest_params(runner.sampler.most_logprobs)
    all_at_once = replace(
        params,
        # The whole vocabulary would take the host seconds.
        logprobs=min(params.logprobs or 0, 20),
        allowed_token_ids=[0, 1],
        bad_words_token_ids=[[0, 0, 0, 0, 0]],
        all_stop_token_ids=[1],
        min_tokens=1,
    )
    kinds = [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=0.7, seed=0),
        SamplingParams(temperature=0.7, seed=0, top_k=50, top_p=0.9),
        all_at_once,
    ]
    prompt = list(_PROMPT)
    *requests, with_all = [
        NewRequestData(
            req_id="",
            prompt_token_ids=prompt,
            prefill_token_ids=prompt,
            sampling_params=params,
            block_ids=block_ids,
            num_computed_tokens=0,
        )
        for params in kinds
    ]
    return [*requests, runner.sampler.dummy_request(with_all)]


def _steps(requests: list[NewRequestData], num_drafts: int, step_ids: Iterator[int]) -> Iterator[SchedulerOutput]:
    """Steps of requests that come and end together, as the scheduler sends them."""
    num_reqs, req_ids = len(requests), [request.req_id for request in requests]
    yield SchedulerOutput(
        step_id=next(step_ids),
        scheduled_new_reqs=requests,
        num_scheduled_tokens=dict.fromkeys(req_ids, len(_PROMPT)),
        total_num_scheduled_tokens=len(_PROMPT) * num_reqs,
        num_drafts_wanted=num_drafts,
        awaiting_req_ids=req_ids,
    )
    num_computed = len(_PROMPT)
    for drafts in sorted({num_drafts, 0}, reverse=True):
        yield SchedulerOutput(
            step_id=next(step_ids),
            scheduled_cached_reqs=CachedRequestData(req_ids=req_ids, num_computed_tokens=[num_computed] * num_reqs),
            num_scheduled_tokens=dict.fromkeys(req_ids, 1 + drafts),
            total_num_scheduled_tokens=(1 + drafts) * num_reqs,
            scheduled_spec_decode_tokens=dict.fromkeys(req_ids, [-1] * drafts) if drafts else {},
            awaiting_req_ids=req_ids,
        )
        num_computed += 1 + drafts
    yield SchedulerOutput(step_id=next(step_ids), finished_req_ids=set(req_ids))


def _sampling(runner: ModelRunner, output: SchedulerOutput) -> SamplingInput:
    """Ask for the sampling, with parts for requests that await some."""
    parts = runner.sampler.dummy_parts(output) if output.awaiting_req_ids else None
    return SamplingInput(step_id=output.step_id, parts=parts or None)
