"""Steps that go from tokens to tokens in one call, where nothing but each request's largest logit is wanted."""

from __future__ import annotations

from typing import NamedTuple

from penstock.attention import ForwardContext
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import BoundGreedy, LanguageModel
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.sampling.sampler import Sampler

# Steps are run at once for no longer than this, a frame of most screens, for who waits to be admitted, or for the next
# token. Between two calls the host needs a tenth of a millisecond, or two: a share worth sparing where steps are short.
_AT_ONCE_S = 0.016


class GreedyRun(NamedTuple):
    """chosen: the tokens of the last step. earlier: those of the steps before it, a list per request; None if there
    were none. The next run overwrites `chosen`."""

    chosen: ChosenTokens
    earlier: list[list[int]] | None


class GreedySteps:
    """Binds the model to a batch that repeats, and runs it again for as long as the batch and its context stay."""

    def __init__(self, sampler: Sampler, batcher: BatchBuilder) -> None:
        self._sampler = sampler
        self._batcher = batcher
        self._context: ForwardContext | None = None
        self._bound: BoundGreedy | None = None

    def run(
        self, model: LanguageModel, batch: InputBatch, context: ForwardContext, max_steps: int = 1
    ) -> GreedyRun | None:
        """The tokens of a repeated step; None where logits are wanted, or the model needs more than one call.

        While the context is the same, so are the requests, and what they want.
        max_steps: run it so often at most, as long as it is short; `GreedyRun.earlier` is recorded in the state.
        """
        if context is not self._context:
            self.forget()
            self._context, self._bound = context, self._bind(model, batch, context)
        bound = self._bound
        if bound is None:
            return None
        step = batch.step.addresses if max_steps > 1 else None
        max_steps = min(max_steps, 1 + self._batcher.room) if step is not None else 1
        if step is None or max_steps == 1:
            bound.run()
            return GreedyRun(bound.chosen, None)
        earlier = bound.run_steps(step, max_steps, _AT_ONCE_S)
        if earlier is not None:
            self._batcher.move_ahead(len(earlier[0]))
        return GreedyRun(bound.chosen, earlier)

    def forget(self) -> None:
        """Let go of the batch, and of the memory that its steps work in."""
        self._context = self._bound = None

    def _bind(self, model: LanguageModel, batch: InputBatch, context: ForwardContext) -> BoundGreedy | None:
        has_padding = batch.input_ids.shape[0] != len(batch.layout.req_ids)
        if has_padding or not self._sampler.is_plain_greedy(batch.logits_rows):
            return None
        return model.bind_greedy(batch.input_ids, batch.positions, context)
