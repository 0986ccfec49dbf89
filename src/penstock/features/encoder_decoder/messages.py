"""Message parts of encoder-decoder models: a request's source, and of speech its rules and results."""

from __future__ import annotations

from penstock.contract import ArrayBytes, Part
from penstock.contract.parts import OutputPart


class SourcePart(Part, frozen=True, kw_only=True):
    """Input of the encoder.

    length: positions of the encoder's output. token_ids: of a text. features: float32 [bins, frames], of audio; None
    for a text.
    """

    feature = "source"
    length: int
    token_ids: list[int] = []  # noqa: RUF012 - msgspec copies it
    features: ArrayBytes | None = None

    def anon_repr(self) -> str:
        return f"SourcePart(length={self.length})"

    @property
    def needs_all_tokens(self) -> bool:
        """Whether all tokens are computed: their KV depends on the source."""
        return True

    @property
    def source_length(self) -> int:
        return self.length


class SpeechPart(Part, frozen=True, kw_only=True):
    """Rules of a request for a model of speech. timestamps: the text has timestamps, by their rules.

    no_speech: token that says that there is no speech, whose probability is a result; None for none. start: position
    of the token in the prompt that it would follow.
    """

    feature = "speech"
    timestamps: bool = False
    no_speech: int | None = None
    start: int = 0


class AlignmentPart(Part, frozen=True, kw_only=True):
    """Request for the attention of a text's tokens to the source.

    token_ids: the text, which the decoder reads at once, apart from the request's prompt. begin: first token whose
    attention is wanted. positions: of the source, so many from its beginning. heads: layer and head of those whose mean
    it is.
    """

    feature = "alignment"
    token_ids: list[int]
    begin: int
    positions: int
    heads: list[tuple[int, int]]

    def anon_repr(self) -> str:
        return f"AlignmentPart({len(self.token_ids)} tokens)"


class SpeechResult(OutputPart, frozen=True, kw_only=True):
    """Result of a second pass. no_speech_prob: of `SpeechPart`. attention: float32 [tokens, positions]."""

    feature = "speech_result"
    no_speech_prob: float | None = None
    attention: ArrayBytes | None = None


class StepSpeech(Part, frozen=True, kw_only=True):
    """Results of a step's second passes, by request."""

    feature = "step_speech"
    results: dict[str, SpeechResult]
