"""Steps that go from tokens to tokens in one call, where nothing but each request's largest logit is wanted."""

from __future__ import annotations

from penstock.attention import ForwardContext
from penstock.kernels.native.program_step import BoundChoices
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel
from penstock.models.program import ModelPrograms
from penstock.runner.input_batch import InputBatch
from penstock.runner.sampling.sampler import Sampler


class GreedySteps:
    """Binds the model to a batch that repeats, and runs it again for as long as the batch and its context stay."""

    def __init__(self, sampler: Sampler, programs: ModelPrograms) -> None:
        self._sampler = sampler
        self._programs = programs
        self._context: ForwardContext | None = None
        self._bound: BoundChoices | None = None

    def run(self, model: LanguageModel, batch: InputBatch, context: ForwardContext) -> ChosenTokens | None:
        """The tokens of a repeated step; None where logits are wanted, or the model needs more than one call.

        While the context is the same, so are the requests, and what they want.
        """
        if context is not self._context:
            self.forget()
            self._context, self._bound = context, self._bind(model, batch, context)
        return None if self._bound is None else self._bound.run()

    def forget(self) -> None:
        """Let go of the batch, and of the memory that its steps work in."""
        self._context = self._bound = None

    def _bind(self, model: LanguageModel, batch: InputBatch, context: ForwardContext) -> BoundChoices | None:
        has_padding = batch.input_ids.shape[0] != len(batch.layout.req_ids)
        if has_padding or not self._sampler.is_plain_greedy(batch.logits_rows):
            return None
        return self._programs.bind_greedy(model, batch.input_ids, batch.positions, context)
