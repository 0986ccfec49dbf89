"""What a step may skip, decided in one place: to be put together anew, and to run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import SchedulerOutput
from penstock.kernels.native.program_step import BoundChoices
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.poisoned_blocks import PoisonedBlocks
from penstock.runner.request_lifecycle import RequestLifecycle
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler


class PlainPath:
    """Every step as if nothing were known of the one before, layer by layer; what the fast paths must equal."""

    def repeat(self, output: SchedulerOutput) -> tuple[InputBatch, ForwardContext] | None:
        """The decision: the inputs of a step that asks for what the step before asked for, if that is still there.

        None for a step that must be put together anew.
        """
        return None

    def has_kept(self, step_id: int | None) -> bool:
        """Whether it can repeat this step."""
        return False

    def keep(self, output: SchedulerOutput, batch: InputBatch, context: ForwardContext) -> None:
        """Take note of a step that was put together whole: all that was asked for is in it."""

    def forget(self) -> None:
        """Let go of the step before: what comes next does not repeat it."""

    def unbind(self) -> None:
        """The model, or its weights, may be others from now on; the step before is kept."""

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Hidden states of these inputs, or of those that the context asks for."""
        return inputs.run(model, context)

    def choose(
        self, model: LanguageModel, inputs: ModelInputs, states_before: Sequence[int] | None
    ) -> tuple[ChosenTokens, Sequence[Tensor]] | None:
        """The tokens of the step that `repeat` gave, in one call; None where that cannot be, or logits are wanted.

        states_before: given, the same in every step, where the hidden states are wanted too, which then come first, and
        those before these layers. The next step overwrites all of it.
        """
        return None


class FastPaths(PlainPath):
    """Keeps what was made of a step in which every request had one token, for as long as the scheduler says so.

    `SchedulerOutput.repeats_step_id` is the scheduler's word that a step asks for the same as another; the runner takes
    it where that is the very step that its lane executed last, whole. All else follows: the layout and the bound step
    stay, the attention metadata where its backend says that it keeps, and the model bound to both from tokens to
    tokens, where nothing but each request's largest logit is wanted.
    """

    def __init__(
        self,
        requests: RequestStates,
        lifecycle: RequestLifecycle,
        poisoned_blocks: PoisonedBlocks,
        batcher: BatchBuilder,
        kv_cache: PagedKVCache,
        sampler: Sampler,
    ) -> None:
        self._requests = requests
        self._lifecycle = lifecycle
        self._poisoned_blocks = poisoned_blocks
        self._batcher = batcher
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._kept_step_id: int | None = None
        self._batch: InputBatch | None = None
        self._context: ForwardContext
        self._is_bound = False
        self._bound: BoundChoices | None = None

    def repeat(self, output: SchedulerOutput) -> tuple[InputBatch, ForwardContext] | None:
        if not self.has_kept(output.repeats_step_id):
            return None
        cached = output.scheduled_cached_reqs
        if not cached.new_block_ids:
            self._requests.note_computed(cached)
        else:
            errors = self._lifecycle.apply(output)
            assert not errors, "these requests were here a step ago"
            self._poisoned_blocks.clear(output)
        batch = self._batcher.build_again()
        if batch is not self._batch or not self._kv_cache.keeps_metadata:
            self._batch, self._context = batch, self._kv_cache.make_context(batch)
            self._is_bound = False
        self._kept_step_id = output.step_id
        return batch, self._context

    def has_kept(self, step_id: int | None) -> bool:
        return step_id is not None and step_id == self._kept_step_id

    def keep(self, output: SchedulerOutput, batch: InputBatch, context: ForwardContext) -> None:
        if batch.layout.is_all_decodes:
            self._kept_step_id, self._batch, self._context = output.step_id, batch, context

    def forget(self) -> None:
        self._kept_step_id = self._batch = None
        self.unbind()

    def unbind(self) -> None:
        self._is_bound, self._bound = False, None

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self._kv_cache.programs.run(model, inputs, context)

    def choose(
        self, model: LanguageModel, inputs: ModelInputs, states_before: Sequence[int] | None
    ) -> tuple[ChosenTokens, Sequence[Tensor]] | None:
        if not self._is_bound:
            self._is_bound, self._bound = True, self._bind(model, inputs, states_before)
        bound = self._bound
        return None if bound is None else (bound.run(), bound.states)

    def _bind(
        self, model: LanguageModel, inputs: ModelInputs, states_before: Sequence[int] | None
    ) -> BoundChoices | None:
        batch = self._batch
        assert batch is not None, "a repeated step has its inputs"
        has_padding = not batch.layout.has_one_token_each
        if has_padding or not self._sampler.is_plain_greedy(batch.logits_rows):
            return None
        return self._kv_cache.programs.bind_greedy(model, inputs, self._context, states_before)
