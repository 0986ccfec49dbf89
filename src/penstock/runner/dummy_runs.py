"""Runs that serve no request: warm-up, an idle rank's step, and the profile of a runner made for that purpose."""

from __future__ import annotations

import numpy as np
import torch

from penstock.contract import GrammarOutput, NewRequestData, SamplingParams, SchedulerOutput
from penstock.kernels.sampling import top_logprobs
from penstock.runner.batch_plan import BatchPlan
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sampling.stage import LogitsRows

_PROFILED = "profile"
_PROFILE_TIMEOUT_S = 300.0


def run_dummy_batch(runner: ModelRunner, num_tokens: int, num_reqs: int) -> None:
    """A forward pass over padding alone: no block is written, no slot and no random stream is touched.

    An idle rank takes part in the others' collectives with it, and warm-up makes kernels ready.
    """
    plan = BatchPlan(num_tokens=0, num_reqs=0, num_tokens_padded=num_tokens, num_reqs_padded=num_reqs)
    batch = runner.batcher.build({}, plan)
    hidden = runner.model(batch.input_ids, batch.positions, runner.kv_cache.prepare(batch))
    runner.model.compute_logits(hidden[:num_reqs])


def profile_forward(runner: ModelRunner, num_tokens: int) -> None:
    """One prompt of `num_tokens` through a runner made for it, whose KV cache has `num_profile_blocks` blocks.

    With all of its hidden states, which take the most memory.
    """
    runner.computes_all_hidden = True
    output = _invented_prompt(runner, num_tokens)
    runner.execute_model(output)
    runner.sample_tokens(GrammarOutput(step_id=output.step_id)).get_output(_PROFILE_TIMEOUT_S)
    runner.requests.remove(_PROFILED)


def profile_sampling(runner: ModelRunner, num_rows: int) -> None:
    """Every stage of sampling at once, over as many rows, with log-probabilities."""
    device = runner.device
    params = _heaviest_params(runner)
    for slot in range(num_rows):
        runner.sampler.add_request(slot, params)
    slots_np = np.arange(num_rows)
    slots = device.upload(slots_np)
    logits = torch.zeros(num_rows, runner.limits.vocab_size, device=device.torch_device)
    runner.sampler.sample(logits, LogitsRows(slots, slots_np, positions=slots))


def profile_prompt_logprobs(runner: ModelRunner, num_rows: int) -> None:
    """The reduction of as many rows of logits to the log-probabilities of a prompt's tokens."""
    device, vocab_size = runner.device, runner.limits.vocab_size
    logits = torch.zeros(num_rows, vocab_size, device=device.torch_device)
    targets = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
    top_logprobs(logits, targets, runner.sampling.most_logprobs(vocab_size))


def num_profile_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks, the null block included, that `profile_forward` needs."""
    return 1 + -(-num_tokens // block_size)


def _invented_prompt(runner: ModelRunner, num_tokens: int) -> SchedulerOutput:
    block_ids = tuple(
        list(range(1, num_profile_blocks(num_tokens, block_size))) for block_size in runner.block_tables.block_sizes
    )
    request = NewRequestData(
        req_id=_PROFILED,
        prompt_token_ids=[0] * num_tokens,
        prefill_token_ids=[0] * num_tokens,
        sampling_params=SamplingParams(temperature=0.0, seed=0),
        block_ids=block_ids,
        num_computed_tokens=0,
    )
    return SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[request],
        num_scheduled_tokens={_PROFILED: num_tokens},
        total_num_scheduled_tokens=num_tokens,
    )


def _heaviest_params(runner: ModelRunner) -> SamplingParams:
    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        seed=0,
        logprobs=runner.sampling.most_logprobs(runner.limits.vocab_size),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
    )
