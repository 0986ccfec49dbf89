"""Model runner over an arithmetic model, whose next tokens tests can compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.attention import ForwardContext, Heads, LayerAttention
from penstock.config import DeviceConfig
from penstock.contract import (
    CachedRequestData,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    NewRequestData,
    SampledOutput,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
)
from penstock.device import create_device
from penstock.runner.build.batch_builder import BatchBuilder
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.scheduler.kv_cache_plan import make_kv_cache_config

VOCAB_SIZE = 97
BLOCK_SIZE = 4
LAYER = LayerAttention("layer.0", num_heads=1, num_kv_heads=1, head_size=4, scale=0.5)
GREEDY = SamplingParams(temperature=0.0, seed=0)


def next_token(token: int, position: int) -> int:
    """Next token of `ArithmeticModel` after `token` at `position`."""
    return (token * 7 + position * 3 + 5) % VOCAB_SIZE


class ArithmeticModel:
    """Model whose argmax is `next_token`; attention runs to write the KV cache, and does not affect the logits."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        self.calls.append((input_ids.tolist(), positions.tolist()))
        rows = torch.stack([input_ids, positions, input_ids, positions], dim=-1).float().unsqueeze(1)
        context.attend(LAYER, Heads(rows, rows + 1, rows + 2))
        return context.narrowed(((input_ids.long() * 7 + positions * 3 + 5) % VOCAB_SIZE).float().unsqueeze(-1))

    def compute_greedy(self, hidden: Tensor, context: ForwardContext) -> None:
        return None

    def compute_logits(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        noise = torch.rand(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        best = hidden.squeeze(-1).long()
        return noise.index_select(0, best).scatter(-1, best.unsqueeze(-1), 2.0)


def kv_cache_config(num_blocks: int = 64) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=4, dtype="float32")
    return make_kv_cache_config((KVCacheGroupSpec(layer_names=(LAYER.name,), spec=spec),), [num_blocks])


def make_runner(
    max_num_reqs: int = 8,
    max_model_len: int = 64,
    num_blocks: int = 64,
    model: ArithmeticModel | None = None,
    max_drafts: int = 0,
    limits: RunnerLimits | None = None,
    kv_cache: KVCacheConfig | None = None,
    **options: Any,
) -> ModelRunner:

    return ModelRunner(
        create_device(DeviceConfig(device="cpu", num_threads=1)),
        model or ArithmeticModel(),
        {LAYER.name: LAYER},
        kv_cache or kv_cache_config(num_blocks),
        limits
        or RunnerLimits(
            max_num_reqs, max_num_tokens=64, max_model_len=max_model_len, vocab_size=VOCAB_SIZE, max_drafts=max_drafts
        ),
        **options,
    )


def new_request(
    req_id: str,
    prompt: list[int],
    *,
    generated: list[int] | None = None,
    num_computed: int = 0,
    first_block: int = 1,
    num_blocks: int = 8,
    params: SamplingParams = GREEDY,
) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        prefill_token_ids=prompt + (generated or []),
        sampling_params=params,
        block_ids=(list(range(first_block, first_block + num_blocks)),),
        num_computed_tokens=num_computed,
    )


def batcher_of(runner: ModelRunner) -> BatchBuilder:
    """The batch builder of the last step's buffer set."""
    return runner.frames._buffer_sets[-1].batcher


@dataclass
class Driver:
    """Acts as the scheduler: numbers the steps and tracks the computed tokens."""

    runner: ModelRunner
    step_id: int = 0
    computed: dict[str, int] = field(default_factory=dict)

    def launch(
        self,
        counts: dict[str, int],
        new: list[NewRequestData] | None = None,
        *,
        finished: set[str] | None = None,
        preempted: set[str] | None = None,
        new_blocks: dict[str, tuple[list[int], ...]] | None = None,
        drafts: dict[str, list[int]] | None = None,
        repeats: bool = False,
        clears_blocks: bool = False,
    ) -> SchedulerOutput:
        """Execute a step without sampling. repeats: mark it as a repetition of the previous one."""
        new = new or []
        for request in new:
            self.computed[request.req_id] = request.num_computed_tokens
        added = {request.req_id for request in new}
        cached = [req_id for req_id in counts if req_id not in added]
        self.step_id += 1
        output = SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached,
                new_block_ids=[(new_blocks or {}).get(req_id) for req_id in cached],
                num_computed_tokens=[self.computed[req_id] for req_id in cached],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts or {},
            finished_req_ids=finished or set(),
            preempted_req_ids=preempted or set(),
            repeats_step_id=self.step_id - 1 if repeats else None,
            clears_blocks=clears_blocks,
        )
        for req_id, count in counts.items():
            self.computed[req_id] += count
        self.runner.execute_model(output)
        return output

    def step(self, counts: dict[str, int], new: list[NewRequestData] | None = None, **changes: object) -> SampledOutput:
        """Execute and sample a step."""
        output = self.launch(counts, new, **changes)  # type: ignore[arg-type]
        return self.runner.sample_tokens(SamplingInput(step_id=output.step_id)).get_output(5.0)

    def tokens(
        self, counts: dict[str, int], new: list[NewRequestData] | None = None, **changes: object
    ) -> dict[str, list[int]]:
        """Tokens of a step by request."""
        output = self.step(counts, new, **changes)
        return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def state_of(runner: ModelRunner, req_id: str) -> tuple[int, int]:
    """(num_computed_tokens, total_len) of the device state."""
    slot = runner.requests.slot_of[req_id]
    return int(runner.requests.num_computed_tokens.tensor[slot, 0]), int(runner.requests.total_len.tensor[slot, 0])
