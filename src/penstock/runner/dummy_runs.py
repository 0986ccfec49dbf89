"""Dummy batches and profiling runs: warm-up, steps of idle ranks, step costs and peak memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT, AuxHiddenStates, ForwardContext, SequenceGeometry, StepGeometry
from penstock.kernels.sampling import greedy_tokens
from penstock.parallel import ParallelState
from penstock.runner.execute.graphs import rehearse_pieces
from penstock.runner.model_runner import ModelRunner
from penstock.step.frame import Frame

# Duration of the step cost measurement in seconds, and repetitions of each size after the first time.
_MEASURED_S, _NUM_MEASURED_AGAIN = 0.5, 9


def run_dummy_batch(runner: ModelRunner, num_tokens: int, num_reqs: int) -> Frame:
    """Run a forward pass over padding only: no block is written, no slot and no random stream is touched.

    An idle rank takes part in the collectives of the other ranks with it, and warm-up compiles kernels.
    """
    # Outcomes that this stage has not committed yet are read from the buffers that the dummy batch overwrites.
    runner.head.catch_up()
    frame = runner.frames.dummy(num_tokens, num_reqs)
    runner.execution.run(frame)
    _logits(runner, frame, num_reqs)
    return frame


def run_dummy_step(runner: ModelRunner) -> None:
    """Run a full step for no request: the forward pass, and the `dummy` of each slot owner."""
    runner.owners.dummy(run_dummy_batch(runner, num_tokens=1, num_reqs=1))


def warm_up_decodes(runner: ModelRunner) -> None:
    """Run a dummy decode step of each captured size, which compiles its kernels, and the argmax."""
    for size in runner.padding.sizes:
        frame = run_dummy_batch(runner, size, size)
        greedy_tokens(_logits(runner, frame, size))


def run_largest_graph(runner: ModelRunner) -> None:
    """Run a dummy step like the graph that needs most memory; smaller ones use the same memory."""
    most, limits = max(runner.padding.sizes), runner.limits
    size = max(most, min(most * (1 + limits.max_drafts), limits.max_num_tokens))
    greedy_tokens(_logits(runner, run_dummy_batch(runner, size, most), size))


def run_largest_mixed_graph(runner: ModelRunner) -> int:
    """Run the largest mixed step that is a graph or has pieces. Returns the bytes of the buffers between its pieces."""
    size, most = max(runner.padding.token_sizes), runner.limits.max_num_reqs
    if runner.padding.most_rows is not None:
        run_dummy_batch(runner, size, min(size, most))
        return 0
    return rehearse_pieces(runner.frames.dummy(size, min(size, most)), size)


def measure_step_costs(runner: ModelRunner, most_tokens: int, parallel: ParallelState) -> list[tuple[int, float]]:
    """Measure the shortest time, in seconds, of dummy steps of 1, 2, 4, … tokens, all of which have logits.

    All ranks call it together and get the same result: the slowest rank's time of each stage, summed over the stages.
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


def _logits(runner: ModelRunner, frame: Frame, num_rows: int) -> Tensor:
    """Run the LM head on a dummy frame's first rows."""
    assert frame.all_hidden is not None, "a dummy frame wants all rows"
    return runner.execution.compute(partial(runner.model.compute_logits, frame.all_hidden[:num_rows], NO_CONTEXT))


def _time_dummy_batch(runner: ModelRunner, num_tokens: int) -> float:
    begin = time.perf_counter()
    run_dummy_batch(runner, num_tokens, min(num_tokens, runner.limits.max_num_reqs))
    runner.device.synchronize()
    return time.perf_counter() - begin


def run_prompt(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Run the forward pass of one prompt in an idle runner; returns its hidden states [T, hidden size].

    Of the runner's state only the KV cache is touched, which needs `blocks_of_one_request` of each group. Weights and
    tokens need no values: the device may be the stand-in without memory.
    """
    context, positions = _context_of_prompt(runner, len(token_ids))
    if runner.speculator.aux_layers:
        context = replace(context, aux=AuxHiddenStates(runner.speculator.aux_layers))
    inputs = runner.model_state.dummy_inputs(runner.device.upload(np.array(token_ids, dtype=np.int32)), positions)
    return runner.execution.forward(runner.model, inputs, context)


def run_longest_prompt(runner: ModelRunner, num_tokens: int) -> Tensor:
    """Run the forward pass of a prompt of `num_tokens` tokens, to measure its peak memory."""
    return run_prompt(runner, [0] * num_tokens)


def run_longest_prompt_of_drafter(runner: ModelRunner, num_tokens: int) -> None:
    """Run the drafter's forward pass after such a prompt."""
    num_tokens += runner.speculator.most_extra_tokens(runner.limits.max_num_reqs)
    runner.speculator.run_prompt(*_context_of_prompt(runner, num_tokens))


def _context_of_prompt(runner: ModelRunner, num_tokens: int) -> tuple[ForwardContext, Tensor]:
    """Build the forward context and the positions of a step with one prompt."""
    upload = runner.device.upload
    # Some backends read on the host, where the host computes.
    place = torch.from_numpy if runner.device.kind == "cpu" else upload
    query_start_loc_np = np.array([0, num_tokens], dtype=np.int32)
    seq_lens = place(np.array([num_tokens], dtype=np.int32))
    sequences = place(query_start_loc_np), query_start_loc_np, seq_lens, num_tokens, 1, num_tokens
    geometry = [
        StepGeometry(
            *sequences,
            block_table=place(np.array([spec.blocks_of_one_request(num_tokens)], dtype=np.int32)),
            slot_mapping=place(np.arange(spec.block_size, spec.block_size + num_tokens)),
            max_seq_len_upper_bound=num_tokens,
            block_size=spec.block_size,
            num_own_blocks=spec.num_own_blocks,
        )
        for spec in (group.spec for group in runner.kv_cache.config.groups)
    ]
    # A step may have more tokens than a request.
    positions = upload(np.arange(num_tokens) % runner.limits.max_model_len)
    return runner.kv_cache.context(SequenceGeometry(*sequences), geometry), positions
