"""Formats of weights that a GPU's kernels read. Suffixes: I input features, O output features, G groups of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Formats. Values of int4 and E2M1 are two to a byte: byte b of a tile of `NIBBLE_TILE` holds input b in its low half,
# and input b + `NIBBLE_TILE` in its high half.
PLAIN, INT8, INT4, E2M1, FLOAT8 = "plain", "int8", "int4", "e2m1", "float8"
NIBBLES = INT4, E2M1
NIBBLE_TILE = 128


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight: (value - zero point) * scale. Its tensors are contiguous, and rows of values may be padded.

    values: [O, elements of a row], of floats, float8_e4m3fn or uint8. scales_OG: float32, or exponents of powers of two
    in float32's encoding, uint8; None for plain floats. zeros_OG: uint8, of int4. E2M1 values are twice the numbers.
    group_size: input features that share a scale; the last group may be smaller.
    """

    form: str
    values: Tensor
    num_inputs: int
    group_size: int
    scales_OG: Tensor | None = None
    zeros_OG: Tensor | None = None

    @classmethod
    def plain(cls, weight_OI: Tensor) -> StoredWeight:
        """The weight as it is."""
        return cls(PLAIN, weight_OI, weight_OI.shape[1], weight_OI.shape[1])

    @property
    def num_groups(self) -> int:
        return 1 if self.scales_OG is None else self.scales_OG.shape[1]

    @property
    def layout(self) -> tuple[object, ...]:
        """Layout of the weight, without addresses: weights with equal layouts can be multiplied by one launch."""
        scales = self.scales_OG
        of_scales = None if scales is None else (scales.shape, scales.dtype)
        return self.form, self.values.shape, self.values.dtype, self.num_inputs, self.group_size, of_scales

    def without_values(self) -> StoredWeight:
        """The layout alone, on the meta device."""
        tensors = (None if of is None else of.to("meta") for of in (self.values, self.scales_OG, self.zeros_OG))
        values, scales, zeros = tensors
        assert values is not None, "values"
        return StoredWeight(self.form, values, self.num_inputs, self.group_size, scales, zeros)

    def outputs(self, part: slice) -> StoredWeight:
        """The weight of some output features."""
        scales, zeros = (None if of is None else of[part] for of in (self.scales_OG, self.zeros_OG))
        return StoredWeight(self.form, self.values[part], self.num_inputs, self.group_size, scales, zeros)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts, each with its own memory.

    gate_up: [2 * I, D] of each expert, the gate first. down: [D, I]. Biases: [2 * I] and [D], or None for none.
    """

    gate_up: Sequence[StoredWeight]
    down: Sequence[StoredWeight]
    gate_up_bias: Sequence[Tensor] | None = None
    down_bias: Sequence[Tensor] | None = None

    @classmethod
    def plain(
        cls,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        gate_up_bias: Sequence[Tensor] | None = None,
        down_bias: Sequence[Tensor] | None = None,
    ) -> ExpertWeights:
        """Weights of floats."""
        stored = [[StoredWeight.plain(weight) for weight in weights] for weights in (gate_up, down)]
        return cls(stored[0], stored[1], gate_up_bias, down_bias)


def exponents_of(scales: Tensor) -> Tensor:
    """Exponents of zeros and normal powers of two, in float32's encoding: uint8."""
    return (scales.float().view(torch.int32) >> 23).to(torch.uint8)


def powers_of(exponents: Tensor) -> Tensor:
    """Inverse of `exponents_of`: float32."""
    return (exponents.int() << 23).view(torch.float32)
