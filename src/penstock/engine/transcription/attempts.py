"""Attempts at a piece's text, and the thresholds by which one fails.

As in section 4.5 of the paper (Radford et al. 2022, https://arxiv.org/abs/2212.04356).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.contract import SamplingParams
from penstock.contract.param_checks import invalid, shown
from penstock.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of a piece's text; None for no limit.

    compression_ratio: largest; text above it repeats itself. logprob: smallest mean log-probability of the tokens. A
    text beyond either is generated again, at the next temperature.
    no_speech: largest probability that there is no speech; a piece above it is silent, but for a text above `logprob`.
    """

    compression_ratio: float | None = None
    logprob: float | None = None
    no_speech: float | None = None


NO_THRESHOLDS = Thresholds()
# Options of thresholds, with the fields that they set.
THRESHOLD_OPTIONS = {
    "compression_ratio_threshold": "compression_ratio",
    "logprob_threshold": "logprob",
    "no_speech_threshold": "no_speech",
}
# Of OpenAI's Whisper.
_USUAL = Thresholds(compression_ratio=2.4, logprob=-1.0, no_speech=0.6)


def temperatures_of(text: str) -> tuple[float, ...]:
    """Temperatures of attempts, separated by commas. Raises InvalidParameter for what is none."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise InvalidParameter(
            f"temperature={shown(text)} is no number. Allowed: one, or several with commas between them."
        ) from None
    for one in found:
        SamplingParams(temperature=one)
    return found


def thresholds_of(temperatures: Sequence[float], given: Mapping[str, float | None]) -> Thresholds:
    """Thresholds by their options; with several temperatures the usual ones where one is None or missing.

    Raises InvalidParameter for NaN.
    """
    for name, value in given.items():
        if value is not None and math.isnan(value):
            raise invalid(name, value, "a number; inf or -inf for no limit")
    fields = {field: value for name, field in THRESHOLD_OPTIONS.items() if (value := given.get(name)) is not None}
    return replace(_USUAL if len(temperatures) > 1 else NO_THRESHOLDS, **fields)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Text of a piece. prompt_ids, token_ids: of the decoder, the end token among them.

    avg_logprob: mean log-probability of the tokens, by the rules of speech and without temperature; None where the
    engine gives others. no_speech_prob: None where it was not asked for.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    temperature: float
    avg_logprob: float | None
    no_speech_prob: float | None

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text per byte of it compressed: high where it repeats itself."""
        content = self.text.strip().encode()
        return len(content) / len(zlib.compress(content))

    def is_silent(self, thresholds: Thresholds) -> bool:
        """Whether there is no speech in the piece, whatever the text."""
        return (
            thresholds.no_speech is not None
            and self.no_speech_prob is not None
            and self.no_speech_prob > thresholds.no_speech
            and (thresholds.logprob is None or self._is_unlikely(thresholds))
        )

    def fails(self, thresholds: Thresholds) -> bool:
        """Whether the piece is to have another text."""
        most = thresholds.compression_ratio
        repeats = most is not None and self.compression_ratio > most
        return (repeats or self._is_unlikely(thresholds)) and not self.is_silent(thresholds)

    def _is_unlikely(self, thresholds: Thresholds) -> bool:
        least = thresholds.logprob
        return least is not None and self.avg_logprob is not None and self.avg_logprob < least
