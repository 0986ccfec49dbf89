"""Model runner: executes one scheduled step, the forward pass and then the sampling.

This file has what every model shares. A feature that only some requests or models need is a module of its own, which
this file calls unconditionally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.attention import CacheLayer
from penstock.config import EngineConfig, GraphConfig, SamplingConfig
from penstock.config.graphs import FULL
from penstock.contract import DraftTokenIds, KVCacheConfig, SamplingInput, SchedulerOutput
from penstock.contract.step_checks import StepChecks
from penstock.device import Device
from penstock.errors import UnsupportedFeature
from penstock.layers.experts import note_changes
from penstock.models.interface import LanguageModel
from penstock.observability.spans import EXECUTABLES, STEPS, SpanLog
from penstock.parallel import GroupAgreement
from penstock.runner.async_output import OutputWithParts, StepOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.build.batch_builder import BatchBuilder
from penstock.runner.build.frames import BufferSet, Frames
from penstock.runner.build.input_buffers import InputBuffers
from penstock.runner.build.padding import NO_PADDING, GraphPadding, Padding
from penstock.runner.execute.execution import EagerExecution, Execution
from penstock.runner.execute.graphs import GraphExecution
from penstock.runner.execute.programs import ProgramExecution
from penstock.runner.execute.recorded_programs import RecordedPrograms
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.model_states import DecoderModelState, ModelState
from penstock.runner.output_heads import EarlierStage, Generation, HeadFactory, HeadServices
from penstock.runner.poisoned_blocks import PoisonedBlocks
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.sampling.logits_processor import LogitsProcessor
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.slot_owners import SlotOwners
from penstock.runner.speculative import NO_SPECULATOR, Speculator, SpeculatorServices
from penstock.runner.stage import NO_PIPELINE, Stage
from penstock.runner.step_order import StepOrder
from penstock.step.frame import Frame


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of the runner's persistent state.

    max_drafts: draft tokens of a request in a step. max_concurrent_steps: steps in flight.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    max_drafts: int = 0
    max_concurrent_steps: int = 1

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> RunnerLimits:
        """Sizes of an engine."""
        return cls(
            max_num_reqs=config.scheduler.max_num_seqs,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=config.model.vocab_size,
            max_drafts=config.speculative.num_speculative_tokens,
            max_concurrent_steps=config.max_concurrent_batches,
        )


class ModelRunner:
    """Owns the per-slot state, the KV cache and the sampler of one rank.

    logits_processors: replace the installed ones and those that `sampling` names. fast_paths: keep decode frames, and
    run recorded programs or the CUDA graphs of `graphs`. model_state: builds the model's inputs; by default
    `DecoderModelState`. agreement: check that all ranks run the same step. speculator: proposes draft tokens, at most
    `limits.max_drafts`. stage: this rank's pipeline stage. owners: further owners of per-slot state.
    transforms: logits transforms of features.
    make_head: makes the output head, on the last stage. spans: receives the times of a step's phases.
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
        graphs: GraphConfig | None = None,
        padding: Padding | None = None,
        rank: int = 0,
        model_state: ModelState | None = None,
        agreement: GroupAgreement | None = None,
        speculator: Speculator = NO_SPECULATOR,
        stage: Stage = NO_PIPELINE,
        owners: Sequence[SlotOwner] = (),
        transforms: Sequence[LogitsTransform] = (),
        make_head: HeadFactory = Generation,
        spans: SpanLog | None = None,
    ) -> None:
        self.device = device
        self._spans = spans
        self._agreement = agreement
        self.limits = limits
        num_slots, verification = limits.max_num_reqs + 1, speculator.verification
        self.requests = RequestStates(device, limits.max_num_reqs, limits.max_model_len, limits.max_drafts)
        self.block_tables = BlockTables(device, num_slots, limits.max_model_len, kv_cache_config)
        token_ids = self.requests.all_token_ids.tensor
        sampling = sampling or SamplingConfig()
        self.sampler = Sampler(
            device, num_slots, limits.vocab_size, token_ids, sampling, logits_processors, verification, transforms
        )
        self.prompt_logprobs = PromptLogprobs(device, num_slots, limits.vocab_size, token_ids)
        self.speculator = speculator
        self.owners = SlotOwners(
            self.requests, [self.block_tables, self.sampler, self.prompt_logprobs, speculator, *owners]
        )
        self.kv_cache = PagedKVCache(device, layers, kv_cache_config, attention_backend)
        self.owners.use_kv_cache(self.kv_cache)
        self.poisoned_blocks = PoisonedBlocks(device, self.kv_cache)
        self.stage = stage
        self.padding, self.execution = self._make_execution(fast_paths, graphs or GraphConfig(), padding)
        speculator.bind(
            SpeculatorServices(
                self.requests, self.block_tables, self.kv_cache, self.sampler, self.execution, self.padding.size_for
            )
        )
        verification.bind(self.requests.draft_token_ids.tensor, speculator.draft_probs)
        self.model_state = model_state or DecoderModelState()
        head_services = HeadServices(
            device,
            self.requests,
            self.owners,
            self.sampler,
            self.prompt_logprobs,
            speculator,
            stage,
            self.execution,
            rank,
        )
        self.head = make_head(head_services) if stage.is_last else EarlierStage(head_services)
        self.frames = Frames(
            model,
            [self._make_buffers() for _ in range(limits.max_concurrent_steps)],
            self.owners,
            self.kv_cache,
            self.model_state,
            stage,
            self.head.wants,
            self.padding,
            keeps_frames=fast_paths,
        )
        self.steps: StepOrder[Frame] = StepOrder()
        self._checks = StepChecks(
            kv_cache_config,
            limits.max_num_reqs,
            limits.max_num_tokens,
            limits.max_model_len,
            limits.vocab_size,
            limits.max_drafts,
        )

    def execute_model(self, output: SchedulerOutput) -> None:
        """Apply the step's changes to the state and run its forward pass; `sample_tokens` of the same step follows.

        Raises LifecycleError where the step is out of order (`StepOrder`), RanksDisagree where other ranks run another
        step, InvalidMessage for ids or positions that are not allowed (`StepChecks`).
        """
        if self._agreement is not None:
            self._agreement.on_step(output)
        self.steps.begin(output)
        may_repeat, errors = self._checks.check(output)
        buffer_set = self.frames.take_buffers(output)
        has_others = self.stage.has_others
        if has_others:
            self.head.receive_outcomes(output, buffer_set)
        frame = self.frames.begin(output, buffer_set, may_repeat=may_repeat)
        frame.errors = self.owners.extend(output) if frame.is_repeated else self.owners.apply(output, errors)
        if frame.errors:
            self._checks.forget(req_id for req_id in frame.errors if req_id not in self.requests.slot_of)
        if output.clears_blocks:
            self.poisoned_blocks.clear(output)
        if self.frames.fill(frame):
            if self._spans is not None:
                self._spans.end("prepare", STEPS)
            if has_others:
                self.stage.receive(frame)
            way = self.execution.run(frame)
            if self._spans is not None:
                self._spans.end("execute", STEPS)
                self._spans.copy(way, EXECUTABLES)
            if has_others:
                self.stage.send(frame)
        self.steps.wait(output.step_id, frame)

    def sample_tokens(self, sampling: SamplingInput) -> StepOutput:
        """Sample the tokens of an executed step and advance the state on the device.

        Raises LifecycleError where the step was not executed, was sampled before, or another one is to be sampled
        first; InvalidMessage for parts that are not allowed (`Part.check`).
        """
        if sampling.parts:
            self._checks.check_sampling(sampling)
        frame = self.steps.take(sampling.step_id)
        frame.sampling = sampling
        result = self.head.finish(frame)
        parts = self.owners.parts_of_results(frame)
        return OutputWithParts(result, parts) if parts else result

    @property
    def model(self) -> LanguageModel:
        """The model of the next step."""
        return self.frames.model

    def replace_model(self, model: LanguageModel) -> None:
        """Run another model with the same layers from the next step on."""
        self.frames.replace_model(model)
        self.forget_programs()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draft tokens for the next step, for a scheduler that schedules them by id; None if there are none."""
        self.head.catch_up()
        return self.speculator.take_draft_token_ids()

    def begin_anew(self) -> None:
        """Forget the steps that have run, so that the next one may have any id. The runner is idle."""
        self.steps = StepOrder()
        self.frames.forget_frames()

    def forget_programs(self) -> None:
        """Drop recorded programs: the model or its weights have changed."""
        self.frames.forget_ways()
        self.execution.forget()
        note_changes(self.model)

    def _make_execution(
        self, fast_paths: bool, graphs: GraphConfig, padding: Padding | None
    ) -> tuple[Padding, Execution]:
        if not fast_paths:
            return padding or NO_PADDING, EagerExecution()
        if not self.device.captures_graphs:
            return padding or NO_PADDING, ProgramExecution(RecordedPrograms(self.kv_cache.layers))
        if graphs.cudagraph_mode == FULL:
            self._check_capturable()
        limits = self.limits
        padding = padding or GraphPadding.of(
            graphs,
            max_num_reqs=limits.max_num_reqs,
            max_num_tokens=limits.max_num_tokens,
            max_drafts=limits.max_drafts,
            is_capturable=self.kv_cache.is_capturable,
        )
        return padding, GraphExecution(self.device, padding, self.stage.aux_here(self.speculator.aux_layers))

    def _check_capturable(self) -> None:
        """Raise UnsupportedFeature for an attention backend whose mixed steps cannot be captured."""
        refused = sorted({group.backend.name for group in self.kv_cache.groups if not group.backend.is_capturable})
        if refused:
            raise UnsupportedFeature(
                f"cudagraph_mode='full' captures attention in graphs, but that of {', '.join(refused)} depends on "
                "lengths on the host. Use cudagraph_mode='full_and_piecewise', whose attention runs between graphs, or "
                "an attention_backend that can be captured, such as 'triton_paged'."
            )

    def _make_buffers(self) -> BufferSet:
        limits = self.limits
        step_inputs = self.owners.step_inputs
        buffers = InputBuffers(self.device, limits.max_num_tokens, limits.max_num_reqs, self.block_tables, step_inputs)
        batcher = BatchBuilder(
            self.device,
            self.requests,
            self.block_tables,
            buffers,
            self.sampler.takes_drafts,
            whole_block_tables=self.padding.whole_block_tables,
        )
        return BufferSet(batcher, buffers.named)
