"""Speculators: after each step they guess how requests go on, and the next step verifies that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.attention import CacheLayer, ForwardContext
from penstock.contract import DraftTokenIds
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.runner.block_tables import BlockTables
from penstock.runner.executables import ForwardExecutable
from penstock.runner.frame import Frame
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.sampling.verification import EXACT, Verification
from penstock.runner.slot_owners import SlotOwner


class RunnerParts(NamedTuple):
    """The parts of a runner that its speculator drafts with. executable: runs the forward passes of a drafter."""

    requests: RequestStates
    block_tables: BlockTables
    kv_cache: PagedKVCache
    sampler: Sampler
    executable: ForwardExecutable


class Speculator(SlotOwner):
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

    def bind(self, parts: RunnerParts) -> None:
        """Belong to the runner that has these; whatever was kept for another one is forgotten."""

    @abstractmethod
    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        """Write each request's drafts into its row of `RequestStates.draft_token_ids` on the device, without waiting.

        At most `frame.num_drafts` for each request; with 0 it makes none, but takes note of the step's tokens. -1 where
        there is none, and behind it. Only requests that have sampled in the step go on. The state has advanced by the
        outcome.
        """

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self.propose(frame, outcome)

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that it has proposed after the last step, once, copied to the host, which may wait for the device.

        A request has as many as there really are.
        """

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        """By how many tokens its forward pass may be longer than a step."""
        return 0

    def run_prompt(self, context: ForwardContext, positions: Tensor) -> None:
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
    """No drafts."""

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        return

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None


NO_SPECULATOR = NoSpeculator()
