"""Drafts of a model: a smaller one of its own, or a head that goes on from the target's hidden states.

The drafter's layers have pages in the target's blocks. After each step it takes in what the step has settled, in one
forward pass, and then guesses token by token, each of which it reads back. What it wrote for guesses that turn out
wrong is overwritten when the right ones are known. Nothing waits for the device.

Suffixes: T tokens, R requests of the step, D hidden size, K drafts, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.attention import CacheLayer, ForwardContext, StepGeometry
from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds, SamplingParams
from penstock.device import Device
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.kernels.step_state import PAD_SLOT_ID, compute_slot_mapping
from penstock.models.attention_layers import cache_layers
from penstock.models.causal_lm import CausalLM
from penstock.models.draft_head import DraftHead
from penstock.models.interface import ModelInputs
from penstock.runner.batch_layout import BatchLayout
from penstock.runner.block_tables import BlockTables
from penstock.runner.input_batch import InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.speculative.speculator import DraftingStep, Speculator, on_host
from penstock.runner.staging import SlotParameter

# Tokens of all requests together, at most, that a draft model has still to read.
_MOST_WAITING = 256


class ModelDrafter(Speculator):
    """What both kinds have in common.

    reads_ahead: how many positions the token that is read at a position is ahead of it.
    """

    reads_ahead: int

    def __init__(self, model: CausalLM, config: SpeculativeConfig, vocab_size: int, device: Device) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._vocab_size = vocab_size
        self.model = model
        self.device = device
        self.requests: RequestStates
        self.kv_cache: PagedKVCache
        self._block_tables: BlockTables
        self._sampler: Sampler
        # Tokens at which each request ends: there are no blocks beyond.
        self._length_limit: SlotParameter
        self._proposed: tuple[list[str], Tensor] | None = None

    def bind(
        self, requests: RequestStates, block_tables: BlockTables, kv_cache: PagedKVCache, sampler: Sampler
    ) -> None:
        self.requests, self._block_tables, self.kv_cache, self._sampler = requests, block_tables, kv_cache, sampler
        self._max_model_len = requests.all_token_ids.tensor.shape[1] - 1
        self._length_limit = SlotParameter(self.device, requests.max_num_reqs + 1, np.int64, 1)
        # Requests of a step, counted: its first so many are those of any step.
        self._numbers = self.device.upload(np.arange(requests.max_num_reqs + 1))
        self._starts = self._numbers.int()
        self._proposed = None
        self.draft_probs = None
        if self.verification.goes_by_probs:
            sizes = requests.max_num_reqs + 1, self.num_speculative_tokens, self._vocab_size
            self.draft_probs = self.device.allocate(4 * math.prod(sizes)).view(torch.float32).view(sizes)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        longest = self._max_model_len
        wanted = longest if params.max_tokens is None else len(prompt_token_ids) + params.max_tokens
        self._length_limit.set(slot, min(wanted, longest))

    def cache_layers(self) -> Mapping[str, CacheLayer]:
        return cache_layers(self.model)

    def propose(self, step: DraftingStep) -> None:
        layout, num_drafts = step.batch.layout, step.num_drafts
        if not num_drafts and self.may_wait(layout):
            self._proposed = None
            return
        last_R = self.requests.num_computed_tokens.tensor.view(-1).index_select(0, layout.slots)
        hidden_RD = self.take_in(step, last_R)
        if not num_drafts:
            self._proposed = None
            return
        drafts_RK = torch.stack([*self._guess(layout, hidden_RD, last_R, num_drafts)], dim=1)
        has_sampled_R1 = step.outcome.num_sampled.unsqueeze(-1) > 0
        drafts_RK = torch.where(has_sampled_R1, drafts_RK, NO_DRAFT).to(torch.int32)
        table_SK = self.requests.draft_token_ids.tensor
        if num_drafts < table_SK.shape[1]:
            table_SK.index_fill_(0, layout.slots, NO_DRAFT)
        table_SK[:, :num_drafts].index_copy_(0, layout.slots, drafts_RK)
        self._proposed = layout.req_ids, drafts_RK

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return None if proposed is None else on_host(*proposed)

    def dummy_run(self) -> None:
        positions_T = self._numbers[:1]
        hidden_TD = self.run_all(self.kv_cache.context(list(self._padding())), positions_T)
        self.model.compute_logits(hidden_TD)

    def run_prompt(self, context: ForwardContext, positions: Tensor) -> None:
        self.run_all(context, positions)

    def may_wait(self, layout: BatchLayout) -> bool:
        """Whether a step after which nobody wants drafts can be taken in later."""
        return False

    @abstractmethod
    def take_in(self, step: DraftingStep, last_R: Tensor) -> Tensor:
        """Hidden states [R, D] that the first draft of each request is chosen from.

        last_R: int64, where each request's last known token is, to which all before are computed now.
        """

    @abstractmethod
    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        """The model's hidden states. hidden_TD: those of the positions before, for a model that goes on from them."""

    @abstractmethod
    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        """The forward pass of `take_in` at these positions, for nobody's tokens."""

    def _guess(self, layout: BatchLayout, hidden_RD: Tensor, last_R: Tensor, num_drafts: int) -> Iterator[Tensor]:
        """The drafts: int64 [R] each."""
        token_R = self._choose(hidden_RD, layout, last_R, 0)
        yield token_R
        if num_drafts == 1:
            return
        limit_R = self._length_limit.tensor.index_select(0, layout.slots)
        ahead_K1 = self._numbers_from(1, num_drafts).unsqueeze(-1)
        # Beyond its end a request has no blocks: what is guessed there is of no use, and harms nobody at the last one.
        positions_KR = torch.minimum(last_R - self.reads_ahead + ahead_K1, limit_R - 1)
        contexts = map(self.kv_cache.context, self._single_tokens(layout, positions_KR))
        for number, (positions_R, context) in enumerate(zip(positions_KR, contexts, strict=True), start=1):
            hidden_RD = self.run(token_R.to(torch.int32), positions_R, context, hidden_RD)
            token_R = self._choose(hidden_RD, layout, last_R + number, number)
            yield token_R

    def _choose(self, hidden_RD: Tensor, layout: BatchLayout, positions_R: Tensor, number: int) -> Tensor:
        """The token after these positions: int64 [R]. number: which draft it is."""
        rows = LogitsRows(layout.slots, layout.slots_np, positions_R)
        if self._sampler.is_all_greedy(rows):
            chosen = self.model.compute_greedy(hidden_RD)
            if chosen is not None:
                return chosen.token_ids_R
        logits_RV = self.model.compute_logits(hidden_RD)
        if self.draft_probs is None:
            return self._sampler.guess(logits_RV, rows)
        probs_RV = torch.empty_like(logits_RV)
        token_R = self._sampler.guess(logits_RV, rows, probs_RV)
        self.draft_probs[:, number].index_copy_(0, layout.slots, probs_RV)
        return token_R

    def _single_tokens(self, layout: BatchLayout, positions_KR: Tensor) -> Iterator[list[StepGeometry]]:
        """Where the tokens of steps lie in which each request has one, by KV-cache group."""
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

    def tables_of(self, slots_R: Tensor) -> list[Tensor]:
        """The requests' rows of the block tables, by KV-cache group."""
        tables = self._block_tables
        return [tables.table(group).index_select(0, slots_R) for group in range(len(tables.block_sizes))]

    def _numbers_from(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device.torch_device)

    def _padding(self) -> Iterator[StepGeometry]:
        """Where one token of padding lies, by KV-cache group: nowhere."""
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


