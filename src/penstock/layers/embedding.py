"""Vocabulary embedding and output projection (LM head).

Suffixes: T tokens, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.embedding import embedding, rows_of_share
from penstock.kernels.native import NATIVE
from penstock.kernels.rows import sum_rows
from penstock.kernels.sampling import ChosenTokens, LargestLogits, largest_logits, merge_largest
from penstock.layers.adapters import EmbeddingAdapters
from penstock.layers.parallel_linear import ColumnParallelLinear, rows_of_rank
from penstock.layers.weights import RowLookup, WeightSlot, WidensWeight, new_parameter
from penstock.parallel import ParallelState, rows_of_vocabulary

# Step inputs of a step with embeddings that requests give, such as features of images: the embeddings, [T, D], zeros
# for other tokens; and token ids [T], int32, with the size of the vocabulary for tokens whose embedding is given.
GIVEN_EMBEDDINGS, TEXT_IDS = "given_embeddings", "text_ids"
# Step input: the row of a learned position table, int32 per token.
POSITION_IDS = "position_ids"


class VocabEmbedding(WidensWeight):
    """weight: [V, D], a row per token; empty while a tied output projection keeps it in another layout.

    takes_embeddings: whether given embeddings replace those of their tokens (`GIVEN_EMBEDDINGS`).
    scales_given: whether these are scaled as rows of the table are.

    vocab_size: over all ranks; rows are sharded, and all-reduced.
    compute_dtype: dtype of the output rows, where the weight has a narrower one. adapters: LoRA adapters; None without.
    """

    takes_embeddings = False
    scales_given = False
    adapters: EmbeddingAdapters | None = None

    def __init__(self, vocab_size: int, hidden_size: int, *, parallel: ParallelState) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._group = parallel.tensor
        self._share = rows_of_vocabulary(vocab_size, parallel.tensor)
        self.weight = new_parameter(self._share.size, hidden_size)
        self.lookup: RowLookup | None = None

    def forward(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """context: of the tokens."""
        given_TD = context.input(GIVEN_EMBEDDINGS) if self.takes_embeddings else None
        text_ids_T = None if given_TD is None else context.input(TEXT_IDS)
        if given_TD is None or text_ids_T is None:
            return self._embed(input_ids_T, context)
        if self.scales_given:
            given_TD = self._finished(given_TD.clone())
        if self.adapters is None:
            return sum_rows(self._finished(self.rows_or_zeros(text_ids_T)), given_TD)
        is_text_T1 = (text_ids_T < self.vocab_size).unsqueeze(-1)
        return torch.where(is_text_T1, self._embed(input_ids_T, context), given_TD)

    def _embed(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        rows_TD = self._rows(input_ids_T) if self._group.size == 1 else self._rows_of_all_ranks(input_ids_T)
        return self._finished(rows_TD if self.adapters is None else self.adapters.add_to(rows_TD, context))

    def _finished(self, rows_TD: Tensor) -> Tensor:
        """Rows of the table as embeddings; may change them in place."""
        return rows_TD

    def rows_or_zeros(self, input_ids_T: Tensor) -> Tensor:
        """Rows of the tokens, without adapters; zeros for ids beyond the vocabulary: [T, D]."""
        share = self._share
        rows_TD = rows_of_share(input_ids_T, share.start, share.size, self.vocab_size + 1, self._rows)
        return self._group.all_reduce(rows_TD)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": rows_of_rank(self.weight, self._share)}

    def loaded_weight(self) -> Tensor | None:
        """The weight as it was loaded, [V, D]; None where a tied output projection keeps it."""
        return self.weight if self.lookup is None else None

    def _rows_of_all_ranks(self, input_ids_T: Tensor) -> Tensor:
        share = self._share
        return self._group.all_reduce(rows_of_share(input_ids_T, share.start, share.size, share.whole, self._rows))

    def _rows(self, input_ids_T: Tensor) -> Tensor:
        weight = self.weight
        dtype = self.compute_dtype or weight.dtype
        if self.lookup is None:
            return embedding(input_ids_T, weight, dtype)
        if input_ids_T.dim() == 1:
            return self.lookup(input_ids_T).to(dtype)
        return self.lookup(input_ids_T.flatten()).view(*input_ids_T.shape, -1).to(dtype)


class ScaledVocabEmbedding(VocabEmbedding):
    """An embedding whose rows are multiplied by `scale`, rounded to their dtype first; given ones are not."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float, parallel: ParallelState) -> None:
        super().__init__(vocab_size, hidden_size, parallel=parallel)
        self.scale = scale

    def _finished(self, rows_TD: Tensor) -> Tensor:
        return rows_TD.mul_(_rounded(self.scale, rows_TD.dtype))


