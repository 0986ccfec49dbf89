"""Acceptance rules of drafts, chosen by `rejection_sample_method`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.config import SpeculativeConfig
from penstock.device import Device
from penstock.kernels.rejection import choose_by_rate, choose_by_rejection
from penstock.kernels.sampling import ChosenTokens
from penstock.step.logits_rows import LogitsRows


class Verification:
    """Exact rule: accepts a draft if it equals the sampled token. Tokens never change.

    judges_greedy: the rule changes tokens of greedy requests too. goes_by_probs: the rule needs the draft's
    distributions. keeps_what_cannot_be: it may accept a draft that the request's parameters forbid.
    """

    judges_greedy = False
    goes_by_probs = False
    keeps_what_cannot_be = False

    def bind(self, draft_token_ids: Tensor, draft_probs: Tensor | None) -> None:
        """Set the drafts: draft_token_ids: int32 [slots, drafts], verified by the step.

        draft_probs: float32 [slots, drafts, vocabulary], distributions of the drafts; None where they are not kept.
        """

    def choose(
        self, drawn: ChosenTokens, logits: Tensor, rows: LogitsRows, seeds: Tensor, is_greedy_np: np.ndarray
    ) -> ChosenTokens:
        """Return the token of each row of a step with drafts; drafts equal to it are accepted.

        logits: float32 [rows, vocabulary], as sampled from. seeds: int64 [slots]. is_greedy_np: bool [rows].
        """
        return drawn


EXACT = Verification()


class _OfDrafts(Verification):
    """Base of the rules that change tokens of rows with a draft after them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._draft_token_ids: Tensor
        self._draft_probs: Tensor | None

    def bind(self, draft_token_ids: Tensor, draft_probs: Tensor | None) -> None:
        self._draft_token_ids, self._draft_probs = draft_token_ids, draft_probs

    def _drafts_at(self, rows: LogitsRows, which_np: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return these rows' indices, the draft after each (-1 for none), and its number."""
        assert rows.drafts is not None
        which = self._device.upload(which_np)
        numbers = rows.drafts.numbers.index_select(0, which)
        drafts = self._draft_token_ids[rows.slots.index_select(0, which), numbers].to(torch.int64)
        return which, drafts, numbers


class StandardVerification(_OfDrafts):
    """Rejection sampling: keeps the output distribution, but not the sampled tokens themselves."""

    goes_by_probs = True

    def choose(
        self, drawn: ChosenTokens, logits: Tensor, rows: LogitsRows, seeds: Tensor, is_greedy_np: np.ndarray
    ) -> ChosenTokens:
        # A greedy row is a distribution with one token of probability 1 already.
        which_np = np.flatnonzero(_has_draft(rows) & ~is_greedy_np)
        if not len(which_np):
            return drawn
        which, drafts, numbers = self._drafts_at(rows, which_np)
        slots, probs = rows.slots.index_select(0, which), self._draft_probs
        chosen = choose_by_rejection(
            logits.index_select(0, which),
            drafts.clamp(min=0),
            None if probs is None else probs[slots, numbers],
            seeds,
            slots,
            rows.positions.index_select(0, which),
        )
        is_draft = drafts >= 0
        pairs = zip(chosen, (part.index_select(0, which) for part in drawn), strict=True)
        kept = [torch.where(is_draft, new, old) for new, old in pairs]
        return ChosenTokens(*(old.index_copy(0, which, new) for old, new in zip(drawn, kept, strict=True)))


class SyntheticVerification(_OfDrafts):
    """Synthetic acceptance for load tests. rates: share of steps that accept the first draft, the second, …"""

    judges_greedy = True
    keeps_what_cannot_be = True

    def __init__(self, device: Device, rates: Sequence[float]) -> None:
        super().__init__(device)
        before = [1.0, *rates[:-1]]
        # Conditional on the acceptance of the drafts before.
        conditional = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=True)]
        self._rates = device.upload(np.array(conditional, dtype=np.float64))

    def choose(
        self, drawn: ChosenTokens, logits: Tensor, rows: LogitsRows, seeds: Tensor, is_greedy_np: np.ndarray
    ) -> ChosenTokens:
        which_np = np.flatnonzero(_has_draft(rows))
        if not len(which_np):
            return drawn
        which, drafts, numbers = self._drafts_at(rows, which_np)
        tokens = choose_by_rate(
            drawn.token_ids_R.index_select(0, which),
            drafts.clamp(min=0),
            self._rates.index_select(0, numbers),
            seeds.index_select(0, rows.slots.index_select(0, which)),
            rows.positions.index_select(0, which),
            logits.shape[1],
        )
        return ChosenTokens(drawn.token_ids_R.index_copy(0, which, tokens), drawn.has_failed_R)


def create_verification(config: SpeculativeConfig, device: Device) -> Verification:
    """Create the configured acceptance rule."""
    if config.rejection_sample_method == "standard":
        return StandardVerification(device)
    if config.rejection_sample_method == "synthetic":
        return SyntheticVerification(device, synthetic_rates(config))
    return EXACT


def synthetic_rates(config: SpeculativeConfig) -> list[float]:
    """Acceptance rate of each draft number: as configured, or powers that give the configured mean length."""
    most, length = config.num_speculative_tokens, config.synthetic_acceptance_length
    if length is None:
        return [float(rate) for rate in config.synthetic_acceptance_rates or ()]
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (low, rate) if sum(rate**number for number in range(most + 1)) > length else (rate, high)
    return [high**number for number in range(1, most + 1)]


def _has_draft(rows: LogitsRows) -> np.ndarray:
    """Whether the next row is the one after a draft of the same request, bool [rows]."""
    assert rows.drafts is not None
    return np.append(rows.drafts.numbers_np[1:] > 0, False)
