"""The garbage collector pauses for imports, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

from penstock.engine.collector import paused_collector


@pytest.mark.parametrize("is_enabled", [True, False])
def test_it_pauses_and_is_left_as_it_was(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
