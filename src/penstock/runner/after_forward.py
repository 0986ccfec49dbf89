"""What an engine makes of a step's hidden states. One that generates takes tokens from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from penstock.attention import ForwardContext, HiddenTaps
from penstock.contract import SampledOutput, SchedulerOutput
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.async_output import AsyncOutput, ReadyOutput
from penstock.runner.input_batch import InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.lanes import Lanes
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.sampling.prompt_logprobs import PromptRows
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.runner.speculative import DraftingStep, Speculator
from penstock.runner.stage import OneStage
from penstock.runner.unfinished_steps import UnfinishedSteps, sampling_requests


class PendingStep(msgspec.Struct, frozen=True, gc=False):
    """A step that has been run and not yet sampled. `batch` is None when no token was run.

    hidden: of each logits row; None where the step has `chosen` its tokens already. all_hidden: of all tokens, where
    prompt_rows are among them, or a speculator needs them; aux: and those before its `aux_layers`. context, inputs: of
    the forward pass. num_drafts: wanted for the next step.
    """

    errors: dict[str, str]
    batch: InputBatch | None = None
    hidden: Tensor | None = None
    prompt_rows: PromptRows | None = None
    all_hidden: Tensor | None = None
    aux: Sequence[Tensor] = ()
    chosen: ChosenTokens | None = None
    context: ForwardContext | None = None
    inputs: ModelInputs | None = None
    num_drafts: int = 0

    @property
    def req_ids(self) -> list[str]:
        return [] if self.batch is None else self.batch.layout.req_ids


class AfterForward(ABC):
    """Decides which hidden states a step must compute, and turns them into the step's result."""

    # Whether every step computes all of its hidden states, whatever it needs.
    computes_all_hidden = False

    @abstractmethod
    def run(
        self,
        model: LanguageModel,
        batch: InputBatch,
        inputs: ModelInputs,
        context: ForwardContext,
        errors: dict[str, str],
        *,
        is_repeated: bool,
        num_drafts: int,
    ) -> PendingStep:
        """The step's forward pass. is_repeated: the fast paths gave its inputs. num_drafts: to be made after it."""

    @abstractmethod
    def finish(self, model: LanguageModel, step_id: int, step: PendingStep) -> AsyncOutput | ReadyOutput:
        """The result of a step, begun to be copied; the state on the device is advanced by it."""

    def begin(self, output: SchedulerOutput) -> None:  # noqa: B027
        """A step is to be prepared: wait for what another rank makes of those that were run here, if it needs that."""

    def expect(self, num_tokens: int) -> None:  # noqa: B027
        """The step that is being prepared will run so many: what it takes from other ranks may come meanwhile."""

    def catch_up(self) -> None:  # noqa: B027
        """Wait for what another rank makes of all steps that were run here."""


