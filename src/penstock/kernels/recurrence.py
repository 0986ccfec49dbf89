"""Causal convolution, linear recurrences and gated norms of recurrent layers.

A recurrence advances a matrix per head, token by token, in one order of sums, so that the state at a position has one
value: by decode, verification of drafts, any chunks, or from a snapshot. State-space models (Mamba, arXiv:2312.00752;
Mamba 2, arXiv:2405.21060), the gated delta rule (arXiv:2412.06464; with a decay per key channel, arXiv:2510.26692),
lightning attention (arXiv:2401.04658) and the RG-LRU (arXiv:2402.19427) are cases of it.
Suffixes: T tokens, R requests, B pages, C channels, K taps of a convolution, H heads, G groups of heads with common
keys and queries, N keys' size, P values' size, W width of gates, X concatenated heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.native.recurrence import NativeRecurrence, StateRequests
from penstock.kernels.recurrence_rule import ConvolutionRule as ConvolutionRule
from penstock.kernels.recurrence_rule import GateName as GateName
from penstock.kernels.recurrence_rule import GateRule as GateRule
from penstock.kernels.recurrence_rule import GroupOfRanks as GroupOfRanks
from penstock.kernels.recurrence_rule import ScanParameters as ScanParameters
from penstock.kernels.recurrence_rule import ScanRule as ScanRule
from penstock.kernels.recurrent_state import StateStep
from penstock.kernels.triton import triton_runs

# Of the norm of queries and keys, as in the paper's implementation of the gated delta rule.
_UNIT_EPS = 1e-6


def convolve(
    x_TW: Tensor,
    inputs_BKC: Tensor,
    step: StateStep | StateRequests,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    rule: ConvolutionRule,
) -> Tensor:
    """Causal depthwise convolution of columns of x: [T, C], in x's dtype.

    inputs_BKC: [B, K - 1, C], pages of the last inputs of a request; with bfloat16 ones, all inputs are rounded.
    """
    native = native_recurrence([x_TW], inputs_BKC, [weight_KC, bias_C])
    if native is not None:
        requests = step.of_library if isinstance(step, StateStep) else step
        return native.convolve(x_TW, inputs_BKC, requests, weight_KC, bias_C, rule)
    assert isinstance(step, StateStep), "only the library's operations are traced"
    version = triton_recurrence([x_TW], [weight_KC, bias_C])
    run = convolve_reference if version is None else version.convolve
    return run(x_TW, inputs_BKC, step, weight_KC, bias_C, rule)


def convolve_reference(
    x_TW: Tensor,
    inputs_BKC: Tensor,
    step: StateStep,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    rule: ConvolutionRule,
) -> Tensor:
    """The specification of `convolve`."""
    channels = weight_KC.shape[1]
    inputs_TC = x_TW[:, rule.offset : rule.offset + channels].float()
    if rule.gates is not None:
        before_TC, after_TC = (x_TW[:, first : first + channels].float() for first in rule.gates)
        inputs_TC = before_TC * inputs_TC
    inputs_TC = inputs_TC.to(inputs_BKC.dtype).float()
    weight_KC = weight_KC.float()

    def advance(inputs_RKC: Tensor, tokens_R: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        inputs_RKC = torch.cat((inputs_RKC, inputs_TC[tokens_R].unsqueeze(1)), 1)
        sums_RC = torch.zeros_like(inputs_RKC[:, 0]) if bias_C is None else bias_C.float().expand(len(tokens_R), -1)
        for inputs_RC, weight_C in zip(inputs_RKC.unbind(1), weight_KC.unbind(0), strict=True):
            sums_RC = sums_RC + inputs_RC * weight_C
        return inputs_RKC[:, 1:], sums_RC

    out_TC = _token_by_token(advance, inputs_BKC, step, len(x_TW), channels)
    if rule.activation is not None:
        out_TC = _activate(rule.activation, out_TC)
    if rule.gates is not None:
        out_TC = after_TC * out_TC
    return out_TC.to(x_TW.dtype)


def scan(
    mixed_TC: Tensor,
    gates_TW: Tensor,
    states_BHNP: Tensor,
    step: StateStep | StateRequests,
    rule: ScanRule,
    parameters: ScanParameters,
) -> Tensor:
    """A linear recurrence over the tokens of each request: [T, H * P], in the dtype of the mixed rows.

    states_BHNP: pages, float32, or bfloat16: a state is rounded after every token.
    """
    native = native_recurrence([mixed_TC, gates_TW], states_BHNP, parameters)
    if native is not None:
        requests = step.of_library if isinstance(step, StateStep) else step
        return native.scan(mixed_TC, gates_TW, states_BHNP, requests, rule, parameters)
    assert isinstance(step, StateStep), "only the library's operations are traced"
    version = triton_recurrence([mixed_TC, gates_TW], parameters)
    run = scan_reference if version is None else version.scan
    return run(mixed_TC, gates_TW, states_BHNP, step, rule, parameters)


def scan_reference(
    mixed_TC: Tensor,
    gates_TW: Tensor,
    states_BHNP: Tensor,
    step: StateStep,
    rule: ScanRule,
    parameters: ScanParameters,
) -> Tensor:
    """The specification of `scan`."""
    _, num_heads, key_size, value_size = states_BHNP.shape
    decay_log, step_bias, skip = (None if one is None else one.float() for one in parameters)
    assert decay_log is not None, "every recurrence decays"
    decay_rate_HNP = decay_log.view(num_heads, 1, 1).exp() if decay_log.dim() == 1 else decay_log.exp()
    sizes = {"head": (1, 1), "key": (key_size, 1), "value": (1, value_size)}

    def of_heads(rows_RC: Tensor, first: int, num_heads: int, size: int) -> Tensor:
        return rows_RC[:, first : first + num_heads * size].view(-1, num_heads, size)

    def keys(rows_RC: Tensor, first: int | None) -> Tensor:
        """Keys or queries, [R, H, N, 1]."""
        if first is None:
            return rows_RC.new_ones(1, 1, 1, 1)
        rows_RGN = of_heads(rows_RC, first, rule.num_groups, key_size)
        if rule.has_unit_keys:
            rows_RGN = rows_RGN * (_sum(rows_RGN * rows_RGN, 2).unsqueeze(2) + _UNIT_EPS).rsqrt()
        return rows_RGN.repeat_interleave(num_heads // rule.num_groups, 1).unsqueeze(3)

    def advance(states_RHNP: Tensor, tokens_R: Tensor, is_first_R: Tensor) -> tuple[Tensor, Tensor]:
        mixed_RC, gates_RW = mixed_TC[tokens_R].float(), gates_TW[tokens_R].float()
        keys_RHN1, queries_RHN1 = keys(mixed_RC, rule.keys), keys(mixed_RC, rule.queries) * rule.query_scale
        values_RH1P = of_heads(mixed_RC, rule.values, num_heads, value_size).unsqueeze(2)
        steps_RHNP = torch.ones_like(values_RH1P[..., :1])
        if rule.steps is not None:
            size = sizes[rule.step_size]
            steps_RX = gates_RW[:, rule.steps :][:, : num_heads * size[0] * size[1]] * rule.step_scale
            steps_RX = steps_RX if step_bias is None else steps_RX + step_bias.view(-1)
            steps_RX = _softplus(steps_RX) if rule.step_activation == "softplus" else _activate("sigmoid", steps_RX)
            steps_RHNP = steps_RX.clamp(rule.min_step, rule.max_step).view(-1, num_heads, *size)
        decays_RHNP = (-decay_rate_HNP * steps_RHNP).exp()
        states_RHNP = states_RHNP * decays_RHNP
        added_RH1P = values_RH1P
        if rule.betas is not None:
            betas_RH11 = of_heads(gates_RW, rule.betas, num_heads, 1).unsqueeze(3)
            betas_RH11 = _activate("sigmoid", betas_RH11) * rule.beta_scale
            added_RH1P = betas_RH11 * (values_RH1P - _sum(states_RHNP * keys_RHN1, 2).unsqueeze(2))
        elif rule.scales_values:
            added_RH1P = steps_RHNP * values_RH1P
        added_RHNP = keys_RHN1 * added_RH1P
        if rule.keeps_variance:
            left_RHNP = (1 - decays_RHNP * decays_RHNP).sqrt()
            added_RHNP = added_RHNP * torch.where(is_first_R.view(-1, 1, 1, 1), 1.0, left_RHNP)
        states_RHNP = states_RHNP + added_RHNP
        out_RHP = _sum(states_RHNP * queries_RHN1, 2)
        if skip is not None:
            out_RHP = out_RHP + skip.view(num_heads, -1) * values_RH1P.squeeze(2)
        return states_RHNP, out_RHP.flatten(1)

    return _token_by_token(advance, states_BHNP, step, len(mixed_TC), num_heads * value_size).to(mixed_TC.dtype)


def gated_norm(
    y_TX: Tensor,
    gate_TW: Tensor,
    weight: Tensor | None,
    eps: float,
    rule: GateRule,
) -> Tensor:
    """RMSNorm by groups of y, with a gate from columns of other rows: [T, X], in y's dtype.

    weight: [X], or one for all groups; None for the gate alone.
    """
    native = native_recurrence([y_TX, gate_TW], None, [weight])
    if native is not None:
        return native.gated_norm(y_TX, gate_TW, weight, eps, rule)
    version = triton_recurrence([y_TX, gate_TW], [weight])
    run = gated_norm_reference if version is None else version.gated_norm
    return run(y_TX, gate_TW, weight, eps, rule)


def gated_norm_reference(
    y_TX: Tensor,
    gate_TW: Tensor,
    weight: Tensor | None,
    eps: float,
    rule: GateRule,
) -> Tensor:
    """The specification of `gated_norm`."""
    wide_TX = y_TX.float()
    gate_TX = _activate(rule.activation, gate_TW[:, rule.offset : rule.offset + y_TX.shape[1]].float() * rule.scale)
    if weight is None:
        return (wide_TX * gate_TX).to(y_TX.dtype)
    groups_TGX = (wide_TX * gate_TX if rule.gates_first else wide_TX).unflatten(1, (-1, rule.group_size))
    scale_TG1 = (groups_TGX * groups_TGX).mean(2, keepdim=True).add_(eps).rsqrt_()
    normed_TX: Tensor = (groups_TGX * scale_TG1 * weight.float().view(-1, rule.group_size)).flatten(1)
    return (normed_TX if rule.gates_first else normed_TX * gate_TX).to(y_TX.dtype)


def group_squares(x_TX: Tensor, group: GroupOfRanks) -> Tensor:
    """Sums of squares of this rank's channels, [T, groups] in x's dtype: zero in other groups than its own."""
    native = native_recurrence([x_TX], None, [])
    if native is not None:
        return native.group_squares(x_TX, group)
    squares_TG = x_TX.new_zeros(x_TX.shape[0], group.num_groups)
    squares_TG[:, group.number] = x_TX.float().square().sum(1)
    return squares_TG


def shared_group_norm(x_TX: Tensor, squares_TG: Tensor, weight_X: Tensor, eps: float, group: GroupOfRanks) -> Tensor:
    """RMSNorm of this rank's channels of a group, from the sums of squares of all ranks: [T, X], in x's dtype."""
    native = native_recurrence([x_TX, squares_TG], None, [weight_X])
    if native is not None:
        return native.shared_group_norm(x_TX, squares_TG, weight_X, eps, group)
    mean_T1 = squares_TG[:, group.number : group.number + 1].float() / group.group_size
    return (x_TX.float() * (mean_T1 + eps).rsqrt() * weight_X.float()).to(x_TX.dtype)


def native_recurrence(
    rows: Sequence[Tensor], states: Tensor | None, parameters: Sequence[Tensor | None]
) -> NativeRecurrence | None:
    """The C++ kernels, where they take these tensors; None elsewhere."""
    if NATIVE is None or NATIVE.recurrence is None or not all(map(NATIVE.runs, rows)):
        return None
    return NATIVE.recurrence if NATIVE.recurrence.takes(rows, states, parameters) else None


def triton_recurrence(rows: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> ModuleType | None:
    """The Triton kernels, where they take these tensors; None elsewhere."""
    if not triton_runs(rows[0]):
        return None
    from penstock.kernels.triton import recurrence

    return recurrence if recurrence.takes(rows, parameters) else None


def _token_by_token(
    advance: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    states_BX: Tensor,
    step: StateStep,
    num_tokens: int,
    width: int,
) -> Tensor:
    """Advance the states of all requests together, and keep those that have a page: [T, width] of outputs, float32.

    advance: returns the next states, float32 [R, ...], and outputs [R, width], from states, rows of tokens, int64 [R],
    and whether they are the first ones of their requests, bool [R].
    """
    pages, device = step.pages(), states_BX.device
    starts_R, ends_R = step.query_start_loc[:-1].long(), step.query_start_loc[1:].long()
    is_begun_RX = (pages.before_R > 0).view(-1, *[1] * (states_BX.dim() - 1))
    states_RX = torch.where(is_begun_RX, states_BX[pages.before_R].float(), 0.0)
    # One row more, for requests with fewer tokens than others.
    out_TX = torch.zeros(num_tokens + 1, width, device=device)
    for offset in range(step.max_query_len):
        is_there_R = starts_R + offset < ends_R
        tokens_R = torch.where(is_there_R, starts_R + offset, num_tokens - 1)
        is_first_R = (pages.before_R == 0) if offset == 0 else torch.zeros_like(is_there_R)
        advanced_RX, out_RX = advance(states_RX, tokens_R, is_first_R)
        kept_RX = advanced_RX.to(states_BX.dtype)
        for pages_T in (pages.own_T, pages.snapshots_T):
            # Page 0 takes what is not kept.
            states_BX[torch.where(is_there_R, pages_T[tokens_R], 0)] = kept_RX
        out_TX[torch.where(is_there_R, tokens_R, num_tokens)] = out_RX
        states_RX = kept_RX.float()
    return out_TX[:-1]


def _sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, elementwise, so that bits depend on nothing else."""
    size = x.shape[dim]
    while size > 1:
        half = size // 2
        halves = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = halves if size % 2 == 0 else torch.cat((halves, x.narrow(dim, size - 1, 1)), dim)
        size = x.shape[dim]
    return x.squeeze(dim)


def _activate(name: GateName, x: Tensor) -> Tensor:
    """Activation by functions whose bits do not depend on an element's place, unlike those of torch's fused ones."""
    return (x if name == "silu" else 1.0) / (1.0 + x.neg().exp())


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + x.abs().neg().exp().log1p()
