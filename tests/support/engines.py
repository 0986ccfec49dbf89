"""Run token prompts through a real engine core, and compare the results with Transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from penstock.config import EngineConfig
from penstock.contract import LogprobsLists, RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.engine.planning.plan import plan_engine
from penstock.runner.slot_owner import SlotOwner
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.checkpoints import oracle_logits

# Where the two best logits of the oracle are closer than this, either token counts.
TOLERANCE = 1e-4
AnyOwner = TypeVar("AnyOwner", bound=SlotOwner)
SMALL = {
    "device": "cpu",
    "num_threads": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4 << 20,
}


@dataclass
class Result:
    """Result of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, float]] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def take(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions
        if output.new_logprobs is not None:
            self.logprobs += _by_token(output.new_logprobs)
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's log-probabilities came twice"
            self.prompt_logprobs = _by_token(output.prompt_logprobs)


def _by_token(rows: LogprobsLists) -> list[dict[int, float]]:
    return [dict(zip(*row, strict=True)) for row in zip(rows.logprob_token_ids, rows.logprobs, strict=True)]


def make_core(folder: Path | str, *, num_blocks: int | None = None, **options: Any) -> EngineCore:
    """num_blocks: of the KV cache, in whichever dtype; None for the bytes of `SMALL` or of the options."""
    if num_blocks is not None:
        options["kv_cache_memory_bytes"] = bytes_of_blocks(folder, num_blocks, **options)
    return EngineCore(EngineConfig.create(str(folder), **{**SMALL, **options}))


def bytes_of_blocks(folder: Path | str, num_blocks: int, **options: Any) -> int:
    """Bytes of so many blocks of KV cache per worker, in the dtype that this processor's kernels choose for it."""
    planned = plan_engine(folder, **{**SMALL, **options}).stages[0].kv_cache
    return num_blocks * planned.size_bytes // planned.pools[0].num_blocks


def add(core: EngineCore, req_id: str, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> None:
    core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=list(prompt), sampling_params=params, **fields))


def finish(core: EngineCore, results: dict[str, Result], max_steps: int = 5000) -> None:
    """Step until all requests have ended; more than `max_steps` steps count as a hang."""
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            return
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        core.wait_for_work()
    raise AssertionError(f"unfinished after {max_steps} steps: {core.scheduler.num_running} running")


def run(
    core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]
) -> list[Result]:
    """Run all prompts at once; results in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        add(core, f"r{index}", prompt, one)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


def owner_of(core: EngineCore, kind: type[AnyOwner]) -> AnyOwner:
    """The slot owner of this kind in an engine's only worker, which is in this process."""

    def owner(worker: Any) -> Any:
        return worker.runner.owners.of_type(kind)

    (found,) = core.collective_rpc(RpcCall(owner))
    assert isinstance(found, kind)
    return found


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_greedy_continuation(oracle: PreTrainedModel, prompt: Sequence[int], result: Result) -> None:
    """Every token is the oracle's best after the ones before it, and its log-probabilities are the oracle's.

    Of a model that amplifies rounding, as tiny delta rules do, more is allowed: see `assert_within_rounding`.
    """
    sequence = [*prompt, *result.tokens]
    logits = oracle_logits(oracle, sequence)[len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    errors = [float(row.max() - row[token]) for row, token in zip(logits, result.tokens, strict=True)]
    for row, logprobs in zip(expected, result.logprobs, strict=False):
        errors += [abs(float(row[token]) - value) for token, value in logprobs.items()]
    assert_within_rounding(errors, lambda: _rounding_of(oracle, sequence, len(prompt)))


def assert_within_rounding(errors: Sequence[float], rounding: Callable[[], float]) -> None:
    """No error is larger than TOLERANCE, or than four times what float32 costs the oracle, if that is more."""
    # NaN is no number that is small.
    if not all(error <= TOLERANCE for error in errors):
        tolerance = max(TOLERANCE, 4 * rounding())
        wrong = {index: error for index, error in enumerate(errors) if not error <= tolerance}
        assert not wrong, f"more than {tolerance} from the oracle, tokens first: {wrong}"


def _rounding_of(oracle: PreTrainedModel, sequence: Sequence[int], begin: int) -> float:
    """The most by which float32 changes log-probabilities after the tokens from `begin` on."""
    models = (oracle, in_float64(oracle))
    narrow_TV, wide_TV = (torch.log_softmax(oracle_logits(one, sequence).double(), -1) for one in models)
    return float((narrow_TV - wide_TV)[begin - 1 : -1].abs().max())


def in_float64(oracle: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model in float64."""
    wide = copy.deepcopy(oracle).double()
    wide.set_experts_implementation("eager")  # grouped products have no float64
    return wide


def run_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable recorded programs, so that models run layer by layer with the same kernels."""
    monkeypatch.setattr("penstock.runner.execute.recorded_programs.NATIVE", None)
