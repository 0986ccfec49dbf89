"""Linear layers whose features are split over the tensor-parallel ranks, alone or fused.

Suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.layers.linear import AdapterPlace, LinearLayer
from penstock.layers.weights import Part, Shard, WeightSlot
from penstock.parallel import ParallelState, Share, heads_of_rank, share_of_rank


class ColumnParallelLinear(LinearLayer):
    """A layer whose output features are split over the ranks.

    output_size: over all ranks; the layer's own is this rank's. share: of the output features, where ranks have unequal
    shares.
    """

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, parallel: ParallelState, share: Share | None = None
    ) -> None:
        share = share or share_of_rank(output_size, parallel.tensor, "output features")
        super().__init__(input_size, share.size, bias=bias)
        self._share = share

    def slots(self) -> dict[str, WeightSlot]:
        return {name: rows_of_rank(target, self._share) for name, target in self.named_parameters(recurse=False)}

    def adapter_place(self, shard: Shard | None) -> AdapterPlace:
        share = self._share
        shape = share.whole, self.input_size
        return AdapterPlace(0, self.output_size, shape, output_part=_part(0, share))


class RowParallelLinear(LinearLayer):
    """A layer whose input features are split over the ranks; the partial products are all-reduced.

    input_size: over all ranks; the layer's own is this rank's. Only the first rank has a nonzero bias.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, parallel: ParallelState) -> None:
        share = share_of_rank(input_size, parallel.tensor, "input features")
        super().__init__(share.size, output_size, bias=bias)
        self._share, self._group = share, parallel.tensor

    def forward(self, x_TI: Tensor, context: ForwardContext) -> Tensor:
        """[T, O], all-reduced, or reduce-scattered where the context has a sequence-parallel layout."""
        part_TO, rows = self.partial(x_TI, context), context.output_rows
        return self._group.all_reduce(part_TO) if rows is None else rows.add_up(part_TO)

    def partial(self, x_TI: Tensor, context: ForwardContext) -> Tensor:
        """Partial product of this rank, before the all-reduce: [T, O]."""
        return super().forward(x_TI, context)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": WeightSlot((self.output_size, self._share.whole), self.weight, _part(1, self._share))}
        if self.bias is not None:
            slots["bias"] = WeightSlot((self.output_size,), self.bias, None if self._group.rank == 0 else Part(0, ()))
        return slots

    def adapter_place(self, shard: Shard | None) -> AdapterPlace:
        shape = self.output_size, self._share.whole
        return AdapterPlace(0, self.output_size, shape, input_part=_part(1, self._share))


class MergedColumnParallelLinear(LinearLayer):
    """Several projections of one input fused into one product, outputs side by side.

    output_shares: this rank's output features of each shard, in the order of the output.
    """

    def __init__(self, input_size: int, output_shares: Mapping[Shard, Share], *, bias: bool) -> None:
        super().__init__(input_size, sum(share.size for share in output_shares.values()), bias=bias)
        self.output_shares = dict(output_shares)

    @classmethod
    def of_sizes(
        cls, input_size: int, output_sizes: Mapping[Shard, int], *, bias: bool, parallel: ParallelState
    ) -> MergedColumnParallelLinear:
        """Split each projection equally. output_sizes: by shard, over all ranks."""
        shares = {
            shard: share_of_rank(size, parallel.tensor, f'output features "{shard}"')
            for shard, size in output_sizes.items()
        }
        return MergedColumnParallelLinear(input_size, shares, bias=bias)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of tensors that hold all shards, each whole, side by side."""
        num_rows, part = self._rows_of_all()
        parameters = self.named_parameters(recurse=False)
        return {name: WeightSlot((num_rows, *target.shape[1:]), target, part) for name, target in parameters}

    def adapter_place(self, shard: Shard | None) -> AdapterPlace:
        if shard is None:
            num_rows, part = self._rows_of_all()
            return AdapterPlace(0, self.output_size, (num_rows, self.input_size), output_part=part)
        share, shape = self.output_shares[shard], (self.output_shares[shard].whole, self.input_size)
        return AdapterPlace(self._offset(shard), share.size, shape, output_part=self.part_of(shard))

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        share, rows, part = self.output_shares[shard], self.rows_of(shard), self.part_of(shard)
        return {
            name: WeightSlot((share.whole, *parameter.shape[1:]), parameter[rows], part)
            for name, parameter in self.named_parameters(recurse=False)
        }

    def part_of(self, shard: Shard) -> Part | None:
        """Part of a shard's outputs that this rank has; None for all."""
        return _part(0, self.output_shares[shard])

    def rows_of(self, shard: Shard) -> slice:
        """Outputs of a shard on this rank."""
        offset = self._offset(shard)
        return slice(offset, offset + self.output_shares[shard].size)

    def _offset(self, shard: Shard) -> int:
        """First output of a shard on this rank."""
        names = list(self.output_shares)
        return sum(self.output_shares[name].size for name in names[: names.index(shard)])

    def _rows_of_all(self) -> tuple[int, Part | None]:
        """Rows of a tensor with all shards side by side, and this rank's part of them."""
        rows, begin = [], 0
        for share in self.output_shares.values():
            rows.append(Share(begin + share.start, share.size, share.whole))
            begin += share.whole
        is_all = all(share.size == share.whole for share in rows)
        return begin, None if is_all else Part(0, tuple(rows))


class QKVParallelLinear(MergedColumnParallelLinear):
    """Fused query, key and value projections of an attention layer: shards "q", "k" and "v".

    num_heads, num_kv_heads: over all ranks; the layer's own are this rank's. is_interleaved: pairs of a query or key
    head that rotate are adjacent in checkpoints and adapters, which have the three projections one by one.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        parallel: ParallelState,
        is_interleaved: bool = False,
    ) -> None:
        heads, kv_heads = heads_of_rank(num_heads, num_kv_heads, parallel.tensor)
        shares = {"q": heads * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size}
        super().__init__(hidden_size, shares, bias=bias)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        self._interleaved = head_size if is_interleaved else None

    def part_of(self, shard: Shard) -> Part | None:
        if self._interleaved is None or shard == "v":
            return super().part_of(shard)
        return Part(0, (self.output_shares[shard],), self._interleaved)


def _part(dim: int, share: Share) -> Part | None:
    return None if share.size == share.whole else Part(dim, (share,))


def rows_of_rank(target: Tensor, share: Share) -> WeightSlot:
    """Slot of a tensor with the rows of all ranks."""
    return WeightSlot((share.whole, *target.shape[1:]), target, _part(0, share))
