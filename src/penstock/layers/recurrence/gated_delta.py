"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): linear attention with the gated delta rule.

Suffixes: T tokens, D hidden size, H value heads, X features of several heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.recurrence import ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import (
    ArrangedColumnParallelLinear,
    RowParallelLinear,
    pieces_of_heads,
    rows_of_rank,
    side_by_side,
)
from penstock.layers.recurrence.modules import CausalConvolution, GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import Shard, WeightSlot, new_parameter
from penstock.parallel import ParallelState, Share, heads_of_rank


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of a gated delta layer over all ranks.

    Each key head, of `key_size`, serves equally many consecutive value heads, of `value_size`. num_taps: of the
    convolution. beta_scale: largest beta; with 2 a state's eigenvalues may be negative (Grazzi et al. 2024,
    https://arxiv.org/abs/2411.12537).
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int
    norm_eps: float
    beta_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Key and value heads of this rank."""

    keys: Share
    values: Share
    sizes: DeltaSizes

    @property
    def shares(self) -> list[Share]:
        """Shares of the features of queries, keys and values."""
        keys = self.keys * self.sizes.key_size
        return [keys, keys, self.values * self.sizes.value_size]


# Rows of each tensor of a checkpoint that this rank has, in the order of a projection's outputs.
Places = Mapping[Shard, Sequence[Share]]
# Places of queries, keys, values and output gates, and those of betas and steps.
Arrangement = Callable[[DeltaHeads], tuple[Places, Places]]


def one_by_one(heads: DeltaHeads) -> tuple[Places, Places]:
    """A tensor for each projection: "q", "k", "v" and "z"; "b" and "a"."""
    queries, keys, values = heads.shares
    return {"q": [queries], "k": [keys], "v": [values], "z": [values]}, {"b": [heads.values], "a": [heads.values]}


def convolved_together(heads: DeltaHeads) -> tuple[Places, Places]:
    """Queries, keys and values in one tensor, "qkv", and "z"; "b" and "a" (Qwen3.5)."""
    of_features, of_heads = one_by_one(heads)
    return {"qkv": side_by_side(heads.shares), "z": of_features["z"]}, of_heads


def by_key_head(heads: DeltaHeads) -> tuple[Places, Places]:
    """All rows of a key head and of its value heads adjacent in one tensor, "qkvz"; likewise "ba" (Qwen3-Next)."""
    sizes = heads.sizes
    num_values = sizes.num_value_heads // sizes.num_key_heads
    key_rows, value_rows = sizes.key_size, num_values * sizes.value_size
    stride = 2 * (key_rows + value_rows)
    features: list[Share] = []
    for offset in (0, key_rows):
        features += pieces_of_heads(heads.keys, key_rows, offset, stride)
    for offset in (2 * key_rows, 2 * key_rows + value_rows):
        features += pieces_of_heads(heads.values, sizes.value_size, offset, stride, heads_per_stride=num_values)
    of_heads: list[Share] = []
    for offset in (0, num_values):
        of_heads += pieces_of_heads(heads.values, 1, offset, 2 * num_values, heads_per_stride=num_values)
    return {"qkvz": features}, {"ba": of_heads}


class _HeadProjections(ArrangedColumnParallelLinear):
    """Projections to a number per head, which are too few to be quantised."""

    keeps_precision = True


class GatedDelta(RecurrentMixer):
    """out(norm(scan(convolution(q, k, v))) * silu(z)).

    A_log, dt_bias: [H], of the decays. arrangement: of the projections' rows in checkpoints.
    """

    def __init__(
        self, sizes: DeltaSizes, hidden_size: int, name: str, parallel: ParallelState, *, arrangement: Arrangement
    ) -> None:
        super().__init__()
        values, keys = heads_of_rank(sizes.num_value_heads, sizes.num_key_heads, parallel.tensor)
        heads = DeltaHeads(keys, values, sizes)
        of_features, of_heads = arrangement(heads)
        self.in_proj = ArrangedColumnParallelLinear(hidden_size, of_features, bias=False)
        self.head_proj = _HeadProjections(hidden_size, of_heads, bias=False)
        self.conv1d = CausalConvolution(heads.shares, sizes.num_taps, bias=False)
        self.A_log, self.dt_bias = new_parameter(values.size), new_parameter(values.size)
        self.norm = GatedNorm(
            values * sizes.value_size,
            sizes.norm_eps,
            group_size=sizes.value_size,
            gates_first=False,
            group=parallel.tensor,
            is_shared=True,
            offset=self.conv1d.num_channels,
        )
        self.out_proj = RowParallelLinear(
            sizes.num_value_heads * sizes.value_size, hidden_size, bias=False, parallel=parallel
        )
        self.layer = RecurrentState(
            name=name, convolution=self.conv1d.state, scan=(values.size, sizes.key_size, sizes.value_size)
        )
        self._heads = values
        key_features = keys.size * sizes.key_size
        self._rule = ScanRule(
            num_groups=keys.size,
            queries=0,
            keys=key_features,
            values=2 * key_features,
            betas=0,
            steps=values.size,
            beta_scale=sizes.beta_scale,
            has_unit_keys=True,
            query_scale=sizes.key_size**-0.5,
        )

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        hidden_TD, of_all = context.whole(hidden_TD), context.of_all_tokens()
        rows_TX, heads_TH = self.in_proj(hidden_TD, of_all), self.head_proj(hidden_TD, of_all)
        mixed_TX = self.conv1d(self.layer, rows_TX, context)
        parameters = ScanParameters(self.A_log, self.dt_bias)
        scanned_TX = scan(self.layer, mixed_TX, heads_TH, context, self._rule, parameters)
        normed_TX = self.norm(scanned_TX, rows_TX, of_all)
        return self.out_proj(output_rows(normed_TX, context), context)  # type: ignore[no-any-return]

    def slots(self) -> dict[str, WeightSlot]:
        return {"A_log": rows_of_rank(self.A_log, self._heads), "dt_bias": rows_of_rank(self.dt_bias, self._heads)}
