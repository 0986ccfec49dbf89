"""How long to wait before what failed is started again."""

from __future__ import annotations

_FIRST_S, _LONGEST_S = 0.05, 5.0


def pause_before_restart(num_failures: int) -> float:
    """Seconds after so many failures in a row: none at first, then 0.2 s, 0.4 s and so on."""
    return 0.0 if num_failures <= 1 else min(_LONGEST_S, _FIRST_S * 2.0**num_failures)
