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


# Makes a tensor of those that a file has in its place, in the order of their names in `TensorNames.parts`.
Join = Callable[[Sequence[Tensor]], Tensor]


def latent_projection(parts: Sequence[Tensor]) -> Tensor:
    """`kv_b_proj` of latent attention, [heads * (keys + values), latent].

    parts: keys [heads, latent, size of a key], values [heads, size of a value, latent].
    """
    keys_HCN, values_HVC = parts
    return torch.cat((keys_HCN.transpose(1, 2), values_HVC), 1).flatten(0, 1)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Queries, keys and values of one projection: [outputs of all, inputs], or biases [outputs of all]."""
    return torch.cat(list(parts))


def kernel_of_frames(parts: Sequence[Tensor]) -> Tensor:
    """Kernel of a convolution in time, height and width.

    parts: one for each frame, [outputs, channels, height, width].
    """
    return torch.stack(list(parts), 2)
