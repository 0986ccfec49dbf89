"""Sizes of latent attention, for its kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention on this rank.

    nope_size, rotary_size: of a query head, in this order. is_interleaved: the rotated pairs are adjacent dimensions,
    instead of one in either half.
    """

    num_heads: int
    nope_size: int
    rotary_size: int
    latent_size: int
    value_size: int
    is_interleaved: bool

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rotary_size

    @property
    def key_size(self) -> int:
        """Elements of a cached position, and of an absorbed query head."""
        return self.rotary_size + self.latent_size