class DraftModel(ModelDrafter):
    """A model of its own, with the target's vocabulary, which reads what the target has read.

    What it guessed right it has read already, but for the last of them; so it reads of each request as many tokens as
    were known before the step, and one more. While nobody wants drafts, it lets a few tokens of decoding requests wait
    and reads them together.
    """

    reads_ahead = 0

    def bind(
        self, requests: RequestStates, block_tables: BlockTables, kv_cache: PagedKVCache, sampler: Sampler
    ) -> None:
        super().bind(requests, block_tables, kv_cache, sampler)
        # By slot, tokens that wait.
        self._num_waiting = np.zeros(requests.max_num_reqs + 1, dtype=np.int64)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        super().add_request(slot, params, prompt_token_ids, output_token_ids)
        self._num_waiting[slot] = 0

    def remove_request(self, slot: int) -> None:
        self._num_waiting[slot] = 0

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        return max_num_reqs + _MOST_WAITING

    def may_wait(self, layout: BatchLayout) -> bool:
        counts = _num_known(layout)
        if counts.max() > 1 or self._num_waiting.sum() + len(counts) > _MOST_WAITING:
            return False
        self._num_waiting[layout.slots_np] += 1
        return True

    def take_in(self, step: DraftingStep, last_R: Tensor) -> Tensor:
        layout = step.batch.layout
        counts = _num_known(layout) + self._num_waiting[layout.slots_np] + 1
        self._num_waiting[layout.slots_np] = 0
        num_reqs, num_tokens = len(counts), int(counts.sum())
        starts = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        request_of = np.repeat(np.arange(num_reqs), counts)
        # From each request's last token backwards, so that none comes to lie behind its end.
        offsets = np.arange(num_tokens) - starts[1:][request_of] + 1
        parts = (starts, request_of, offsets, starts[1:] - 1)
        uploaded = self.device.upload(np.concatenate(parts)).split([len(part) for part in parts])
        starts_R, request_of_T, offsets_T, rows_R = uploaded
        last_R = torch.minimum(last_R, self._length_limit.tensor.index_select(0, layout.slots) - 1)
        positions_T = last_R.index_select(0, request_of_T) + offsets_T
        token_ids_SL = self.requests.all_token_ids.tensor
        cells_T = layout.slots.index_select(0, request_of_T) * token_ids_SL.shape[1] + positions_T
        ids_T = token_ids_SL.view(-1).index_select(0, cells_T)
        seq_lens_R, starts_R = (last_R + 1).to(torch.int32), starts_R.to(torch.int32)
        geometry = [
            StepGeometry(
                query_start_loc=starts_R,
                query_start_loc_np=starts,
                seq_lens=seq_lens_R,
                block_table=table_RB,
                slot_mapping=compute_slot_mapping(
                    table_RB, self._numbers[:num_reqs], request_of_T, positions_T, block_size, num_tokens
                ),
                num_actual_tokens=num_tokens,
                num_actual_reqs=num_reqs,
                max_query_len=int(counts.max()),
                max_seq_len_upper_bound=table_RB.shape[1] * block_size,
                block_size=block_size,
            )
            for table_RB, block_size in zip(self.tables_of(layout.slots), self._block_tables.block_sizes, strict=True)
        ]
        of_last = [of_group.of_last_tokens(rows_R) for of_group in geometry]
        context = self.kv_cache.narrow(self.kv_cache.context(geometry), of_last, rows_R, last_R)
        return self.kv_cache.programs.run(self.model, ModelInputs(ids_T, positions_T), context)

    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        return self.kv_cache.programs.run(self.model, ModelInputs(ids_T, positions_T), context)

    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        return self.run(positions_T.to(torch.int32) * 0, positions_T, context, positions_T)


