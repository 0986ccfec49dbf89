"""Segments and words of a piece, with their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.transcription.attempts import Attempt
from penstock.engine.transcription.pieces import Piece
from penstock.engine.transcription.speech_tokens import SpeechTokens
from penstock.engine.transcription.transcript import Segment, Word
from penstock.engine.transcription.words import positions_of_tokens, words_of


@dataclass(frozen=True, slots=True)
class TimedSegment:
    """A segment. numbers: of its text tokens among those of the piece."""

    segment: Segment
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of tokens. text: of tokens, without special ones. seconds_of_stamp: between two timestamps."""

    tokens: SpeechTokens
    text: Callable[[Sequence[int]], str]
    seconds_of_stamp: float

    def segments(self, piece: Piece, attempt: Attempt, first: int) -> list[TimedSegment]:
        """Segments of a piece, by its timestamps. first: id of the first segment."""
        found: list[TimedSegment] = []
        begin_s, numbers = 0.0, list[int]()

        def end_segment(end_s: float) -> None:
            tokens = [attempt.token_ids[number] for number in numbers]
            text = self.text(tokens)
            if text.strip():
                segment = Segment(
                    id=first + len(found),
                    seek=round(piece.start_s * 100),
                    start=round(piece.start_s + min(begin_s, piece.seconds), 3),
                    end=round(piece.start_s + min(max(begin_s, end_s), piece.seconds), 3),
                    text=text,
                    tokens=tokens,
                    temperature=attempt.temperature,
                    avg_logprob=attempt.avg_logprob,
                    compression_ratio=attempt.compression_ratio,
                    no_speech_prob=attempt.no_speech_prob,
                )
                found.append(TimedSegment(segment, list(numbers)))
            numbers.clear()

        for number, token_id in enumerate(attempt.token_ids):
            stamp = self.tokens.stamp(token_id)
            if stamp is not None:
                end_segment(stamp * self.seconds_of_stamp)
                begin_s = stamp * self.seconds_of_stamp
            elif token_id < self.tokens.end:
                numbers.append(number)
        end_segment(piece.seconds)
        return found

    def words(
        self,
        piece: Piece,
        segments: Sequence[TimedSegment],
        attention_NS: NDArray[np.float32],
        language: str | None,
    ) -> list[Word]:
        """Words of a piece's segments. attention_NS: of all tokens of the piece but the last one."""
        times_s = [piece.start_s + one * self.seconds_of_stamp for one in positions_of_tokens(attention_NS)]
        # The last token is spoken where the one before it is: it is the end token of most texts.
        times_s.append(times_s[-1])
        found = []
        for one in segments:
            for text, begin, end in words_of(self.text, one.segment.tokens, language):
                start_s, after = times_s[one.numbers[begin]], one.numbers[end - 1] + 1
                end_s = times_s[after] if after < len(times_s) else one.segment.end
                if not text.strip():
                    continue
                found.append(Word(word=text.strip(), start=round(start_s, 3), end=round(max(start_s, end_s), 3)))
        return found
