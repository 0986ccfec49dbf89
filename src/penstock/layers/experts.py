"""Mixtures of experts: a router, and MLPs of which each token takes a few.

Suffixes: T tokens, D hidden size, E experts, K experts of a token, N rows of one expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS, GatedActivation, sigmoid
from penstock.kernels.experts import GroupedExperts
from penstock.kernels.native import NATIVE
from penstock.kernels.native.experts import RuleArguments
from penstock.kernels.rows import sum_rows
from penstock.kernels.stored_weight import ExpertWeights
from penstock.layers.linear import LinearLayer, WeightChanges
from penstock.layers.mlp import GatedMLP, PlainMLP
from penstock.layers.weights import Part, WeightSlot
from penstock.parallel import ParallelState
from penstock.parallel.scattered_rows import ScatteredRows

SOFTMAX, SIGMOID, SPARSEMIXER = "softmax", "sigmoid", "sparsemixer"
_SCORINGS = SOFTMAX, SIGMOID, SPARSEMIXER


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a token's experts and their weights follow from the router's logits.

    scoring: `SOFTMAX` over all experts, `SIGMOID` of each, or `SPARSEMIXER`. normalizes: the chosen experts' scores are
    divided by their sum, or by `least_sum` where that is larger. scale: factor of all weights. num_groups, top_groups:
    experts are in equal groups, and a token takes those of the best groups only; a group is as good as its
    `best_of_group` best experts together. weighs_inputs: the weights multiply the experts' inputs (Llama 4), not their
    outputs. jitter: of `SPARSEMIXER`, half the relative distance from the best logit within which others count.

    SparseMixer (Liu et al. 2024, https://arxiv.org/abs/2409.12136, without its noise) chooses experts one after the
    other. The weight of each is a softmax over those not chosen before whose logits are near its own. It knows no
    correction, groups or normalisation.
    """

    num_experts: int
    top_k: int
    scoring: str = SOFTMAX
    normalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    weighs_inputs: bool = False
    least_sum: float = 0.0
    jitter: float = 0.0

    @property
    def arguments(self) -> RuleArguments:
        """The rule as the C++ kernels take it."""
        scoring = _SCORINGS.index(self.scoring)
        groups = self.num_groups, self.top_groups, self.best_of_group
        scale, least_sum, jitter = float(self.scale), float(self.least_sum), float(self.jitter)
        return self.num_experts, self.top_k, scoring, self.normalizes, scale, *groups, least_sum, jitter

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Experts of each token, ascending, and their weights: int64 [T, K] and float32 [T, K].

        bias_E: added to the scores for the choice alone, not for the weights (DeepSeek-V3, arXiv:2412.19437, eq. 16).
        """
        if NATIVE is not None and NATIVE.runs(logits_TE) and NATIVE.experts.takes(self.num_experts):
            bias_E = None if bias_E is None else bias_E.float()
            return NATIVE.experts.route(logits_TE.contiguous(), self.arguments, bias_E)
        return self.choose_reference(logits_TE, bias_E)

    def choose_reference(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The specification of `choose`."""
        if self.scoring == SPARSEMIXER:
            return self._choose_one_by_one(logits_TE)
        scores_TE = torch.softmax(logits_TE, -1) if self.scoring == SOFTMAX else sigmoid(logits_TE)
        for_choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.num_groups > 1:
            for_choice_TE = self._of_best_groups(for_choice_TE)
        experts_TK = torch.topk(for_choice_TE, self.top_k, dim=-1).indices.sort(-1).values
        weights_TK = scores_TE.gather(-1, experts_TK)
        if self.normalizes:
            sum_T1 = weights_TK.sum(-1, keepdim=True) + (1e-20 if self.scoring == SIGMOID else 0.0)
            weights_TK = weights_TK / sum_T1.clamp(min=self.least_sum)
        return experts_TK, weights_TK * self.scale if self.scale != 1.0 else weights_TK

    def _choose_one_by_one(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """SparseMixer."""
        left_TE, experts, weights = logits_TE, [], []
        for _ in range(self.top_k):
            best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
            distances_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
            near_TE = left_TE.masked_fill(distances_TE > 2 * self.jitter, float("-inf"))
            experts.append(expert_T1)
            weights.append(torch.softmax(near_TE, -1).gather(-1, expert_T1))
            left_TE = left_TE.scatter(-1, expert_T1, float("-inf"))
        experts_TK, order_TK = torch.cat(experts, -1).sort(-1)
        return experts_TK, torch.cat(weights, -1).gather(-1, order_TK) * self.scale

    def _of_best_groups(self, scores_TE: Tensor) -> Tensor:
        """Scores without those of the experts in other groups, which get the lowest value."""
        by_group = scores_TE.unflatten(-1, (self.num_groups, -1))
        of_groups = by_group.topk(self.best_of_group, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(
            -1, torch.topk(of_groups, self.top_groups, dim=-1).indices, True
        )
        without: Tensor = by_group.masked_fill(~chosen.unsqueeze(-1), float("-inf"))
        return without.flatten(-2)


class Router(LinearLayer):
    """Linear layer from hidden states to logits of the experts; its weight is never quantised.

    e_score_correction_bias: float32 [E], or None.
    """

    keeps_precision = True

    def __init__(self, hidden_size: int, routing: Routing, *, has_correction: bool = False, bias: bool = False) -> None:
        super().__init__(hidden_size, routing.num_experts, bias=bias)
        self.routing = routing
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_correction:
            self.e_score_correction_bias = nn.Parameter(torch.empty(routing.num_experts), requires_grad=False)

    def choose(self, hidden_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """As `Routing.choose`."""
        return self.routing.choose(self(hidden_TD, context).float(), self.e_score_correction_bias)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of a step by expert: each expert's are adjacent.

    order: place of each row among the T * K pairs of tokens and experts. counts: rows of each expert.
    """

    order: Tensor
    counts: Sequence[int]

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int) -> ExpertRows:
        """Sort the pairs by expert; the rows of one expert stay in the order of their tokens.

        Tensors without values get the case that needs most memory: all tokens choose the same experts.
        """
        experts = experts_TK.flatten()
        if experts.is_meta:
            num_tokens, top_k = experts_TK.shape
            return cls(experts, [num_tokens] * top_k)
        counts = torch.bincount(experts, minlength=num_experts)
        return cls(torch.argsort(experts, stable=True), counts.tolist())

    def pieces(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and the place of these."""
        begin = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(begin, begin + count)
            begin += count


class Experts(nn.ModuleList):
    """MLPs, gated or plain, each over the rows of its tokens.

    Each expert's products run over all of its rows at once, and threads share their outputs; on a GPU all experts'
    products are one launch, in the formats of `StoredWeight`, if they are gated and `are_grouped`. A token's results
    are added in the order of the experts' numbers, so that they do not depend on other tokens.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | GatedActivation,
        parallel: ParallelState,
        bias: bool = False,
        weighs_inputs: bool = False,
        are_gated: bool = True,
    ) -> None:
        make = GatedMLP if are_gated else PlainMLP
        super().__init__(
            make(hidden_size, intermediate_size, activation=activation, bias=bias, parallel=parallel)
            for _ in range(num_experts)
        )
        by_name = GATED_ACTIVATIONS if are_gated else ACTIVATIONS
        self._activation = by_name[activation] if isinstance(activation, str) else activation
        self.are_grouped = True
        self._weighs_inputs = weighs_inputs
        self._grouped: GroupedExperts | None = None
        # Replacements of any expert's weights, and their number when these products were made.
        self._changes = WeightChanges()
        self._grouped_at = -1
        for layer in itertools.chain.from_iterable(self._projections()):
            layer.changes = self._changes

    def _projections(self) -> list[tuple[LinearLayer, LinearLayer]]:
        return [mlp.projections for mlp in cast("list[GatedMLP | PlainMLP]", list(self))]

    def partial(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, context: ForwardContext) -> Tensor:
        """Weighted sum of each token's experts, of this rank's part of their features: [T, D]."""
        grouped = None if self._weighs_inputs or self._have_adapters(context) else self._grouped_for(hidden_TD)
        if grouped is not None:
            return grouped.mixture(hidden_TD, experts_TK, weights_TK)
        num_tokens, top_k = experts_TK.shape
        rows = ExpertRows.of(experts_TK, len(self))
        tokens_N = rows.order // top_k
        given_ND = hidden_TD[tokens_N]
        if self._weighs_inputs:
            given_ND *= weights_TK.flatten()[rows.order].unsqueeze(-1).to(given_ND.dtype)
            weights_TK = torch.ones_like(weights_TK)
        made_ND = torch.empty_like(given_ND)
        of_pairs = context.of_rows(lambda per_token: per_token.index_select(0, tokens_N))
        for expert, place in rows.pieces():
            mlp: GatedMLP | PlainMLP = self[expert]  # type: ignore[assignment]
            made_ND[place] = mlp.partial(given_ND[place], of_pairs.of_rows(itemgetter(place)))
        made_TKD = torch.empty_like(made_ND)
        made_TKD[rows.order] = made_ND
        made_TKD = made_TKD.view(num_tokens, top_k, -1)
        weights_TK1 = weights_TK.to(made_TKD.dtype).unsqueeze(-1)
        sum_TD = made_TKD[:, 0] * weights_TK1[:, 0]
        for index in range(1, top_k):
            sum_TD += made_TKD[:, index] * weights_TK1[:, index]
        return sum_TD

    def _have_adapters(self, context: ForwardContext) -> bool:
        """Whether LoRA adapters of an expert may change the outputs of these rows."""
        if context.inputs.is_empty:
            return False
        return any(layer.has_adapters(context) for layer in itertools.chain.from_iterable(self._projections()))

    def _grouped_for(self, hidden_TD: Tensor) -> GroupedExperts | None:
        """Grouped products of these experts; None where there are none for their device, weights or activation."""
        if not self.are_grouped or not GroupedExperts.runs(hidden_TD, self._activation):
            return None
        if self._grouped_at != self._changes.count:
            self._grouped, self._grouped_at = self._group(hidden_TD.dtype), self._changes.count
        return self._grouped

    def note_changes(self) -> None:
        """Note that the memory of weights may have been replaced, which layers do not see."""
        self._changes.count += 1

    def _group(self, dtype: torch.dtype) -> GroupedExperts | None:
        """Grouped products of the weights as they are now, for this dtype of hidden states."""
        gate_up, down = zip(*self._projections(), strict=True)
        weights = [[layer.method.stored_weight(layer) for layer in layers] for layers in (gate_up, down)]
        stored = [[weight for weight in given if weight is not None and weight.values.numel()] for given in weights]
        if any(len(given) < len(self) for given in stored):
            return None
        biases = [[layer.bias for layer in layers if layer.bias is not None] or None for layers in (gate_up, down)]
        experts = ExpertWeights(stored[0], stored[1], biases[0], biases[1])
        if not GroupedExperts.takes(experts, dtype):
            return None
        return GroupedExperts(experts, self._activation, is_invariant=gate_up[0].batch_invariant)


def note_changes(model: object) -> None:
    """Note that weights of a model may have other memory than before."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Experts):
            module.note_changes()


class SharedExpert(GatedMLP):
    """An expert that all tokens take, with a sigmoid gate on its output if `gate` is not None."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | GatedActivation,
        is_gated: bool,
        parallel: ParallelState,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation=activation, bias=False, parallel=parallel)
        self.gate = _Gate(hidden_size, 1, bias=False) if is_gated else None

    def partial(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        made_TD = super().partial(hidden_TD, context)
        return made_TD if self.gate is None else sigmoid(self.gate(hidden_TD, context)) * made_TD


class _Gate(LinearLayer):
    keeps_precision = True


class _FromLatent(LinearLayer):
    """A projection of a rank's part of the experts' sums, whose results the ranks add up."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, parallel: ParallelState) -> None:
        super().__init__(input_size, output_size, bias=bias)
        self._is_first = parallel.tensor.rank == 0

    def slots(self) -> dict[str, WeightSlot]:
        """Slots by parameter name; only the first rank has a bias."""
        slots = {"weight": WeightSlot((self.output_size, self.input_size), self.weight)}
        if self.bias is not None:
            slots["bias"] = WeightSlot((self.output_size,), self.bias, None if self._is_first else Part(0, ()))
        return slots


class MoE(nn.Module):
    """Experts chosen by a router, and a shared one.

    activation: as of the MLPs, which are plain unless they `are_gated`. shared_size: features of the shared expert; 0
    for none. bias: of router and experts. shared_bias: of the shared expert and of `latent_size`'s projections.
    intermediate_size: of an expert, over all ranks. latent_size: the chosen experts have inputs and outputs of this
    size, from a projection of the hidden states and to another one (LatentMoE, NVIDIA 2025, https://arxiv.org/abs/2512.20856);
    None for those of the hidden states themselves.
    load_E: int64, to which every step adds the tokens of each expert, padding excluded; None counts nothing.
    """

    load_E: Tensor | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        *,
        activation: str | GatedActivation,
        parallel: ParallelState,
        shared_size: int = 0,
        gates_shared: bool = False,
        has_correction: bool = False,
        bias: bool = False,
        shared_bias: bool = False,
        are_gated: bool = True,
        latent_size: int | None = None,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self._group = parallel.tensor
        self._hidden_size = hidden_size
        self.gate = Router(hidden_size, routing, has_correction=has_correction, bias=bias)
        self.to_latent = self.from_latent = None
        if latent_size is not None:
            self.to_latent = LinearLayer(hidden_size, latent_size, bias=shared_bias)
            self.from_latent = _FromLatent(latent_size, hidden_size, bias=shared_bias, parallel=parallel)
        self.experts = Experts(
            routing.num_experts,
            latent_size or hidden_size,
            intermediate_size,
            activation=activation,
            parallel=parallel,
            bias=bias,
            weighs_inputs=routing.weighs_inputs,
            are_gated=are_gated,
        )
        self.shared_expert: SharedExpert | PlainMLP | None = None
        if shared_size and are_gated:
            self.shared_expert = SharedExpert(
                hidden_size, shared_size, activation=activation, is_gated=gates_shared, parallel=parallel
            )
        elif shared_size:
            self.shared_expert = PlainMLP(
                hidden_size, shared_size, activation=activation, bias=shared_bias, parallel=parallel
            )

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        rows: ScatteredRows | None = context.output_rows
        if rows is not None:
            hidden_TD = rows.whole(hidden_TD)
        (part_TD,) = context.opaque(
            self._partial, hidden_TD, widths=[self._hidden_size], by_library=self._partial_by_library
        )
        return self._group.all_reduce(part_TD) if rows is None else rows.add_up(part_TD)

    def _partial_by_library(self, context: ForwardContext, hidden_TD: Tensor) -> list[Tensor] | None:
        """`_partial` by the library's operation over all experts; None where kernels for it are missing."""
        is_gated = isinstance(self.shared_expert, SharedExpert) and self.shared_expert.gate is not None
        if NATIVE is None or is_gated or self.gate.routing.weighs_inputs:
            return None
        gate = self.gate
        mlps = cast("list[Callable[[Tensor, ForwardContext], Tensor]]", [mlp.partial for mlp in self.experts])
        rule, bias_E = gate.routing.arguments, gate.e_score_correction_bias
        given_TX = hidden_TD if self.to_latent is None else self.to_latent(hidden_TD, context)

        def router(_: Tensor, context: ForwardContext) -> Tensor:
            return gate(hidden_TD, context)  # type: ignore[no-any-return]

        part_TD = NATIVE.experts.mixture(given_TX, router, mlps, context, rule, bias_E, self.load_E)
        if part_TD is None:
            return None
        if self.from_latent is not None:
            part_TD = self.from_latent(part_TD, context)
        if self.shared_expert is not None:
            part_TD = sum_rows(part_TD, self.shared_expert.partial(hidden_TD, context))
        return [part_TD]

    def _partial(self, context: ForwardContext, hidden_TD: Tensor) -> list[Tensor]:
        experts_TK, weights_TK = self.gate.choose(hidden_TD, context)
        if self.load_E is not None and context.sequences is not None:
            experts = experts_TK[: context.sequences.num_actual_tokens].flatten()
            self.load_E += torch.bincount(experts, minlength=len(self.load_E))
        given_TX = hidden_TD if self.to_latent is None else self.to_latent(hidden_TD, context)
        part_TD = self.experts.partial(given_TX, experts_TK, weights_TK, context)
        if self.from_latent is not None:
            part_TD = self.from_latent(part_TD, context)
        if self.shared_expert is not None:
            part_TD += self.shared_expert.partial(hidden_TD, context)
        return [part_TD]