class LMHead(ColumnParallelLinear):
    """The output projection: [V, D]. With `tied_to` it shares the embedding's weight.

    It is called with the context of the logits rows.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        parallel: ParallelState,
        tied_to: VocabEmbedding | None = None,
    ) -> None:
        share = rows_of_vocabulary(vocab_size, parallel.tensor)
        super().__init__(hidden_size, vocab_size, bias=bias, parallel=parallel, share=share)
        self._vocab_size = vocab_size
        self._most_rows = -(-vocab_size // parallel.tensor.size)
        self._group = parallel.tensor
        if tied_to is not None:
            self.weight = tied_to.weight
            self.tied_to = (tied_to,)

    def forward(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        """float32 logits: [L, V]."""
        logits_LV = self._logits_of_rank(hidden_LD, context)
        if self._most_rows * self._group.size == self._vocab_size:
            return self._group.all_gather(logits_LV, dim=-1)
        # Ranks gather equal sizes; the last rank's padding is at the end.
        padded_LV = F.pad(logits_LV, (0, self._most_rows - logits_LV.shape[-1]))
        return self._group.all_gather(padded_LV, dim=-1)[:, : self._vocab_size].contiguous()

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        """Return `greedy_tokens` of the logits without materialising them, or None without a fused kernel.

        For rows without log-probabilities and without logits transforms. Ranks exchange their largest logits only.
        """
        if self._group.size > 1:
            return self._greedy_of_ranks(hidden_LD, context)
        chosen = self._argmax_of_rank(hidden_LD, context)
        return None if chosen is None else ChosenTokens(*chosen[:2])

    def _greedy_of_ranks(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens:
        values_L, token_ids_L = self._largest_of_rank(hidden_LD, context)
        group, first_token = self._group, self._share.start
        if group.collectives is not None:
            return ChosenTokens(*group.collectives.merge_choices(values_L, token_ids_L, first_token))
        values_LS = group.all_gather(values_L.unsqueeze(-1), dim=-1)
        token_ids_L = token_ids_L + first_token
        return merge_largest(values_LS, group.all_gather(token_ids_L.unsqueeze(-1), dim=-1))

    def _largest_of_rank(self, hidden_LD: Tensor, context: ForwardContext) -> LargestLogits:
        chosen = self._argmax_of_rank(hidden_LD, context, with_largest=True)
        if chosen is None:
            return largest_logits(self._logits_of_rank(hidden_LD, context))
        token_ids_L, _, values_L = chosen
        assert values_L is not None, "called with with_largest"
        return LargestLogits(values_L, token_ids_L)

    def _argmax_of_rank(
        self, hidden_LD: Tensor, context: ForwardContext, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """`LinearMethod.argmax`, of logits with the bias and the requests' adapters."""
        if self.bias is None and not self.has_adapters(context):
            return self.method.argmax(self, hidden_LD, with_largest=with_largest)
        if NATIVE is None or not NATIVE.runs(hidden_LD):
            return None
        return NATIVE.argmax(self._logits_of_rank(hidden_LD, context), with_largest=with_largest)

    def _logits_of_rank(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return super().forward(hidden_LD, context).to(torch.float32)


@functools.cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))
