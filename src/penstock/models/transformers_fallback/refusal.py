"""Reason why a model cannot run through Transformers."""

from __future__ import annotations


class CannotRun(Exception):
    """The reason, as the second half of a sentence; the caller adds the model's name."""
