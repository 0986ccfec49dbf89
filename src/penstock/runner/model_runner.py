"""One scheduling decision in, one forward pass and its sampled tokens out.

Only what every model shares is here. A feature that some requests or models need has a room of its own, and this file
calls it unconditionally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.attention import CacheLayer, ForwardContext
from penstock.config import SamplingConfig
from penstock.contract import DraftTokenIds, GrammarOutput, KVCacheConfig, SchedulerOutput
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.parallel import NO_AGREEMENT, Agreement
from penstock.runner.after_forward import AfterForward, Generation, PendingStep
from penstock.runner.async_output import AsyncOutput, ReadyOutput
from penstock.runner.batch_plan import BatchPlan, Planner
from penstock.runner.block_tables import BlockTables
from penstock.runner.fast_paths import FastPaths, PlainPath
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.input_buffers import InputBuffers
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.lanes import Lane, Lanes
from penstock.runner.model_states import DecoderModelState, ModelState
from penstock.runner.poisoned_blocks import PoisonedBlocks
from penstock.runner.request_lifecycle import RequestLifecycle
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.sampling.logits_processor import LogitsProcessor
from penstock.runner.speculative import NO_SPECULATOR, Speculator
from penstock.runner.stage import ONE_STAGE, OneStage
from penstock.runner.step_order import StepOrder


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What the runner's persistent state is sized for.

    max_drafts: of a request in a step. max_concurrent_steps: whose outcome is not known here yet.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    max_drafts: int = 0
    max_concurrent_steps: int = 1


class ModelRunner:
    """Owns the per-slot state, the KV cache and the sampler of one rank.

    model_state: what makes the model's inputs, if not as a decoder's. agreement: of all ranks on every step.
    logits_processors: instead of those that are installed and that `sampling` names. speculator: guesses what the next
    step verifies; the limits' max_drafts has room for it. stage: of a pipeline, where the model is one.
    """

    def __init__(
        self,
        device: Device,
        model: LanguageModel,
        layers: Mapping[str, CacheLayer],
        kv_cache_config: KVCacheConfig,
        limits: RunnerLimits,
        *,
        attention_backend: str | None = None,
        sampling: SamplingConfig | None = None,
        logits_processors: Sequence[type[LogitsProcessor]] | None = None,
        fast_paths: bool = True,
        planner: Planner = BatchPlan.without_padding,
        rank: int = 0,
        model_state: ModelState | None = None,
        agreement: Agreement = NO_AGREEMENT,
        speculator: Speculator = NO_SPECULATOR,
        stage: OneStage = ONE_STAGE,
    ) -> None:
        self.device = device
        self.model = model
        self.model_state = model_state or DecoderModelState()
        self._agreement = agreement
        self.limits = limits
        self.sampling = sampling or SamplingConfig()
        self._planner = planner
        num_slots = limits.max_num_reqs + 1
        self.requests = RequestStates(device, limits.max_num_reqs, limits.max_model_len, limits.max_drafts)
        self.block_tables = BlockTables(device, num_slots, limits.max_model_len, kv_cache_config)
        token_ids = self.requests.all_token_ids.tensor
        self.sampler = Sampler(
            device,
            num_slots,
            limits.vocab_size,
            token_ids,
            self.sampling,
            logits_processors,
            speculator.verification,
        )
        speculator.verification.bind(self.requests.draft_token_ids.tensor, lambda: speculator.draft_probs)
        self.prompt_logprobs = PromptLogprobs(device, num_slots, limits.vocab_size, token_ids)
        self.speculator = speculator
        owners = self.requests, self.block_tables, self.sampler, self.prompt_logprobs, speculator
        self.lifecycle = RequestLifecycle(*owners)
        self.kv_cache = PagedKVCache(device, layers, kv_cache_config, attention_backend)
        speculator.bind(self.requests, self.block_tables, self.kv_cache, self.sampler)
        self.poisoned_blocks = PoisonedBlocks(device, self.kv_cache)
        self.lanes = Lanes([self._make_lane(fast_paths) for _ in range(limits.max_concurrent_steps)])
        self.after_forward: AfterForward = Generation(
            device,
            self.requests,
            self.kv_cache,
            self.lanes,
            self.sampler,
            self.prompt_logprobs,
            speculator,
            rank,
            stage,
        )
        self.steps: StepOrder[PendingStep] = StepOrder()

    def execute_model(self, output: SchedulerOutput) -> None:
        """Bring the state up to the step and run its forward pass; `sample_tokens` of the same step takes the result.

        Raises LifecycleError when it is not the step's turn (`StepOrder`), RanksDisagree when other ranks run another.
        """
        self._agreement.on_step(output)
        self.lanes.turn_to(output)
        self.after_forward.begin(output)
        self.steps.begin(output)
        errors: dict[str, str] = {}
        repeated = self.paths.repeat(output)
        prepared = repeated or self._prepare(output, errors)
        if prepared is None:
            step = PendingStep(errors)
        else:
            batch, context = prepared
            inputs = self.model_state.inputs(batch)
            num_drafts, is_repeated = output.num_drafts_wanted, repeated is not None
            step = self.after_forward.run(
                self.model, batch, inputs, context, errors, is_repeated=is_repeated, num_drafts=num_drafts
            )
        self.steps.wait(output.step_id, step)

    def sample_tokens(self, grammar: GrammarOutput) -> AsyncOutput | ReadyOutput:
        """Choose the tokens of an executed step and advance the state on the device.

        Raises LifecycleError when that step was never executed, or was sampled before, or another one must be first.
        """
        step = self.steps.take(grammar.step_id)
        self.sampler.grammar.take(grammar, self.requests.slot_of)
        return self.after_forward.finish(self.model, grammar.step_id, step)

    @property
    def batcher(self) -> BatchBuilder:
        """Of the last step's lane."""
        return self.lanes.current.batcher

    @property
    def paths(self) -> PlainPath:
        """Of the last step's lane."""
        return self.lanes.current.paths

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the next step, for a scheduler that names them; None where there are none."""
        self.after_forward.catch_up()
        return self.speculator.take_draft_token_ids()

    def forget_programs(self) -> None:
        """Let models record anew what they run: they, or their weights, may be others."""
        self.lanes.unbind()
        self.kv_cache.programs.forget()

    def _make_lane(self, fast_paths: bool) -> Lane:
        limits = self.limits
        buffers = InputBuffers(self.device, limits.max_num_tokens, limits.max_num_reqs, self.block_tables)
        batcher = BatchBuilder(self.device, self.requests, self.block_tables, buffers, self.sampler.takes_drafts)
        rooms = self.requests, self.lifecycle, self.poisoned_blocks, batcher, self.kv_cache, self.sampler
        return Lane(batcher, FastPaths(*rooms) if fast_paths else PlainPath())

    def _prepare(self, output: SchedulerOutput, errors: dict[str, str]) -> tuple[InputBatch, ForwardContext] | None:
        """The inputs of a step, None if it runs no token; `errors` gets the requests that cannot run."""
        self.paths.forget()
        errors |= self.lifecycle.apply(output)
        self.poisoned_blocks.clear(output)
        scheduled = _without(output.num_scheduled_tokens, errors)
        if not scheduled:
            return None
        plan = self._planner(scheduled)
        self.after_forward.expect(plan.num_tokens_padded)
        batch = self.batcher.build(scheduled, plan, output.scheduled_spec_decode_tokens)
        context = self.kv_cache.make_context(batch)
        if not errors:
            self.paths.keep(output, batch, context)
        return batch, context


def _without(num_scheduled_tokens: dict[str, int], errors: Mapping[str, str]) -> dict[str, int]:
    if not errors:
        return num_scheduled_tokens
    return {req_id: count for req_id, count in num_scheduled_tokens.items() if req_id not in errors}
