"""Backends by name, so that the same test runs over each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from penstock.config.structured import LLGUIDANCE, XGRAMMAR
from support.constraints import constrained_by


@pytest.fixture(params=[LLGUIDANCE, XGRAMMAR])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the backend that the matchers of a test come from."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: it is an extra, and brings triton")
    with constrained_by(request.param):
        yield request.param


@pytest.fixture
def xgrammar() -> Iterator[None]:
    """Let the matchers of a test come from xgrammar."""
    if find_spec(XGRAMMAR) is None:
        pytest.skip("xgrammar is not installed: it is an extra, and brings triton")
    with constrained_by(XGRAMMAR):
        yield
