"""What a speculator is: after each step it guesses how requests go on, and the next step verifies that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.attention import CacheLayer, ForwardContext
from penstock.contract import DraftTokenIds, SamplingParams
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.models.interface import ModelInputs
from penstock.runner.block_tables import BlockTables
from penstock.runner.input_batch import InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.sampling.verification import EXACT, Verification


class DraftingStep(NamedTuple):
    """A step that was sampled, as its speculator sees it. The next step overwrites the tensors.

    num_drafts: wanted for each request, at most; with 0 a speculator makes none, but takes note of the step's tokens.
    context: of the step's forward pass. hidden: [tokens, hidden size] of all tokens of the step, for speculators that
    need it. aux: the same before each of its `aux_layers`. outcome: what was sampled, by which the state has advanced.
    """

    batch: InputBatch
    context: ForwardContext
    inputs: ModelInputs
    outcome: StepOutcome
    num_drafts: int
    hidden: Tensor | None = None
    aux: Sequence[Tensor] = ()


class Speculator(ABC):
    """An owner of state per slot. Its drafts lie in the runner's `draft_token_ids`, where the next step reads them.

    num_speculative_tokens: drafts of a request in a step, at most.
    verification: when its drafts are kept. draft_probs: float32 [slots, drafts, vocabulary], the distributions that
        drafts were drawn from, for the rule that goes by them; None where they are not kept.
    drafts_for_all_stages: of a pipeline, the last one tells the others its drafts; else each stage makes the same ones.
    needs_hidden: whether `propose` needs the hidden states of all tokens of each step. aux_layers: and those before
        these layers of the target.
    """

    num_speculative_tokens: int = 0
    verification: Verification = EXACT
    draft_probs: Tensor | None = None
    drafts_for_all_stages: bool = False
    needs_hidden: bool = False
    aux_layers: tuple[int, ...] = ()

    def bind(  # noqa: B027 - a speculator may have everything it needs
        self, requests: RequestStates, block_tables: BlockTables, kv_cache: PagedKVCache, sampler: Sampler
    ) -> None:
        """Belong to the runner that has these; whatever was kept for another one is forgotten."""

    def add_request(  # noqa: B027 - most keep nothing of a request
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Take over a request; whatever the slot held before is overwritten.

        output_token_ids: what it generated before it was preempted; else empty.
        """

    def remove_request(self, slot: int) -> None:  # noqa: B027
        """The slot's request is gone; the next one may come at once."""

    @abstractmethod
    def propose(self, step: DraftingStep) -> None:
        """Write each request's drafts into its row of `RequestStates.draft_token_ids` on the device, without waiting.

        -1 where there is none, and behind it. Only requests that have sampled in the step go on.
        """

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What it has proposed after the last step, once, copied to the host, which may wait for the device.

        A request has as many as there really are.
        """

    @abstractmethod
    def dummy_run(self) -> None:
        """Run what `propose` runs, for no request: to warm up, to measure memory, and on ranks that are idle."""

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        """By how many tokens its forward pass may be longer than a step."""
        return 0

    def run_prompt(  # noqa: B027 - most have no model
        self, context: ForwardContext, positions: Tensor
    ) -> None:
        """Run what `propose` runs for one prompt at these positions, int64, to see what it takes.

        Nothing but the weights has to have values.
        """

    def cache_layers(self) -> Mapping[str, CacheLayer]:
        """Its own layers that keep something in the KV cache, by name; the names begin with "draft."."""
        return {}


def on_host(req_ids: Sequence[str], drafts_RK: Tensor) -> DraftTokenIds:
    """The drafts of these requests, of those that have some. It waits for the device."""
    found = {req_id: row for req_id, row in zip(req_ids, drafts_RK.tolist(), strict=True) if row[0] != NO_DRAFT}
    return DraftTokenIds(req_ids=list(found), draft_token_ids=list(found.values()))


class NoSpeculator(Speculator):
    """Nobody guesses anything."""

    def propose(self, step: DraftingStep) -> None:
        return

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None

    def dummy_run(self) -> None:
        return


NO_SPECULATOR = NoSpeculator()
