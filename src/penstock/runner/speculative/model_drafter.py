"""Base of model-based speculators: a separate draft model, or a head on the target's hidden states.

The drafter's layers have pages in the target's blocks. After each step it reads the step's known tokens in one forward
pass, and then decodes drafts one by one. KV of rejected drafts is overwritten once the right tokens are known. The
host never waits for the device.

Suffixes: T tokens, R requests of the step, D hidden size, K drafts, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT, CacheLayer, ForwardContext, StepGeometry
from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds, NewRequestData
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.kernels.step_state import PAD_SLOT_ID, compute_slot_mapping
from penstock.models.attention_layers import cache_layers
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import choose_greedy
from penstock.runner.block_tables import BlockTables
from penstock.runner.execute.execution import DRAFTER_PREFILL, Execution
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.speculative.draft_graphs import DraftGraphs, DraftInputs
from penstock.runner.speculative.speculator import Speculator, SpeculatorServices, on_host
from penstock.runner.staging import SlotParameter
from penstock.step.batch import BatchLayout
from penstock.step.frame import Frame
from penstock.step.logits_rows import LogitsRows

# Maximum number of tokens, of all requests together, that a drafter postpones.
MOST_WAITING = 256


class ModelDrafter(Speculator):
    """While no drafts are wanted, a few tokens of decoding requests are postponed and read together later.

    reads_ahead: distance between the position of a token and the position that the drafter reads it at.
    """

    reads_ahead: int
    drafts_for_all_stages = True

    def __init__(self, model: CausalLM, config: SpeculativeConfig, vocab_size: int, device: Device) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._vocab_size = vocab_size
        self.model = model
        self.device = device
        self.requests: RequestStates
        self.kv_cache: PagedKVCache
        self.execution: Execution
        self._block_tables: BlockTables
        self._sampler: Sampler
        # Maximum length of each request: no blocks are allocated beyond it.
        self._length_limit: SlotParameter
        self._proposed: tuple[list[str], Tensor] | None = None

    def bind(self, services: SpeculatorServices) -> None:
        self.requests, self._block_tables, self.kv_cache, self._sampler, self.execution, size_for = services
        requests = self.requests
        self._max_model_len = requests.all_token_ids.tensor.shape[1] - 1
        self._length_limit = SlotParameter(self.device, requests.max_num_reqs + 1, np.int64, 1)
        # 0, 1, 2, …: batch indices of a step's requests are a slice of it.
        self._numbers = self.device.upload(np.arange(requests.max_num_reqs + 1))
        self._starts = self._numbers.int()
        self._graphs = DraftGraphs(
            self.execution, size_for, self.model, self._block_tables, self._numbers, self.run, self._context
        )
        self._proposed = None
        self.draft_probs = None
        if self.verification.goes_by_probs:
            sizes = requests.max_num_reqs + 1, self.num_speculative_tokens, self._vocab_size
            self.draft_probs = self.device.allocate(4 * math.prod(sizes)).view(torch.float32).view(sizes)

    def add(self, slot: int, request: NewRequestData) -> None:
        longest, max_tokens = self._max_model_len, request.sampling_params.max_tokens
        wanted = longest if max_tokens is None else len(request.prompt_token_ids) + max_tokens
        self._length_limit.set(slot, min(wanted, longest))

    def cache_layers(self) -> Mapping[str, CacheLayer]:
        return cache_layers(self.model)

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        layout, num_drafts = frame.batch.layout, frame.num_drafts
        if not num_drafts and self.lets_wait(frame):
            self._proposed = None
            return
        last_R = self.requests.num_computed_tokens.tensor.view(-1).index_select(0, layout.slots)
        hidden_RD = self.execution.compute(lambda: self.take_in(frame, outcome, last_R), DRAFTER_PREFILL)
        if not num_drafts:
            self._proposed = None
            return
        drafts_RK = torch.stack([*self._guess(layout, hidden_RD, last_R, num_drafts)], dim=1)
        has_sampled_R1 = outcome.num_sampled.unsqueeze(-1) > 0
        drafts_RK = torch.where(has_sampled_R1, drafts_RK, NO_DRAFT).to(torch.int32)
        table_SK = self.requests.draft_token_ids.tensor
        if num_drafts < table_SK.shape[1]:
            table_SK.index_fill_(0, layout.slots, NO_DRAFT)
        table_SK[:, :num_drafts].index_copy_(0, layout.slots, drafts_RK)
        self._proposed = layout.req_ids, drafts_RK

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return None if proposed is None else on_host(*proposed)

    def dummy(self, frame: Frame) -> None:
        positions_T = self._numbers[:1]
        hidden_TD = self.run_all(self._context(list(self._padding())), positions_T)
        self.execution.compute(partial(self.model.compute_logits, hidden_TD, NO_CONTEXT))

    def run_prompt(self, context: ForwardContext, positions: Tensor) -> None:
        self.run_all(context, positions)

    @abstractmethod
    def lets_wait(self, frame: Frame) -> bool:
        """Postpone the tokens of a step after which no drafts are wanted; False where they must be read now."""

    @abstractmethod
    def take_in(self, frame: Frame, outcome: StepOutcome, last_R: Tensor) -> Tensor:
        """Read a step's tokens. Returns the hidden states [R, D] of the first draft of each request.

        last_R: int64, position of each request's last known token, up to which the drafter's KV is computed now.
        """

    @abstractmethod
    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        """Run the draft model. hidden_TD: hidden states of the positions before, for a head that takes them."""

    @abstractmethod
    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        """Run the forward pass of `take_in` at these positions, for tokens of no request."""

    def _guess(self, layout: BatchLayout, hidden_RD: Tensor, last_R: Tensor, num_drafts: int) -> Iterator[Tensor]:
        """Yield the draft tokens: int64 [R] each."""
        token_R = self._choose(hidden_RD, layout, last_R, 0)
        yield token_R
        if num_drafts == 1:
            return
        limit_R = self._length_limit.tensor.index_select(0, layout.slots)
        if (size := self._graphs.size_for(len(layout.req_ids))) is not None:
            tables = self.tables_of(layout.slots)
            self._graphs.begin(DraftInputs(token_R, last_R - self.reads_ahead, limit_R, hidden_RD, tables), size)
            yield from self._guess_by_graphs(layout, last_R, num_drafts, size)
            return
        ahead_K1 = torch.arange(1, num_drafts, device=self.device.torch_device).unsqueeze(-1)
        # No blocks are allocated beyond a request's end: drafts there are clamped to the last position and never used.
        positions_KR = torch.minimum(last_R - self.reads_ahead + ahead_K1, limit_R - 1)
        contexts = map(self._context, self._single_tokens(layout, positions_KR))
        for number, (positions_R, context) in enumerate(zip(positions_KR, contexts, strict=True), start=1):
            hidden_RD = self.run(token_R.to(torch.int32), positions_R, context, hidden_RD)
            token_R = self._choose(hidden_RD, layout, last_R + number, number)
            yield token_R

    def _guess_by_graphs(self, layout: BatchLayout, last_R: Tensor, num_drafts: int, size: int) -> Iterator[Tensor]:
        """Yield the drafts after the first one. size: padded number of requests."""
        num_reqs = len(layout.req_ids)
        if self.draft_probs is None and self._sampler.is_all_greedy(LogitsRows(layout.slots, layout.slots_np, last_R)):
            yield from (token_R[:num_reqs] for token_R in self._graphs.greedy(size, num_drafts - 1))
            return
        token_R = None
        for number in range(1, num_drafts):
            hidden_RD = self._graphs.step(size, token_R)
            token_R = self._choose(hidden_RD[:num_reqs], layout, last_R + number, number)
            yield token_R

    def _choose(self, hidden_RD: Tensor, layout: BatchLayout, positions_R: Tensor, number: int) -> Tensor:
        """Choose the token after these positions: int64 [R]. number: index of the draft."""
        rows = LogitsRows(layout.slots, layout.slots_np, positions_R)
        if self._sampler.is_all_greedy(rows):
            return self.execution.compute(partial(choose_greedy, self.model, hidden_RD, NO_CONTEXT)).token_ids_R
        logits_RV = self.execution.compute(partial(self.model.compute_logits, hidden_RD, NO_CONTEXT))
        if self.draft_probs is None:
            return self._sampler.guess(logits_RV, rows)
        probs_RV = torch.empty_like(logits_RV)
        token_R = self._sampler.guess(logits_RV, rows, probs_RV)
        self.draft_probs[:, number].index_copy_(0, layout.slots, probs_RV)
        return token_R

    def _single_tokens(self, layout: BatchLayout, positions_KR: Tensor) -> Iterator[list[StepGeometry]]:
        """Yield, for each draft, the geometry of a step with one token per request, by KV-cache group."""
        num_reqs = len(layout.req_ids)
        starts_np = np.arange(num_reqs + 1)
        tables = self.tables_of(layout.slots)
        seq_lens_KR = (positions_KR + 1).to(torch.int32)
        numbers_R = self._numbers[:num_reqs]
        for positions_R, seq_lens_R in zip(positions_KR, seq_lens_KR, strict=True):
            yield [
                StepGeometry(
                    query_start_loc=self._starts[: num_reqs + 1],
                    query_start_loc_np=starts_np,
                    seq_lens=seq_lens_R,
                    block_table=table_RB,
                    slot_mapping=compute_slot_mapping(
                        table_RB, numbers_R, numbers_R, positions_R, block_size, num_reqs
                    ),
                    num_actual_tokens=num_reqs,
                    num_actual_reqs=num_reqs,
                    max_query_len=1,
                    max_seq_len_upper_bound=table_RB.shape[1] * block_size,
                    block_size=block_size,
                )
                for table_RB, block_size in zip(tables, self._block_tables.block_sizes, strict=True)
            ]

    def ragged(
        self,
        slots_R: Tensor,
        starts_np: np.ndarray,
        starts_R: Tensor,
        request_of_T: Tensor,
        positions_T: Tensor,
    ) -> ForwardContext:
        """Build a forward context with ascending positions of each request, narrowed to each one's last token.

        starts_np, starts_R: [R + 1], start of each request's tokens, and the total. request_of_T: batch index of each
        token.
        """
        num_reqs, num_tokens = len(starts_np) - 1, int(starts_np[-1])
        rows_R = starts_R[1:] - 1
        last_R = positions_T.index_select(0, rows_R)
        seq_lens_R, starts_R = (last_R + 1).to(torch.int32), starts_R.to(torch.int32)
        geometry = [
            StepGeometry(
                query_start_loc=starts_R,
                query_start_loc_np=starts_np,
                seq_lens=seq_lens_R,
                block_table=table_RB,
                slot_mapping=compute_slot_mapping(
                    table_RB, self._numbers[:num_reqs], request_of_T, positions_T, block_size, num_tokens
                ),
                num_actual_tokens=num_tokens,
                num_actual_reqs=num_reqs,
                max_query_len=int(np.diff(starts_np).max()),
                max_seq_len_upper_bound=table_RB.shape[1] * block_size,
                block_size=block_size,
            )
            for table_RB, block_size in zip(self.tables_of(slots_R), self._block_tables.block_sizes, strict=True)
        ]
        of_last = [of_group.of_last_tokens(rows_R) for of_group in geometry]
        return self.kv_cache.narrow(self._context(geometry), of_last[0], of_last, rows_R, last_R)

    def tokens_at(self, slots_T: Tensor, positions_T: Tensor) -> Tensor:
        """Known tokens of these slots at these positions, int32 [T]."""
        token_ids_SL = self.requests.all_token_ids.tensor
        return token_ids_SL.view(-1).index_select(0, slots_T * token_ids_SL.shape[1] + positions_T)

    def tables_of(self, slots_R: Tensor) -> list[Tensor]:
        """Block table rows of these slots, by KV-cache group."""
        tables = self._block_tables
        return [tables.table(group).index_select(0, slots_R) for group in range(len(tables.block_sizes))]

    def _context(self, geometry: list[StepGeometry]) -> ForwardContext:
        return self.kv_cache.context(geometry[0], geometry)

    def _padding(self) -> Iterator[StepGeometry]:
        """Yield the geometry of one padding token, by KV-cache group."""
        zeros = self._starts[:1] * 0
        for block_size in self._block_tables.block_sizes:
            yield StepGeometry(
                query_start_loc=self._starts[:2] * 0,
                query_start_loc_np=np.zeros(2, dtype=np.int64),
                seq_lens=zeros,
                block_table=zeros.unsqueeze(0),
                slot_mapping=self._numbers[:1] + PAD_SLOT_ID,
                num_actual_tokens=0,
                num_actual_reqs=0,
                max_query_len=0,
                max_seq_len_upper_bound=0,
                block_size=block_size,
            )
