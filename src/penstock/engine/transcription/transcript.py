"""Transcripts, and their forms: text, subtitles (SRT, WebVTT), and JSON with the fields of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")


class Segment(msgspec.Struct, kw_only=True):
    """Part of a transcript. start, end: in seconds of the sound. tokens: of the text.

    Of the piece in which it lies: seek: where it begins, in hundredths of a second; temperature, avg_logprob,
    compression_ratio, no_speech_prob: as of `Attempt`.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None = None


class Word(msgspec.Struct, kw_only=True):
    """Word of a transcript. start, end: in seconds of the sound."""

    word: str
    start: float
    end: float


class Transcript(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Text of a sound. duration: in seconds. segments: None without timestamps. words: None where none were wanted."""

    task: str
    language: str | None
    duration: float
    text: str
    segments: list[Segment] | None = None
    words: list[Word] | None = None

    def written(self, form: str) -> str | dict[str, Any]:
        """The transcript in one of `FORMATS`: text, or fields."""
        if form == "json":
            return {"text": self.text, "usage": usage_of(self.duration)}
        if form == "text":
            return self.text + "\n"
        if form == "verbose_json":
            fields: dict[str, Any] = msgspec.to_builtins(self)
            return {**fields, "usage": usage_of(self.duration)}
        return _subtitles(self.segments or (), is_vtt=form == "vtt")


def usage_of(duration: float) -> dict[str, Any]:
    """Usage in the form of OpenAI's API. duration: of the sound, in seconds."""
    return {"type": "duration", "seconds": math.ceil(duration)}


def _subtitles(segments: Sequence[Segment], *, is_vtt: bool) -> str:
    point = "." if is_vtt else ","
    blocks = ["WEBVTT"] if is_vtt else []
    for number, one in enumerate(segments, 1):
        times = f"{_time(one.start, point)} --> {_time(one.end, point)}"
        # A blank line ends a subtitle, and an arrow is a line of times.
        text = " ".join(one.text.split()).replace("-->", "->")
        blocks.append(f"{times}\n{text}" if is_vtt else f"{number}\n{times}\n{text}")
    return "\n\n".join(blocks) + "\n"


def _time(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{point}{thousandths:03}"
