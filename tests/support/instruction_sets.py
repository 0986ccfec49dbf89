"""Fixtures of tests that run on every instruction set of the C++ kernels, and in every order of bfloat16 products.

A `conftest.py` imports the fixtures. Without built kernels, tests that use them are skipped.
"""

from __future__ import annotations

import pytest

from penstock.kernels.native import Bfloat16Layout, NativeKernels, available_instruction_sets, load_native_kernels

AVAILABLE = [found.name for found in available_instruction_sets()]
needs_native_kernels = pytest.mark.skipif(not AVAILABLE, reason="the C++ kernels were not built")


@pytest.fixture(params=AVAILABLE, scope="module")
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_native_kernels(request.param)
    assert loaded is not None
    return loaded


@pytest.fixture(params=Bfloat16Layout, ids=lambda layout: layout.name, scope="module")
def layout(request: pytest.FixtureRequest) -> Bfloat16Layout:
    return request.param
