"""Sizes of products by tiles: how the best ones are chosen, on products by emulated tiles."""

from __future__ import annotations

import pytest
from benchmarks.tile_choices import CHOICES, Choice, best_choices

from benchmarks import tile_choices
from penstock.kernels.native import NATIVE

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")


def test_the_fastest_sizes_are_kept_and_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NATIVE is not None
    set_choices = NATIVE.module.set_tile_choices
    before = set_choices()
    assert set(before) == {choice.name for choice in CHOICES}

    class Product(tile_choices.Product):
        def seconds(self, x_TI: object, budget_s: float) -> float:
            super().seconds(x_TI, budget_s)  # type: ignore[arg-type]
            now = set_choices()
            return 1.0 + abs(now["depth"] - 4) + (now["panels_at_once"] == 2) / 1000

    monkeypatch.setattr(tile_choices, "Product", Product)
    lines: list[str] = []
    choices = [Choice("depth", (2, 4, 64), (1, 17)), Choice("panels_at_once", (1, 2), (3,)), CHOICES[-1]]
    try:
        best = best_choices(set_choices, ["66x40"], 1, lines.append, most_bytes=1, choices=choices)
        # One in a thousand is no gain.
        assert best == before | {"depth": 4}
        assert set_choices() == best
    finally:
        set_choices(*before.values())
    assert lines[2] == "| depth | 1 17 | 2: 0.231, 4: 0.077, 16: 1.000, 64: 4.692 | 4 |"
