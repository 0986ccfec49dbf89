"""Interface of speculators: they propose draft tokens after each step, and the next step verifies them."""

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
    """Parts of a runner that its speculator uses. executable: runs the drafter's forward passes."""

    requests: RequestStates
    block_tables: BlockTables
    kv_cache: PagedKVCache
    sampler: Sampler
    executable: ForwardExecutable


class Speculator(SlotOwner):
    """An owner of per-slot state, which writes draft tokens to the runner's `draft_token_ids`.

    num_speculative_tokens: maximum drafts of a request in a step.
    verification: acceptance rule. draft_probs: float32 [slots, drafts, vocabulary], distributions that the drafts were
        drawn from, for a rule that needs them; None where they are not kept.
    drafts_for_all_stages: the last pipeline stage sends its drafts to the others; if not, every stage makes the same.
    needs_hidden: `propose` needs the hidden states of all tokens of each step. aux_layers: and the inputs of these
    layers
        of the target.
    """

    num_speculative_tokens: int = 0
    verification: Verification = EXACT
    draft_probs: Tensor | None = None
    drafts_for_all_stages: bool = False
    needs_hidden: bool = False
    aux_layers: tuple[int, ...] = ()

    def bind(self, parts: RunnerParts) -> None:
        """Attach to a runner; state of an earlier one is dropped."""

    @abstractmethod
    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        """Write each request's drafts to its row of `RequestStates.draft_token_ids` on the device, without waiting.

        At most `frame.num_drafts` each, padded with -1; with 0 only the step's tokens are read. Only requests that have
        sampled in the step get drafts. The state has advanced by the outcome.
        """

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self.propose(frame, outcome)

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts proposed after the last step, once, on the host; may wait for the device.

        Without the padding.
        """

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        """Maximum number of tokens by which the drafter's forward pass exceeds the step's."""
        return 0

    def run_prompt(self, context: ForwardContext, positions: Tensor) -> None:
        """Run the forward pass of `propose` for one prompt at these positions, int64, to measure its memory.

        Only weights need values.
        """

    def cache_layers(self) -> Mapping[str, CacheLayer]:
        """The drafter's own layers with a KV cache, by name; names begin with "draft."."""
        return {}


def on_host(req_ids: Sequence[str], drafts_RK: Tensor) -> DraftTokenIds:
    """Copy the drafts of these requests to the host, without requests that have none. Waits for the device."""
    found = {req_id: row for req_id, row in zip(req_ids, drafts_RK.tolist(), strict=True) if row[0] != NO_DRAFT}
    return DraftTokenIds(req_ids=list(found), draft_token_ids=list(found.values()))


class NoSpeculator(Speculator):
    """Speculative decoding off."""

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        return

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None


NO_SPECULATOR = NoSpeculator()
