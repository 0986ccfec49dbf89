"""Speculative decoding: one file per method behind `Speculator`."""

from penstock.runner.speculative.speculator import NO_SPECULATOR, NoSpeculator, Speculator, SpeculatorServices

__all__ = ["NO_SPECULATOR", "NoSpeculator", "Speculator", "SpeculatorServices"]
