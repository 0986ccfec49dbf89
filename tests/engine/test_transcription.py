"""Transcripts of speech: pieces, segments and forms; tokens are those of Transformers."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.transcription.pieces import pieces_of
from penstock.engine.transcription.transcript import Segment, Transcript
from support.encoder_decoders import (
    FIRST_STAMP,
    SPECIAL_IDS,
    SPEECH_RULES,
    AskedOfAudio,
    speech_tokens,
    tone,
    write_speech_model,
)
from support.engines import SMALL
from support.servers import Served, serving

RATE = 16_000
OPTIONS = {**SMALL, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return write_speech_model(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 1.7 s, of which the model hears a second at once."""
    path = tmp_path_factory.mktemp("sounds") / "sound.wav"
    samples = tone(1.7)
    samples[12_000:13_600] = 0
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="module")
def served(folder: Path, oracle: Any) -> Iterator[Served]:
    with serving(AsyncEngine(folder, **OPTIONS)) as running:
        yield running


def pieces_of_file(path: Path) -> list[np.ndarray]:
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    return [piece.samples_N for piece in pieces_of(samples, RATE, RATE)]


def expected_tokens(
    folder: Path, oracle: Any, sound: Path, *, task: str, timestamps: bool, language: str | None = None
) -> tuple[str, list[list[int]]]:
    """Language, and the tokens of each piece."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = [extractor(one, sampling_rate=RATE, return_tensors="pt").input_features for one in pieces_of_file(sound)]
    start = SPECIAL_IDS["<|startoftranscript|>"]
    if language is None:
        with torch.no_grad():
            logits = oracle(features[0], decoder_input_ids=torch.tensor([[start]])).logits[0, -1]
        language = max(("en", "de"), key=lambda code: float(logits[SPECIAL_IDS[f"<|{code}|>"]]))
    decoder = [start, SPECIAL_IDS[f"<|{language}|>"], SPECIAL_IDS[f"<|{task}|>"]]
    decoder += [] if timestamps else [SPECIAL_IDS["<|notimestamps|>"]]
    asked = [AskedOfAudio(one[0], decoder) for one in features]
    room = 64 - len(decoder)
    return language, [speech_tokens(oracle, one, SPEECH_RULES, timestamps, room) for one in asked]


@pytest.mark.one_path(reason="no step")
@pytest.mark.parametrize("num_samples", [1, 15_999, 16_000, 16_001, 50_000])
def test_pieces_are_all_of_a_sound(num_samples: int) -> None:
    samples = tone(num_samples / RATE)
    found = list(pieces_of(samples, RATE, RATE))
    np.testing.assert_array_equal(np.concatenate([piece.samples_N for piece in found]), samples)
    assert all(0 < len(piece.samples_N) <= RATE for piece in found)
    assert [piece.start_s for piece in found] == pytest.approx(
        [0.0, *np.cumsum([piece.seconds for piece in found])[:-1]]
    )


@pytest.mark.one_path(reason="no step")
def test_a_cut_is_where_it_is_quiet(sound: Path) -> None:
    first, second = pieces_of_file(sound)
    assert 12_000 <= len(first) <= 13_600
    assert len(first) + len(second) == 27_200


@pytest.mark.one_path(reason="no step")
def test_subtitles_have_times_and_lines_of_their_own() -> None:
    fields: dict[str, Any] = {"seek": 0, "tokens": [], "temperature": 0.0, "avg_logprob": 0.0, "compression_ratio": 1.0}
    segments = [
        Segment(id=0, start=0.0, end=1.5, text=" Hello --> \n\n you", **fields),
        Segment(id=1, start=3661.25, end=3662.0, text=" there.", **fields),
    ]
    found = Transcript(task="transcribe", language="en", duration=3663.2, text="", segments=segments)
    assert found.written("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> you\n\n2\n01:01:01,250 --> 01:01:02,000\nthere.\n"
    )
    assert found.written("vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello -> you\n\n01:01:01.250 --> 01:01:02.000\nthere.\n"
    )
    assert found.written("json") == {"text": "", "usage": {"type": "duration", "seconds": 3664}}


@pytest.mark.one_path(reason="equal to Transformers in either case")
def test_openais_client_gets_the_text_of_transformers(folder: Path, oracle: Any, served: Served, sound: Path) -> None:
    audio, tokenizer = served.client().audio, served.engine.own_tokenizer
    language, pieces = expected_tokens(folder, oracle, sound, task="transcribe", timestamps=False)
    text = "".join(tokenizer.decode([one for one in ids if one < 380]) for ids in pieces).strip()
    assert audio.transcriptions.create(model="demo", file=sound).text == text
    with_language = audio.transcriptions.create(model="demo", file=sound, language=language, response_format="text")
    assert str(with_language).strip() == text
    other = "de" if language == "en" else "en"
    assert audio.transcriptions.create(model="demo", file=sound, language=other).text != text
    _, pieces = expected_tokens(folder, oracle, sound, task="translate", timestamps=False)
    text = "".join(tokenizer.decode([one for one in ids if one < 380]) for ids in pieces).strip()
    assert audio.translations.create(model="demo", file=sound).text == text


@pytest.mark.one_path(reason="equal to Transformers in either case")
def test_a_language_may_be_given_by_its_name_in_any_case(served: Served, sound: Path) -> None:
    audio = served.client().audio.transcriptions
    texts = [audio.create(model="demo", file=sound, language=name).text for name in ("de", "DE", "German", " german ")]
    assert texts == texts[:1] * 4


def test_segments_are_between_the_timestamps_of_transformers(
    folder: Path, oracle: Any, served: Served, sound: Path
) -> None:
    language, pieces = expected_tokens(folder, oracle, sound, task="transcribe", timestamps=True)
    found = served.client().audio.transcriptions.create(model="demo", file=sound, response_format="verbose_json")
    assert (found.language, found.duration) == (language, 1.7)
    segments = found.segments or []
    assert [one.id for one in segments] == list(range(len(segments)))
    assert [token for one in segments for token in one.tokens] == [one for ids in pieces for one in ids if one < 380]
    assert all(0 <= one.start <= one.end <= 1.7 and one.avg_logprob < 0 for one in segments)
    first = [one for one in segments if one.seek == 0]
    assert len({one.seek for one in segments}) == 2
    stamps = [(one - FIRST_STAMP) * 0.02 for one in pieces[0] if one >= FIRST_STAMP]
    assert first[0].start == pytest.approx(min(stamps[0], first[0].end), abs=1e-3)
    subtitles = served.client().audio.transcriptions.create(model="demo", file=sound, response_format="srt")
    assert str(subtitles).count(" --> ") == len(segments)


@pytest.mark.one_path(reason="equal to a whole answer")
def test_a_stream_has_the_text_of_a_whole_answer(served: Served, sound: Path) -> None:
    audio = served.client().audio
    whole = audio.transcriptions.create(model="demo", file=sound).text
    events = list(audio.transcriptions.create(model="demo", file=sound, stream=True))
    assert [one.type for one in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert "".join(one.delta for one in events[:-1]).strip() == whole == events[-1].text  # type: ignore[union-attr]
    assert len(events) > 3


@pytest.mark.one_path(reason="equal to an offline transcription in test_speech_attempts.py")
def test_openais_client_asks_for_words_and_further_attempts(served: Served, sound: Path) -> None:
    create = served.client().audio.transcriptions.create
    plain = create(model="demo", file=sound, response_format="verbose_json")
    found = create(
        model="demo",
        file=sound,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        extra_body={
            "temperature": [0.0, 0.4],
            "compression_ratio_threshold": 0.1,
            "no_speech_threshold": "inf",
            "seed": 1,
        },
    )
    assert {one.temperature for one in plain.segments or []} == {0.0}
    assert {one.temperature for one in found.segments or []} == {0.4}
    assert {one.no_speech_prob for one in found.segments or []} == {one.no_speech_prob for one in plain.segments or []}
    assert plain.words is None
    words = found.words or []
    texts = "".join(one.text for one in found.segments or []), "".join(one.word for one in words)
    # Bytes that are no character make one or several marks, by what follows.
    text, text_of_words = ("".join(one.replace("\ufffd", "").split()) for one in texts)
    assert text_of_words == text
    assert [one.start for one in words] == sorted(one.start for one in words)
    assert all(one.start <= one.end <= 1.7 for one in words)
    silent = create(
        model="demo",
        file=sound,
        response_format="text",
        extra_body={"no_speech_threshold": 0.0, "logprob_threshold": 0.0},
    )
    assert str(silent) == "\n"


@pytest.mark.one_path(reason="equal to a server's answer")
def test_the_command_writes_the_transcript(folder: Path, served: Served, sound: Path, tmp_path: Path) -> None:
    text = served.client().audio.transcriptions.create(model="demo", file=sound).text
    options = [part for name, value in OPTIONS.items() for part in ("--option", f"{name}={value}")]
    for form in ("text", "verbose_json"):
        path = tmp_path / form
        command = ["transcribe", str(sound), str(folder), "--format", form, "-o", str(path), *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    path, command = tmp_path / "words", [*command[:4], "verbose_json", "--word-timestamps", "--temperature", "0,0.4"]
    result = CliRunner().invoke(app, [*command, "--logprob-threshold", "0", "-o", str(path), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert {one["temperature"] for one in found["segments"]} == {0.4}
    assert len(found["words"]) >= len(found["segments"])
    assert (tmp_path / "text").read_text() == text + "\n"
    assert json.loads((tmp_path / "verbose_json").read_text())["duration"] == 1.7


@pytest.mark.one_path(reason="refused before a step")
def test_the_command_refuses_what_is_wrong_before_it_loads_the_model(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    for arguments, said in (
        ([tmp_path / "none.wav"], "none.wav' cannot be read: No such file"),
        ([tmp_path], "is not a file"),
        ([tmp_path / "text.wav"], "It is no audio that can be read"),
        ([sound, "-o", sound], "sound.wav is the file of FILE"),
        ([sound, "-o", tmp_path / "none" / "a.txt"], "--output"),
        ([sound, "-o", tmp_path], "--output"),
        ([sound, "--format", "xml"], "xml"),
        ([sound, "--word-timestamps"], "format"),
        ([sound, "--temperature", "warm"], "is no number"),
        ([sound, "--logprob-threshold", "nan"], "nan is not valid"),
    ):
        file, *options = map(str, arguments)
        result = CliRunner().invoke(app, ["transcribe", file, "demo", *options])
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.stderr.split()), result.stderr


@pytest.mark.one_path(reason="refused before a step")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "fr"}, "language='fr' is not one of this model. Allowed: en, de, or their"),
        ({"language": "french"}, "language='french' is not one of this model."),
        (
            {"logprob_threshold": "nan"},
            "logprob_threshold=nan is not valid. Allowed: a number; inf or",
        ),
        ({"compression_ratio_threshold": "NaN"}, "compression_ratio_threshold=nan is not valid."),
        ({"temperature": "0,nan"}, "temperature=nan is not valid."),
        ({"top_p": "nan"}, "top_p=nan is not valid."),
        ({"repetition_penalty": "-inf"}, "repetition_penalty=-inf is not valid."),
        (
            {"response_format": "xml"},
            "response_format='xml' is not valid. Allowed: json, text, srt, ",
        ),
        ({"response_format": "srt", "stream": "true"}, "response_format='srt' cannot be streamed"),
        ({"timestamp_granularities[]": "word"}, "=word needs response_format=verbose_json, and it is json."),
        ({"timestamp_granularities[]": "letter"}, "='letter' is not valid. Allowed: segment, word."),
        ({"temperature": "0,0.4", "stream": "true"}, "temperature='0,0.4': a stream cannot take its text back."),
        ({"logprob_threshold": "-1", "stream": "true"}, "logprob_threshold='-1': a stream cannot take its text back."),
        ({"no_speech_threshold": "low"}, "no_speech_threshold='low' is no number."),
        ({"temperature": "warm"}, "temperature='warm' is no number."),
        ({"colour": "red"}, "There is no field colour. Allowed: file, "),
        ({"file": "no sound"}, "file: It is no audio that can be read"),
    ],
    ids=str,
)
def test_forms_that_are_not_valid_are_refused(served: Served, fields: dict[str, str], message: str) -> None:
    parts = {"file": "x", **fields}
    body = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"{"; filename=f" * (name == "file")}\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    )
    reply = served.post(
        "/v1/audio/transcriptions", (body + "--b--\r\n").encode(), Content_Type="multipart/form-data; boundary=b"
    )
    assert reply.status == 400
    assert message in reply.error["message"]
