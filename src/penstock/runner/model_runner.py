"""One scheduling decision in, one forward pass and its sampled tokens out.

Only what every model shares is here. A feature that some requests or models need has a room of its own, and this file
calls it unconditionally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from penstock.attention import ForwardContext, LayerAttention
from penstock.config import SamplingConfig
from penstock.contract import GrammarOutput, KVCacheConfig, SampledOutput, SchedulerOutput
from penstock.device import Device
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel
from penstock.runner.async_output import AsyncOutput, ReadyOutput
from penstock.runner.batch_plan import BatchPlan, Planner
from penstock.runner.block_tables import BlockTables
from penstock.runner.fast_paths import FastPaths, PlainPath
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.input_buffers import InputBuffers
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.poisoned_blocks import PoisonedBlocks
from penstock.runner.request_lifecycle import RequestLifecycle
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.sampling.logits_processor import LogitsProcessor
from penstock.runner.sampling.prompt_logprobs import PromptRows
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.runner.step_order import StepOrder


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What the runner's persistent state is sized for. max_drafts: of a request in a step."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    max_drafts: int = 0


class PendingStep(msgspec.Struct, frozen=True, gc=False):
    """A step that has been run and not yet sampled. `batch` is None when no token was run.

    hidden: of each logits row; None where the step has `chosen` its tokens already. all_hidden: of all
    tokens, where prompt_rows are among them.
    """

    batch: InputBatch | None
    hidden: Tensor | None
    errors: dict[str, str]
    prompt_rows: PromptRows | None = None
    all_hidden: Tensor | None = None
    chosen: ChosenTokens | None = None

    @property
    def req_ids(self) -> list[str]:
        return [] if self.batch is None else self.batch.layout.req_ids


class ModelRunner:
    """Owns the per-slot state, the KV cache and the sampler of one rank.

    logits_processors: instead of those that are installed and that `sampling` names.
    """

    def __init__(
        self,
        device: Device,
        model: LanguageModel,
        layers: Mapping[str, LayerAttention],
        kv_cache_config: KVCacheConfig,
        limits: RunnerLimits,
        *,
        attention_backend: str | None = None,
        sampling: SamplingConfig | None = None,
        logits_processors: Sequence[type[LogitsProcessor]] | None = None,
        fast_paths: bool = True,
        planner: Planner = BatchPlan.without_padding,
        rank: int = 0,
    ) -> None:
        self.device = device
        self.model = model
        self.limits = limits
        self.sampling = sampling or SamplingConfig()
        self._rank = rank
        self._planner = planner
        num_slots = limits.max_num_reqs + 1
        self.requests = RequestStates(device, limits.max_num_reqs, limits.max_model_len, limits.max_drafts)
        self.block_tables = BlockTables(device, num_slots, limits.max_model_len, kv_cache_config)
        token_ids = self.requests.all_token_ids.tensor
        self.sampler = Sampler(device, num_slots, limits.vocab_size, token_ids, self.sampling, logits_processors)
        self.prompt_logprobs = PromptLogprobs(device, num_slots, limits.vocab_size, token_ids)
        self.lifecycle = RequestLifecycle(self.requests, self.block_tables, self.sampler, self.prompt_logprobs)
        buffers = InputBuffers(device, limits.max_num_tokens, limits.max_num_reqs, self.block_tables)
        self.batcher = BatchBuilder(device, self.requests, self.block_tables, buffers, self.sampler.takes_drafts)
        self.kv_cache = PagedKVCache(device, layers, kv_cache_config, attention_backend)
        self.poisoned_blocks = PoisonedBlocks(device, self.kv_cache)
        rooms = self.requests, self.lifecycle, self.poisoned_blocks, self.batcher, self.kv_cache, self.sampler
        self.paths = FastPaths(*rooms) if fast_paths else PlainPath()
        # Whether every step computes all of its hidden states, as one does that must tell of prompts.
        self.computes_all_hidden = False
        self.steps: StepOrder[PendingStep] = StepOrder()

    def execute_model(self, output: SchedulerOutput) -> None:
        """Bring the state up to the step and run its forward pass; `sample_tokens` of the same step takes the result.

        Raises LifecycleError when it is not the step's turn (`StepOrder`).
        """
        self.steps.begin(output)
        errors: dict[str, str] = {}
        repeats = self.paths.repeats(output)
        prepared = self.paths.repeat(output) if repeats else self._prepare(output, errors)
        if prepared is None:
            self.steps.wait(output.step_id, PendingStep(None, None, errors))
            return

        batch, context = prepared
        prompt_rows = self.prompt_logprobs.rows(batch.layout, self.requests)
        if repeats and prompt_rows is None:
            chosen = self.paths.choose(self.model)
            if chosen is not None:
                self.steps.wait(output.step_id, PendingStep(batch, None, errors, chosen=chosen))
                return
        if (
            prompt_rows is None
            and batch.layout.has_one_row_each
            and batch.layout.max_query_len > 1
            and not self.computes_all_hidden
        ):
            context = self.kv_cache.narrow_to_last_tokens(context, batch)
        hidden = self.paths.forward(self.model, batch.input_ids, batch.positions, context)
        last = hidden if context.last is not None else batch.layout.of_logits_rows(hidden)
        all_hidden = None if prompt_rows is None else hidden
        self.steps.wait(output.step_id, PendingStep(batch, last, errors, prompt_rows, all_hidden))

    def sample_tokens(self, grammar: GrammarOutput) -> AsyncOutput | ReadyOutput:
        """Choose the tokens of an executed step and advance the state on the device.

        Raises LifecycleError when that step was never executed, or was sampled before, or another one must be first.
        """
        step_id = grammar.step_id
        step = self.steps.take(step_id)
        if step.batch is None:
            return ReadyOutput(SampledOutput(step_id=step_id, errors=step.errors))
        batch, errors = step.batch, step.errors
        rows = batch.logits_rows
        prompt_logprobs = self.prompt_logprobs.compute(step.prompt_rows, self.model, step.all_hidden)
        sampled = self._sample(step, rows)
        outcome, on_host = batch.step.outcome(sampled.sampled_token_ids, sampled.failures)
        layout = batch.layout
        req_ids = layout.req_ids
        if sampled.errors:
            errors = _by_request(sampled.errors, req_ids) | errors
        result: AsyncOutput | ReadyOutput
        if on_host is not None and on_host[1] is None and sampled.logprobs is None and prompt_logprobs is None:
            tokens = SampledOutput(step_id=step_id, req_ids=req_ids, sampled_token_ids=on_host[0], errors=errors)
            result = ReadyOutput(tokens)
        else:
            result = AsyncOutput(
                self.device,
                step_id=step_id,
                req_ids=req_ids,
                outcome=outcome,
                on_host=on_host,
                first_rows=layout.first_rows,
                logprobs=sampled.logprobs,
                prompt_logprobs=prompt_logprobs,
                errors=errors,
                on_not_finite=self.poisoned_blocks.note_failure,
                rank=self._rank,
            )
        batch.step.advance(outcome)
        self.sampler.advance(layout.slots, layout.slots_np, outcome)
        return result

    def forget_programs(self) -> None:
        """Let models record anew what they run: they, or their weights, may be others."""
        self.paths.unbind()
        self.kv_cache.programs.forget()

    def _prepare(self, output: SchedulerOutput, errors: dict[str, str]) -> tuple[InputBatch, ForwardContext] | None:
        """The inputs of a step, None if it runs no token; `errors` gets the requests that cannot run."""
        self.paths.forget()
        errors |= self.lifecycle.apply(output)
        self.poisoned_blocks.clear(output)
        scheduled = _without(output.num_scheduled_tokens, errors)
        if not scheduled:
            return None
        batch = self.batcher.build(scheduled, self._planner(scheduled), output.scheduled_spec_decode_tokens)
        context = self.kv_cache.make_context(batch)
        if not errors:
            self.paths.keep(output, batch, context)
        return batch, context

    def _sample(self, step: PendingStep, rows: LogitsRows) -> SamplerOutput:
        chosen, hidden = step.chosen, step.hidden
        if hidden is not None and self.sampler.is_plain_greedy(rows):
            chosen = self.model.compute_greedy(hidden)
        if chosen is not None:
            return SamplerOutput(*chosen, None, {})
        assert hidden is not None, "a step has its tokens, or what they are chosen from"
        return self.sampler.sample(self.model.compute_logits(hidden), rows)


def _by_request(errors: Mapping[int, str], req_ids: Sequence[str]) -> dict[str, str]:
    return {req_ids[row]: error for row, error in errors.items()}


def _without(num_scheduled_tokens: dict[str, int], errors: Mapping[str, str]) -> dict[str, int]:
    if not errors:
        return num_scheduled_tokens
    return {req_id: count for req_id, count in num_scheduled_tokens.items() if req_id not in errors}
