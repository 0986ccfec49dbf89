"""Staged writes against plain assignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import DeviceConfig
from penstock.device import create_device
from penstock.runner.staging import SlotParameter, StagedTensor

DEVICE = create_device(DeviceConfig(device="cpu"))


@settings(max_examples=60, deadline=None)
@given(
    flushes=st.lists(
        st.dictionaries(
            st.integers(0, 4), st.tuples(st.integers(0, 7), st.lists(st.integers(-9, 9), max_size=8)), max_size=5
        ),
        max_size=5,
    )
)
def test_flushed_writes_equal_assignments(flushes: list[dict[int, tuple[int, list[int]]]]) -> None:
    staged = StagedTensor(DEVICE, 5, 15, torch.int32)
    expected = np.zeros((5, 15), dtype=np.int32)
    for writes in flushes:
        before = staged.tensor.clone()
        for row, (start, values) in writes.items():
            staged.stage(row, start, values)
            expected[row, start : start + len(values)] = values
        assert torch.equal(staged.tensor, before), "a staged write must wait for the flush"
        staged.flush()
        assert np.array_equal(staged.tensor.numpy(), expected)


def test_a_write_past_the_row_is_refused_and_a_discarded_one_never_arrives() -> None:
    staged = StagedTensor(DEVICE, 3, 4, torch.int64)
    with pytest.raises(IndexError, match="outside a row of 4"):
        staged.stage(0, 3, [1, 2])
    staged.stage(0, 0, [1, 2])
    staged.stage(1, 0, [3, 4])
    staged.discard(0)
    staged.flush()
    assert staged.tensor.tolist() == [[0, 0, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0]]


def test_a_published_parameter_keeps_its_value_when_the_host_goes_on() -> None:
    parameter = SlotParameter(DEVICE, 3, np.float32, 1.0)
    parameter.set(1, 5.0)
    seen_by_step = parameter.tensor
    parameter.set(1, 7.0)
    assert seen_by_step.tolist() == [1.0, 5.0, 1.0]
    assert parameter.tensor.tolist() == [1.0, 7.0, 1.0]
    assert parameter.any_set(np.array([0, 1]))
    assert not parameter.any_set(np.array([0, 2]))
