"""Runs that serve no request: warm-up, an idle rank's step, and the profile of a runner made for that purpose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.attention import AuxHiddenStates, ForwardContext, SequenceGeometry, StepGeometry
from penstock.contract import NewRequestData, SamplingParams
from penstock.parallel import ParallelState
from penstock.runner.frame import Frame
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sampling.prompt_logprobs import PromptRows

_PROFILED = "profile"
# How long steps are measured, in seconds, and how often each size at most, after the first time.
_MEASURED_S, _NUM_MEASURED_AGAIN = 0.5, 9


def run_dummy_batch(runner: ModelRunner, num_tokens: int, num_reqs: int) -> Frame:
    """A forward pass over padding alone: no block is written, no slot and no random stream is touched.

    An idle rank takes part in the others' collectives with it, and warm-up makes kernels ready.
    """
    # What a stage has not taken in yet of its last step is read from the buffers that this fills.
    runner.head.catch_up()
    frame = runner.frames.dummy(num_tokens, num_reqs)
    frame.run()
    assert frame.all_hidden is not None, "it wants all rows"
    runner.model.compute_logits(frame.all_hidden[:num_reqs])
    return frame


def run_dummy_step(runner: ModelRunner) -> None:
    """All of a step, for no request: a forward pass, and what owners of per-slot state run after it."""
    runner.owners.dummy(run_dummy_batch(runner, num_tokens=1, num_reqs=1))


def measure_step_costs(runner: ModelRunner, most_tokens: int, parallel: ParallelState) -> list[tuple[int, float]]:
    """The shortest time, in seconds, of dummy steps of 1, 2, 4, … tokens, all of which have logits.

    The same for all ranks, which call it together: of each stage its slowest rank's, and of all stages the sum.
    """
    shortest: dict[int, float] = {}
    start = time.perf_counter()

    def is_before(seconds: float) -> bool:
        # Ranks of a stage must run the same steps, and their clocks differ.
        return all(parallel.tensor.gather_values(time.perf_counter() - start < seconds))

    num_tokens = 1
    # Once with all sizes that half of the time has room for, and then again and again.
    while num_tokens <= most_tokens and (len(shortest) < 2 or is_before(_MEASURED_S / 2)):
        shortest[num_tokens] = _time_dummy_batch(runner, num_tokens)
        num_tokens *= 2
    for _ in range(_NUM_MEASURED_AGAIN):
        for size in shortest:
            if is_before(_MEASURED_S):
                shortest[size] = min(shortest[size], _time_dummy_batch(runner, size))
    of_ranks = parallel.tensor.gather_values(list(shortest.values()))
    of_stages = parallel.pipeline.gather_values([max(times) for times in zip(*of_ranks, strict=True)])
    # A slow stage has tried fewer sizes than others.
    return [(2**number, sum(times)) for number, times in enumerate(zip(*of_stages, strict=False))]


def _time_dummy_batch(runner: ModelRunner, num_tokens: int) -> float:
    begin = time.perf_counter()
    run_dummy_batch(runner, num_tokens, min(num_tokens, runner.limits.max_num_reqs))
    runner.device.synchronize()
    return time.perf_counter() - begin


def run_prompt(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """The forward pass alone of one prompt, in a runner that serves no request: its hidden states, [T, hidden size].

    Nothing of the runner's state is touched but the KV cache, which needs `num_profile_blocks` blocks. Weights need no
    values, and neither does the prompt: no device may have any.
    """
    context, positions = _context_of_prompt(runner, len(token_ids))
    if runner.speculator.aux_layers:
        context = replace(context, aux=AuxHiddenStates(runner.speculator.aux_layers))
    inputs = runner.model_state.dummy_inputs(runner.device.upload(np.array(token_ids, dtype=np.int32)), positions)
    return runner.executable.forward(runner.model, inputs, context)


def run_longest_prompt(runner: ModelRunner, num_tokens: int) -> Tensor:
    """The forward pass of a prompt of so many tokens, to see what it takes."""
    return run_prompt(runner, [0] * num_tokens)


def run_longest_prompt_of_drafter(runner: ModelRunner, num_tokens: int) -> None:
    """The drafter's forward pass after such a prompt."""
    num_tokens += runner.speculator.most_extra_tokens(runner.limits.max_num_reqs)
    runner.speculator.run_prompt(*_context_of_prompt(runner, num_tokens))


def _context_of_prompt(runner: ModelRunner, num_tokens: int) -> tuple[ForwardContext, Tensor]:
    """The context of a step that has one prompt, and its positions."""
    upload = runner.device.upload
    # What the host can read where it computes is read there, by some backends.
    place = torch.from_numpy if runner.device.kind == "cpu" else upload
    query_start_loc_np = np.array([0, num_tokens], dtype=np.int32)
    seq_lens = place(np.array([num_tokens], dtype=np.int32))
    sequences = place(query_start_loc_np), query_start_loc_np, seq_lens, num_tokens, 1, num_tokens
    geometry = [
        StepGeometry(
            *sequences,
            block_table=place(np.arange(1, num_profile_blocks(num_tokens, block_size), dtype=np.int32)[np.newaxis]),
            slot_mapping=place(np.arange(block_size, block_size + num_tokens)),
            max_seq_len_upper_bound=num_tokens,
            block_size=block_size,
        )
        for block_size in runner.block_tables.block_sizes
    ]
    # A step may have more tokens than a request.
    positions = upload(np.arange(num_tokens) % runner.limits.max_model_len)
    return runner.kv_cache.context(SequenceGeometry(*sequences), geometry), positions


def profile_sampling(runner: ModelRunner, num_reqs: int) -> None:
    """Every stage of sampling at once, over the rows of as many requests, all of them with drafts where there are any.

    With log-probabilities.
    """
    limits = runner.limits
    num_rows = max(num_reqs, min(num_reqs * (1 + limits.max_drafts), limits.max_num_tokens))
    device = runner.device
    params = _heaviest_params(runner)
    # On the CPU penalties take no memory beside their table (`kernels.logits_shaping`), and more of them only time.
    without_penalties = msgspec.structs.replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    for slot in range(num_reqs):
        is_penalised = slot == 0 or device.kind != "cpu"
        runner.sampler.add(slot, _request(params if is_penalised else without_penalties))
    slots_np = np.arange(num_rows) % num_reqs
    slots = device.upload(slots_np)
    logits = torch.zeros(num_rows, limits.vocab_size, device=device.torch_device)
    runner.sampler.sample(logits, LogitsRows(slots, slots_np, positions=slots))


def profile_prompt_logprobs(runner: ModelRunner, hidden_TD: Tensor) -> None:
    """The log-probabilities of a prompt of as many tokens as there are hidden states."""
    num_tokens = len(hidden_TD)
    rows = PromptRows(
        req_ids=[_PROFILED],
        counts=[num_tokens],
        hidden_indices=np.arange(num_tokens),
        target_indices=np.zeros(num_tokens, dtype=np.int64),
        num_logprobs=runner.sampling.most_logprobs(runner.limits.vocab_size),
    )
    runner.prompt_logprobs.compute(rows, runner.model, hidden_TD)


def num_profile_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks, the null block included, that `run_prompt` needs."""
    return 1 + -(-num_tokens // block_size)


def _request(params: SamplingParams) -> NewRequestData:
    return NewRequestData(
        req_id=_PROFILED,
        prompt_token_ids=[],
        prefill_token_ids=[],
        sampling_params=params,
        block_ids=(),
        num_computed_tokens=0,
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
