"""Message parts of encoder-decoder models: a request's source, and rules of speech."""

from __future__ import annotations

from penstock.contract import ArrayBytes, Part


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
    """Rules of a request for a model of speech. timestamps: the text has timestamps, by their rules."""

    feature = "speech"
    timestamps: bool = False
