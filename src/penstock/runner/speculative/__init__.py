"""Who guesses tokens ahead: one file per method behind `Speculator`."""

from penstock.runner.speculative.speculator import NO_SPECULATOR, DraftingStep, NoSpeculator, Speculator

__all__ = ["NO_SPECULATOR", "DraftingStep", "NoSpeculator", "Speculator"]
