"""Changes of tensors from their form in GGUF to that in Transformers' checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError


class Change:
    """No change; the base of the others. Parts of a tensor are changed as the tensor is."""

    def apply(self, values: Tensor) -> Tensor:
        """Change values: of the whole tensor, or of a part that begins and ends at multiples of `multiple`."""
        return values

    def of_grid(self, values_OG: Tensor) -> Tensor:
        """Change scales or minimums, which stay with the output features first."""
        return values_OG

    def stored_dim(self, dim: int) -> int:
        """Dimension in the file of a dimension of the changed tensor."""
        return dim

    def multiple(self, dim: int) -> int:
        """Number of neighbours along a dimension of the file that are changed together."""
        return 1


UNCHANGED = Change()


class Transposed(Change):
    """Matrices that Transformers has with their inputs first."""

    def apply(self, values: Tensor) -> Tensor:
        return values.t()

    def stored_dim(self, dim: int) -> int:
        return 1 - dim


class MinusOne(Change):
    """Norm weights of Gemma: stored as the factor, in Transformers as its offset from 1."""

    def apply(self, values: Tensor) -> Tensor:
        return values - 1


class LogOfNegative(Change):
    """Decay rates of state-space layers: stored as -exp(A_log)."""

    def apply(self, values: Tensor) -> Tensor:
        return torch.log(-values)


@dataclass(frozen=True, slots=True)
class PairsInHalves(Change):
    """Order of rotated dimensions in Llama's queries and keys.

    GGUF has the pairs of a head side by side; Transformers has their first and second members in two halves.
    """

    head_size: int

    def apply(self, values: Tensor) -> Tensor:
        if self.head_size % 2 or values.shape[0] % self.head_size:
            raise CheckpointError(
                f"A tensor of queries or keys has {values.shape[0]} rows, which are not those of heads of "
                f"{self.head_size} in pairs. The metadata is damaged, or of another model: download the file again."
            )
        pairs = values.reshape(values.shape[0] // self.head_size, self.head_size // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)

    def of_grid(self, values_OG: Tensor) -> Tensor:
        return self.apply(values_OG)

    def multiple(self, dim: int) -> int:
        return self.head_size if dim == 0 else 1


@dataclass(frozen=True, slots=True)
class GroupedHeads(Change):
    """Order of value heads of delta rules: GGUF has the first ones of all key heads, then the second ones, and so on.

    Transformers has those of a key head side by side. dim: of the heads. first: rows before theirs. size: of a head.
    """

    num_keys: int
    num_values: int
    size: int
    dim: int = 0
    first: int = 0

    def apply(self, values: Tensor) -> Tensor:
        if self.size * self.num_keys * self.num_values + self.first != values.shape[self.dim]:
            raise CheckpointError(
                f"A tensor of {self.num_keys * self.num_values} value heads of {self.size} has "
                f"{values.shape[self.dim]} rows or columns. The metadata is damaged, or of another model: download the "
                "file again."
            )
        return self._grouped(values, self.size, self.first)

    def of_grid(self, values_OG: Tensor) -> Tensor:
        if self.dim == 0:
            return self.apply(values_OG)
        num_groups, num_heads = values_OG.shape[1], self.num_keys * self.num_values
        if num_groups == 1:
            return values_OG
        if num_groups % num_heads:
            raise CheckpointError(f"A tensor has {num_groups} groups of quantised values, across {num_heads} heads.")
        return self._grouped(values_OG, num_groups // num_heads, 0)

    def multiple(self, dim: int) -> int:
        return self.first + self.num_keys * self.num_values * self.size if dim == self.dim else 1

    def _grouped(self, values: Tensor, size: int, first: int) -> Tensor:
        before, heads = values.split([first, values.shape[self.dim] - first], self.dim)
        by_place = heads.unflatten(self.dim, (self.num_values, self.num_keys, size))
        by_key: Tensor = by_place.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)
        return torch.cat((before, by_key), self.dim)


@dataclass(frozen=True, slots=True)
class InTurn(Change):
    """Two changes, one after the other, of which the first is of single values."""

    first: Change
    then: Change

    def apply(self, values: Tensor) -> Tensor:
        return self.then.apply(self.first.apply(values))

    def multiple(self, dim: int) -> int:
        return self.then.multiple(dim)


# Makes a tensor of those that a file has in its place, in the order of their names in `TensorNames.parts`.
Join = Callable[[Sequence[Tensor]], Tensor]


def latent_projection(parts: Sequence[Tensor]) -> Tensor:
    """`kv_b_proj` of latent attention, [heads * (keys + values), latent].

    parts: keys [heads, latent, size of a key], values [heads, size of a value, latent].
    """
    keys_HCN, values_HVC = parts
    return torch.cat((keys_HCN.transpose(1, 2), values_HVC), 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ByKeyHead:
    """A `Join` of `in_proj_qkvz`: all rows of a key head adjacent, from queries, keys and values, and gates."""

    num_keys: int
    key_size: int

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        qkv_XD, gates_XD = parts
        keys = self.num_keys * self.key_size
        features = [*qkv_XD.split([keys, keys, qkv_XD.shape[0] - 2 * keys]), gates_XD]
        return torch.cat([rows.unflatten(0, (self.num_keys, -1)) for rows in features], 1).flatten(0, 1)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Queries, keys and values of one projection: [outputs of all, inputs], or biases [outputs of all]."""
    return torch.cat(list(parts))


def kernel_of_frames(parts: Sequence[Tensor]) -> Tensor:
    """Kernel of a convolution in time, height and width.

    parts: one for each frame, [outputs, channels, height, width].
    """
    return torch.stack(list(parts), 2)