class Generation(AfterForward):
    """Logits of the last tokens, the sampler, and log-probabilities of prompts."""

    def __init__(
        self,
        device: Device,
        requests: RequestStates,
        kv_cache: PagedKVCache,
        lanes: Lanes,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        speculator: Speculator,
        rank: int,
        stage: OneStage,
    ) -> None:
        self._stage = stage
        self._unfinished = UnfinishedSteps(requests, stage)
        # Of those, by number, what a speculator will ask for.
        self._pending: dict[int, PendingStep] = {}
        self._device = device
        self._requests = requests
        self._kv_cache = kv_cache
        self._lanes = lanes
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._speculator = speculator
        self._rank = rank

    def run(
        self,
        model: LanguageModel,
        batch: InputBatch,
        inputs: ModelInputs,
        context: ForwardContext,
        errors: dict[str, str],
        *,
        is_repeated: bool,
        num_drafts: int,
    ) -> PendingStep:
        paths = self._lanes.current.paths
        stage, speculator = self._stage, self._speculator
        inputs = stage.receive_hidden(inputs)
        aux, aux_layers = stage.aux_received(inputs.tokens.shape[0]), stage.aux_here(speculator.aux_layers)
        if not stage.is_last:
            taps = HiddenTaps(aux_layers)
            noting = replace(context, taps=taps) if taps.layers else context
            hidden = paths.forward(model, inputs, noting)
            stage.send_hidden(hidden, inputs.tokens.shape[0], (*aux, *taps.states))
            return PendingStep(errors, batch, context=context, inputs=inputs, num_drafts=num_drafts)
        prompt_rows = self._prompt_logprobs.rows(batch.layout, self._requests)
        if is_repeated and prompt_rows is None:
            found = paths.choose(model, inputs, aux_layers if speculator.needs_hidden else None)
            if found is not None:
                chosen, states = found
                all_hidden, aux = (states[0], [*aux, *states[1:]]) if states else (None, aux)
                return PendingStep(errors, batch, None, None, all_hidden, aux, chosen, context, inputs, num_drafts)
        keeps_hidden = prompt_rows is not None or speculator.needs_hidden
        if batch.layout.can_be_narrowed and not keeps_hidden and not self.computes_all_hidden:
            context = self._kv_cache.narrow_to_last_tokens(context, batch)
        taps = HiddenTaps(aux_layers)
        if taps.layers:
            context = replace(context, taps=taps)
        hidden = paths.forward(model, inputs, context)
        of_rows = hidden if context.last is not None else batch.layout.of_logits_rows(hidden)
        all_hidden = hidden if keeps_hidden else None
        aux = [*aux, *taps.states]
        return PendingStep(errors, batch, of_rows, prompt_rows, all_hidden, aux, None, context, inputs, num_drafts)

    def finish(self, model: LanguageModel, step_id: int, step: PendingStep) -> AsyncOutput | ReadyOutput:
        batch, errors, context, inputs = step.batch, step.errors, step.context, step.inputs
        if batch is None or context is None or inputs is None:
            return ReadyOutput(SampledOutput(step_id=step_id, errors=errors))
        if not self._stage.is_last:
            if self._unfinished.add(step_id, self._lanes.current, batch):
                self._pending[step_id] = step
            return ReadyOutput(SampledOutput(step_id=step_id, errors=errors))
        layout = batch.layout
        req_ids = layout.req_ids
        prompt_logprobs = self._prompt_logprobs.compute(step.prompt_rows, model, step.all_hidden)
        sampled = self._sample(model, batch, step)
        outcome, on_host = batch.step.outcome(sampled.sampled_token_ids, sampled.failures)
        tells = self._stage.has_others and bool(sampling_requests(layout, self._requests))
        if tells:
            self._stage.send_outcome(step_id, outcome)
        if sampled.errors:
            errors = _by_request(sampled.errors, req_ids) | errors
        result: AsyncOutput | ReadyOutput
        if on_host is not None and on_host[1] is None and sampled.logprobs is None and prompt_logprobs is None:
            tokens = SampledOutput(step_id=step_id, req_ids=req_ids, sampled_token_ids=on_host[0], errors=errors)
            result = ReadyOutput(tokens)
        else:
            result = AsyncOutput(
                self._device,
                step_id=step_id,
                req_ids=req_ids,
                outcome=outcome,
                on_host=on_host,
                first_rows=layout.first_rows,
                logprobs=sampled.logprobs,
                prompt_logprobs=prompt_logprobs,
                errors=errors,
                processor_names=self._sampler.processor_names,
                rank=self._rank,
            )
        batch.step.advance(outcome)
        self._sampler.advance(layout.slots, layout.slots_np, outcome)
        self._draft(step_id, step, outcome, is_told=tells)
        return result

    def begin(self, output: SchedulerOutput) -> None:
        self._stage.begin(output.step_id)
        for step_id, outcome in self._unfinished.finish_for(output, self._lanes.current):
            self._draft(step_id, self._pending.pop(step_id), outcome)

    def expect(self, num_tokens: int) -> None:
        self._stage.expect_hidden(num_tokens)

    def catch_up(self) -> None:
        for step_id, outcome in self._unfinished.finish():
            self._draft(step_id, self._pending.pop(step_id), outcome)

    def _draft(self, step_id: int, step: PendingStep, outcome: StepOutcome, *, is_told: bool = True) -> None:
        """is_told: whether other stages learn of the step's outcome."""
        batch, context, inputs = step.batch, step.context, step.inputs
        assert batch is not None, "a step that ran has its inputs"
        assert context is not None, "a step that ran has its context"
        assert inputs is not None, "a step that ran has its inputs"
        self._speculator.propose(
            DraftingStep(batch, context, inputs, outcome, step.num_drafts, step.all_hidden, step.aux)
        )
        if is_told and step.num_drafts and self._speculator.drafts_for_all_stages:
            self._stage.share_drafts(step_id, self._requests.draft_token_ids.tensor, batch.layout.slots)

    def _sample(self, model: LanguageModel, batch: InputBatch, step: PendingStep) -> SamplerOutput:
        chosen, hidden = step.chosen, step.hidden
        if hidden is not None and self._sampler.is_plain_greedy(batch.logits_rows):
            chosen = model.compute_greedy(hidden)
        if chosen is not None:
            return SamplerOutput(*chosen, None, {})
        assert hidden is not None, "a step has its tokens, or what they are chosen from"
        return self._sampler.sample(model.compute_logits(hidden), batch.logits_rows)


def _by_request(errors: Mapping[int, str], req_ids: Sequence[str]) -> dict[str, str]:
    return {req_ids[row]: error for row, error in errors.items()}
