"""Sizes for people."""

from __future__ import annotations

import pytest

from penstock.observability.units import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(5, "5 bytes"), (1536, "1.50 KiB"), (5 * 2**20, "5.00 MiB"), (2**30 + 2**29, "1.50 GiB")],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
