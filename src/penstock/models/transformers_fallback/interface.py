"""Adapter of the Transformers attention interface to paged attention.

Transformers looks attention functions up by name in a process-wide registry. The two registered here are stateless and
read their parameters from the calling module, because some families do not pass keyword arguments down.

Suffixes: T tokens of the step, H query heads, K KV heads, D head size, _1… a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from penstock.attention import ForwardContext, Heads, LayerAttention
from penstock.layers.attention import Attention


class CannotRun(Exception):
    """The reason, as the second half of a sentence; the caller adds the model's name."""


# Names in the Transformers registry. The paged one has no mask function, so that no mask is built. The other one is for
# models that compute with their mask.
PAGED = "penstock_paged"
PAGED_WITH_MASK = "penstock_paged_with_mask"
TRIAL = "penstock_trial"
_ATTENTION = "penstock_attention"
_RECORD = "penstock_record"
_MASK_FUNCTION = "penstock_mask_function"


# Called for every attention call of a trial run: module, query [1, H, T, D], key [1, K, T, D], value, and all other
# arguments. Returns the attention output: [1, T, H, D].
Record: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]


class ContextSlot:
    """Holds the forward context of a wrapped model while its own code runs.

    The one exception to the rule that a context is an argument: modules of Transformers call each other without one,
    so the library's layers among them read it here.
    """

    def __init__(self) -> None:
        self._context: ForwardContext | None = None

    @contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        self._context = context
        try:
            yield
        finally:
            self._context = None

    @property
    def context(self) -> ForwardContext:
        assert self._context is not None, "a layer ran outside of its model's forward pass"
        return self._context


class SlotAttention(Attention):
    """Attention of a module without a context argument, which reads it from its model's slot.

    Heads of other sizes than the layer's, such as values narrower than keys, are padded with zeros.
    """

    def __init__(self, layer: LayerAttention, slot: ContextSlot) -> None:
        super().__init__(layer)
        self._slot = slot

    def attend_heads(self, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor) -> Tensor:
        """Attention from heads in the Transformers layout: [1, T, H, D], where D is the values' size."""
        size = self.layer.head_size
        heads = (_padded(_token_major(given), size) for given in (query_1HTD, key_1KTD, value_1KTD))
        output_THD = self._slot.context.attend(self.layer, Heads(*heads))
        return output_THD[..., : value_1KTD.shape[-1]].unsqueeze(0)


def install_attention(module: nn.Module, layer: LayerAttention, slot: ContextSlot) -> None:
    """Make a Transformers attention module run `layer`."""
    setattr(module, _ATTENTION, SlotAttention(layer, slot))


@contextmanager
def recording(model: nn.Module, record: Record) -> Iterator[None]:
    """Record all attention calls of the model inside the block (implementation TRIAL)."""
    modules = list(model.modules())
    for module in modules:
        setattr(module, _RECORD, record)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _RECORD)


def mask_function_of(mask: Tensor) -> Any | None:
    """Return the mask function of a mask made during a trial; None for any other tensor."""
    return getattr(mask, _MASK_FUNCTION, None)


def _token_major(heads_1HTD: Tensor) -> Tensor:
    heads_THD = heads_1HTD[0].transpose(0, 1)
    return heads_THD if heads_THD.stride(-1) == 1 else heads_THD.contiguous()


def _padded(heads_THD: Tensor, size: int) -> Tensor:
    missing = size - heads_THD.shape[-1]
    return F.pad(heads_THD, (0, missing)) if missing else heads_THD


def _paged_attention(
    module: nn.Module, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, *_mask: Any, **_arguments: Any
) -> tuple[Tensor, None]:
    """Ignore other arguments: the trial run has checked them, and `layer` includes them."""
    return getattr(module, _ATTENTION).attend_heads(query_1HTD, key_1KTD, value_1KTD), None


def _trial_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    record: Record = getattr(module, _RECORD)
    arguments["attention_mask"] = attention_mask
    return record(module, query_1HTD, key_1KTD, value_1KTD, arguments), None


def _trial_mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_arguments: Any) -> Tensor:
    """Make a mask without values that carries its mask function, to be recognised in attention calls."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, device="meta")
    setattr(mask, _MASK_FUNCTION, mask_function)
    return mask


def _no_mask(**_arguments: Any) -> Tensor:
    return torch.zeros(())


AttentionInterface.register(PAGED, _paged_attention)
AttentionInterface.register(PAGED_WITH_MASK, _paged_attention)
AttentionMaskInterface.register(PAGED_WITH_MASK, _no_mask)
AttentionInterface.register(TRIAL, _trial_attention)
AttentionMaskInterface.register(TRIAL, _trial_mask)
