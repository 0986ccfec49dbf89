"""Why a model cannot run this way."""

from __future__ import annotations


class CannotRun(Exception):
    """The reason as half a sentence; whoever knows the model's name makes an error of it."""
