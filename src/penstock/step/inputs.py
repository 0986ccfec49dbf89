"""Declared step inputs of features."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepInput(NamedTuple):
    """A named input of the model's forward pass, with a row per token.

    shape: of one row. padding: value in padding rows.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: float = 0
