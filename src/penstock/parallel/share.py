"""Shards: the rows, heads or columns of a tensor-parallel rank, and the layers of a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import UnsupportedFeature
from penstock.parallel.group import Group
from penstock.parallel.state import ParallelState


class Indivisible(UnsupportedFeature):
    """Layer that cannot be split among so many ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    """Range of `size` from `start` on, of `whole`."""

    start: int
    size: int
    whole: int

    def __mul__(self, factor: int) -> Share:
        """Scale the range, for elements of `factor` entries each."""
        return Share(self.start * factor, self.size * factor, self.whole * factor)


def share_of_rank(whole: int, group: Group, what: str) -> Share:
    """Return this rank's equal share. Raises Indivisible if the ranks do not divide `whole`."""
    if whole % group.size != 0:
        raise Indivisible(f"{whole} {what} cannot be shared by {group.size} ranks.")
    size = whole // group.size
    return Share(group.rank * size, size, whole)


def rows_of_vocabulary(vocab_size: int, group: Group) -> Share:
    """Return this rank's vocabulary rows: equal shares, except a smaller last one.

    Raises Indivisible if a rank had none.
    """
    size = -(-vocab_size // group.size)
    if size * (group.size - 1) >= vocab_size:
        raise Indivisible(f"{vocab_size} tokens of the vocabulary are too few for {group.size} ranks.")
    start = group.rank * size
    return Share(start, min(size, vocab_size - start), vocab_size)


def groups_of_share(share: Share, group_size: int, what: str) -> Share:
    """Return the quantisation groups of a share. Raises Indivisible if it splits a group.

    group_size: entries per group.
    """
    if share.start % group_size or share.size % group_size:
        raise Indivisible(
            f"{share.whole} {what}, in groups of {group_size}, cannot be shared by {share.whole // share.size} ranks, "
            "since each must have whole groups."
        )
    return Share(share.start // group_size, share.size // group_size, share.whole // group_size)


def heads_of_rank(
    num_heads: int, num_kv_heads: int, group: Group, names: tuple[str, str] = ("attention heads", "KV heads")
) -> tuple[Share, Share]:
    """Return this rank's query heads and their KV heads, which are replicated if there are fewer than ranks.

    names: of both, for errors; heads of another kind may have others in common.
    Raises Indivisible if either cannot be split evenly.
    """
    if max(num_kv_heads, group.size) % min(num_kv_heads, group.size) != 0:
        raise Indivisible(
            f"{num_heads} {names[0]} with {num_kv_heads} {names[1]} cannot be shared by {group.size} ranks."
        )
    heads = share_of_rank(num_heads, group, names[0])
    return heads, Share(group.rank * num_kv_heads // group.size, max(1, num_kv_heads // group.size), num_kv_heads)


def layers_of_stage(num_layers: int, parallel: ParallelState) -> range:
    """Return the layer numbers of this rank's stage: by `pipeline_layers`, else about equally many in each stage.

    Raises UnsupportedFeature for `pipeline_layers` that do not add up, and for more stages than layers.
    """
    size, stage = parallel.pipeline.size, parallel.pipeline.rank
    counts = parallel.pipeline_layers or spread_layers(num_layers, size)
    if sum(counts) != num_layers or min(counts) < 1:
        raise UnsupportedFeature(
            f"pipeline_layers={','.join(map(str, counts))}: the model has {num_layers} layers to spread over {size} "
            f"stages, each at least one. Allowed, for instance: {','.join(map(str, spread_layers(num_layers, size)))}."
            if num_layers >= size
            else f"pipeline_parallel_size={size}: the model has only {num_layers} layers, so at most as many stages."
        )
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def spread_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage. A remainder goes to the stages before the last one, which has the output head."""
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages))
