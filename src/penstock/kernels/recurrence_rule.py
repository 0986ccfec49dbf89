"""Rules of convolutions, linear recurrences and gates, and a norm's groups.

Suffixes are those of `kernels.recurrence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

# Activations of gates.
GateName = Literal["silu", "sigmoid"]
# Numbers that the kernels have for them, and for sizes of steps.
ACTIVATIONS = {None: 0, "silu": 1, "sigmoid": 2}
STEP_SIZES = {"head": 0, "key": 1, "value": 2}
STEP_ACTIVATIONS = {"softplus": 0, "sigmoid": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRule:
    """A causal depthwise convolution: where a token's row has its operands, and what follows.

    offset: first column of the inputs. gates: columns of factors on the inputs, and on the outputs (LFM2).
    """

    offset: int = 0
    gates: tuple[int, int] | None = None
    activation: GateName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """A gate beside an RMSNorm by groups of channels.

    offset: first column of the gate in its rows. group_size: channels that are normalised together. gates_first:
    norm(y * activation(gate)), instead of norm(y) * activation(gate). scale: factor on the gate before its activation.
    """

    offset: int = 0
    group_size: int = 1
    gates_first: bool = False
    activation: GateName = "silu"
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRule:
    """A linear recurrence: where a token's row has its operands, and how the state advances.

    Of every head, with a state s [N, P], key k and query q [N], value v [P]:

        d = clamp(activation(steps * step_scale + step_bias), min_step, max_step), or 1 without steps
        a = exp(-exp(decay_log) * d), of all elements of the state
        s = s * a
        u = sigmoid(betas) * beta_scale * (v - k^T s), or d * v with `scales_values`, or v
        s = s + k u^T, or s + sqrt(1 - a^2) * k u^T with `keeps_variance`, except for the first token of a request
        y = q^T s + skip * v

    values, keys, queries: first columns among the mixed rows, of [H, P], [G, N] and [G, N]; head h has the keys and
        queries of group h // (H / G). None for keys and queries of ones.
    steps: first column among the gates; None for none. step_size: steps are [H], [H, N] or [H, P].
    betas: first column among the gates, of [H]; None for a recurrence without the delta rule.
    has_unit_keys: queries and keys are divided by their norms. query_scale: factor on queries, after that.
    """

    num_groups: int
    values: int
    keys: int | None
    queries: int | None
    steps: int | None = None
    step_size: Literal["head", "key", "value"] = "head"
    step_activation: Literal["softplus", "sigmoid"] = "softplus"
    step_scale: float = 1.0
    scales_values: bool = False
    keeps_variance: bool = False
    min_step: float = 0.0
    max_step: float = float("inf")
    betas: int | None = None
    beta_scale: float = 1.0
    has_unit_keys: bool = False
    query_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.betas is not None and self.step_size == "value":
            raise ValueError("the delta rule has steps per head or key channel, since it adds up the decayed state.")
        if self.scales_values and self.step_size == "key":
            raise ValueError("steps scale values per head or value channel; a step per key channel has no value.")
        if (self.keeps_variance or None in (self.keys, self.queries)) and self.step_size != "value":
            raise ValueError("keeps_variance, and keys and queries of ones, are for recurrences with steps by value.")


class ScanParameters(NamedTuple):
    """Parameters of a recurrence.

    decay_log: [H], or [H, N, P]. step_bias: as many as steps, [H * N] of steps per key channel; None for none.
    skip: [H], or [H * P]; None for none.
    """

    decay_log: Tensor
    step_bias: Tensor | None = None
    skip: Tensor | None = None


class GroupOfRanks(NamedTuple):
    """A group of channels that are normalised together, of several ranks.

    size: channels of this rank, all in the group of this number. group_size: channels of a group.
    """

    size: int
    number: int
    num_groups: int
    group_size: int
