"""Linear layers whose features are split over the tensor-parallel ranks, alone or fused.

Suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        rows = side_by_side(list(self.output_shares.values()))
        return rows[0].whole, part_of_rows(rows)


class ArrangedColumnParallelLinear(MergedColumnParallelLinear):
    """Projections whose rows lie in checkpoints in another order than the outputs, or several in one tensor.

    places: by checkpoint tensor, its rows that are this rank's outputs, in their order.
    """

    def __init__(self, input_size: int, places: Mapping[Shard, Sequence[Share]], *, bias: bool) -> None:
        sizes = {shard: sum(share.size for share in rows) for shard, rows in places.items()}
        shares = {shard: Share(0, sizes[shard], rows[0].whole) for shard, rows in places.items()}
        super().__init__(input_size, shares, bias=bias)
        self._parts = {shard: part_of_rows(rows) for shard, rows in places.items()}

    def part_of(self, shard: Shard) -> Part | None:
        return self._parts[shard]


class QKVParallelLinear(MergedColumnParallelLinear):
    """Fused query, key and value projections of an attention layer: shards "q", "k" and "v".

    num_heads, num_kv_heads: over all ranks; the layer's own are this rank's. is_interleaved: pairs of a query or key
    head that rotate are adjacent in checkpoints and adapters, which have the three projections one by one. has_gate:
    shard "q" has a gate behind each query head; the outputs begin with the gates of all heads.
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
        has_gate: bool = False,
    ) -> None:
        heads, kv_heads = heads_of_rank(num_heads, num_kv_heads, parallel.tensor)
        queries = heads * (2 * head_size if has_gate else head_size)
        shares = {"q": queries, "k": kv_heads * head_size, "v": kv_heads * head_size}
        super().__init__(hidden_size, shares, bias=bias)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        self._interleaved = head_size if is_interleaved else None
        self._gated_rows: list[Share] = []
        if has_gate:
            self._gated_rows = [
                piece
                for place in (1, 0)
                for piece in pieces_of_heads(heads, head_size, place * head_size, 2 * head_size)
            ]

    def part_of(self, shard: Shard) -> Part | None:
        if self._gated_rows and shard == "q":
            return part_of_rows(self._gated_rows)
        if self._interleaved is None or shard == "v":
            return super().part_of(shard)
        return Part(0, (self.output_shares[shard],), self._interleaved)


def side_by_side(shares: Sequence[Share]) -> list[Share]:
    """Shares of several tensors, as parts of the tensor that has all of these one after the other."""
    whole, rows, begin = sum(share.whole for share in shares), [], 0
    for share in shares:
        rows.append(Share(begin + share.start, share.size, whole))
        begin += share.whole
    return rows


def pieces_of_heads(heads: Share, size: int, offset: int, stride: int, *, heads_per_stride: int = 1) -> list[Share]:
    """`size` rows of each of these heads, in a tensor with `stride` rows for every `heads_per_stride` of all heads.

    offset: of the first head's rows among these; those of the others follow.
    """
    whole = heads.whole // heads_per_stride * stride
    places = (divmod(head, heads_per_stride) for head in range(heads.start, heads.start + heads.size))
    return [Share(group * stride + offset + number * size, size, whole) for group, number in places]


def part_of_rows(rows: Sequence[Share]) -> Part | None:
    """Part of a tensor that consists of these rows, one after the other; None for all of them in their order."""
    joined: list[Share] = []
    for share in rows:
        if joined and joined[-1].start + joined[-1].size == share.start:
            share = Share(joined[-1].start, joined.pop().size + share.size, share.whole)
        joined.append(share)
    return _part(0, joined[0]) if len(joined) == 1 else Part(0, tuple(joined))


def _part(dim: int, share: Share) -> Part | None:
    return None if share.size == share.whole else Part(dim, (share,))


def rows_of_rank(target: Tensor, share: Share) -> WeightSlot:
    """Slot of a tensor with the rows of all ranks."""
    return WeightSlot((share.whole, *target.shape[1:]), target, _part(0, share))
