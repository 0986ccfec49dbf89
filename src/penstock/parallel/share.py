"""Which part of a whole a rank has."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import UnsupportedFeature
from penstock.parallel.group import Group


class Indivisible(UnsupportedFeature):
    """A layer that cannot be split among so many ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    """`size` from `start` on, of `whole`."""

    start: int
    size: int
    whole: int

    def __mul__(self, factor: int) -> Share:
        """The same share where each is `factor` long."""
        return Share(self.start * factor, self.size * factor, self.whole * factor)


def share_of_rank(whole: int, group: Group, what: str) -> Share:
    """This rank's of equal shares. Raises Indivisible where they would not be equal."""
    if whole % group.size != 0:
        raise Indivisible(f"{whole} {what} cannot be shared by {group.size} ranks.")
    size = whole // group.size
    return Share(group.rank * size, size, whole)


def rows_of_vocabulary(vocab_size: int, group: Group) -> Share:
    """This rank's: as many as each other's, but for the last one's, which may be fewer.

    Raises Indivisible where one would have none.
    """
    size = -(-vocab_size // group.size)
    if size * (group.size - 1) >= vocab_size:
        raise Indivisible(f"{vocab_size} tokens of the vocabulary are too few for {group.size} ranks.")
    start = group.rank * size
    return Share(start, min(size, vocab_size - start), vocab_size)


def groups_of_share(share: Share, group_size: int, what: str) -> Share:
    """The groups that a share consists of. Raises Indivisible where it has a part of one.

    group_size: how many of what is shared are in a group.
    """
    if share.start % group_size or share.size % group_size:
        raise Indivisible(
            f"{share.whole} {what}, in groups of {group_size}, cannot be shared by {share.whole // share.size} ranks, "
            "since each must have whole groups."
        )
    return Share(share.start // group_size, share.size // group_size, share.whole // group_size)


def heads_of_rank(num_heads: int, num_kv_heads: int, group: Group) -> tuple[Share, Share]:
    """This rank's query heads, and the KV heads that they attend with, which several ranks have if there are too few.

    Raises Indivisible where ranks cannot share both.
    """
    if max(num_kv_heads, group.size) % min(num_kv_heads, group.size) != 0:
        raise Indivisible(
            f"{num_heads} attention heads with {num_kv_heads} KV heads cannot be shared by {group.size} ranks."
        )
    heads = share_of_rank(num_heads, group, "attention heads")
    return heads, Share(group.rank * num_kv_heads // group.size, max(1, num_kv_heads // group.size), num_kv_heads)
