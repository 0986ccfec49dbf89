"""Arrays in messages come back with their dtype, shape and numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.contract import ArrayBytes, PooledOutput, decode, encode

_ARRAYS = arrays.arrays(
    st.sampled_from(["<f4", ">f8", "<f2", "int32", "uint8"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(array=_ARRAYS, is_transposed=st.booleans())
def test_an_array_survives_the_wire(array: np.ndarray, is_transposed: bool) -> None:
    array = array.T if is_transposed else array
    message = PooledOutput(step_id=1, req_ids=["r", "s"], pooled=[ArrayBytes.of(array), None])
    again = decode(encode(message), PooledOutput)
    assert again == message
    first = again.pooled[0]
    assert first is not None
    np.testing.assert_array_equal(first.to_numpy(), array)
    assert first.to_numpy().dtype.name == array.dtype.name


def test_a_list_is_an_array_of_doubles() -> None:
    assert ArrayBytes.of([0.1, 0.2]).to_numpy().tolist() == [0.1, 0.2]


def test_bytes_that_are_not_as_many_as_the_shape_says_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        ArrayBytes(dtype="float32", shape=(3,), data=bytes(8)).to_numpy()
