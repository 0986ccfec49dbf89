"""Buffers of a model that was built without memory get the values that its class gives them, or are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, initialization

from penstock.models.transformers_fallback.buffers import buffers_on_meta, create_buffers
from penstock.models.transformers_fallback.interface import CannotRun


class Table(nn.Module):
    def __init__(self, values: Tensor, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=persistent)


class Model(PreTrainedModel):
    """Its class gives a value to tables of floating-point numbers only."""

    config_class = PretrainedConfig

    def __init__(self, values: Tensor, *, persistent: bool = False) -> None:
        super().__init__(PretrainedConfig())
        self.table = Table(values, persistent=persistent)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table) and module.values.is_floating_point():
            initialization.copy_(module.values, torch.linspace(0, 1, len(module.values)))


def test_a_buffer_gets_the_value_of_its_class() -> None:
    model = Model(torch.empty(5, device="meta"))
    create_buffers(model)
    assert model.table.values.tolist() == [0, 0.25, 0.5, 0.75, 1]
    with buffers_on_meta(model):
        assert model.table.values.is_meta
    assert model.table.values.tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_buffer_without_a_value_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(CannotRun, match=r"table\.values no value"):
        create_buffers(Model(torch.empty(5, dtype=dtype, device="meta")))


def test_a_buffer_that_checkpoints_hold_needs_no_value() -> None:
    model = Model(torch.empty(5, dtype=torch.int64, device="meta"), persistent=True)
    create_buffers(model)
    assert not model.table.values.is_meta