def _num_known(layout: BatchLayout) -> np.ndarray:
    """int64 [R], tokens of each request in the step but for drafts."""
    return layout.counts_np if layout.num_drafts_np is None else layout.counts_np - layout.num_drafts_np


class DraftingHead(ModelDrafter):
    """A head on the target's hidden states, which reads at each position the token after it.

    It reads all of a step's tokens again, since what it went on from before was guessed. Where drafts were rejected it
    reads nonsense, which nobody asks for.
    """

    reads_ahead = 1
    needs_hidden = True

    def __init__(self, model: DraftHead, config: SpeculativeConfig, vocab_size: int, device: Device) -> None:
        super().__init__(model, config, vocab_size, device)
        self.head = model

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.head.aux_layers

    def take_in(self, step: DraftingStep, last_R: Tensor) -> Tensor:
        batch = step.batch
        assert step.hidden is not None, "it needs hidden states"
        hidden_TD = self.head.from_target(step.hidden, step.aux or ())
        # Of a step's last known token, the row; behind it are rejected drafts.
        rows_R = batch.layout.query_start_loc[1 : len(batch.layout.req_ids) + 1] - 1 - step.outcome.num_rejected
        positions_R = last_R - 1
        seq_lens_R = last_R.to(torch.int32)
        of_last = [replace(of_group.of_last_tokens(rows_R), seq_lens=seq_lens_R) for of_group in batch.geometry]
        whole = replace(step.context, last=None, taps=None)
        context = self.kv_cache.narrow(whole, of_last, rows_R, positions_R)
        return self.run(self._next_tokens(batch), batch.positions, context, hidden_TD)

    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        return self.kv_cache.programs.run(self.head, ModelInputs(ids_T, positions_T, hidden=hidden_TD), context)

    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        dtype = self.head.target.model.norm.weight.dtype
        shape = len(positions_T), self.head.target.config.hidden_size
        states = [torch.zeros(shape, dtype=dtype, device=positions_T.device) for _ in (0, *self.aux_layers)]
        hidden_TD = self.head.from_target(states[0], states[1:])
        return self.run(positions_T.to(torch.int32) * 0, positions_T, context, hidden_TD)

    def _next_tokens(self, batch: InputBatch) -> Tensor:
        """int32 [T], the token after each of the step's: of a prompt, or sampled."""
        tensors, token_ids_SL = batch.layout.tensors, self.requests.all_token_ids.tensor
        slots_T = tensors.idx_mapping_R.index_select(0, tensors.token_to_req_T)
        cells_T = slots_T * token_ids_SL.shape[1] + batch.positions + 1
        return token_ids_SL.view(-1).index_select(0, cells_T)
