"""Attempts at texts of speech, and times of words: the numbers and decisions of Transformers' `generate`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperFeatureExtractor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.session import Session
from penstock.engine.transcription.attempts import NO_THRESHOLDS, Thresholds, thresholds_of
from penstock.engine.transcription.pieces import Piece, pieces_of
from penstock.engine.transcription.transcriber import Asked, Rounds, Transcriber
from penstock.engine.transcription.transcript import Transcript
from penstock.engine.transcription.words import positions_of_tokens, words_of
from penstock.errors import InvalidParameter
from support.encoder_decoders import FIRST_STAMP, SPECIAL_IDS, SPEECH_RULES, tone, write_speech_model
from support.engines import SMALL

RATE = 16_000
SOUND = tone(2.6)
END = SPECIAL_IDS["<|endoftext|>"]
PROMPT = [SPECIAL_IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "transcribe")]
ROOM = 64 - len(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model: Any = write_speech_model(folder)
    model.generation_config = GenerationConfig(
        **SPEECH_RULES, pad_token_id=END, bos_token_id=END, is_multilingual=True, return_timestamps=True
    )
    return model


@pytest.fixture(scope="module")
def session(folder: Path, oracle: Any) -> Iterator[Session]:
    session = Session(config_of(folder))
    yield session
    session.close()


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig.create(str(folder), **SMALL, dtype="float32")


def transcriber_of(session: Session) -> Transcriber:
    return Transcriber(config_of(session.model_config.folder), session.tokenizer, session.max_model_len)


def transcribed(session: Session, sound: np.ndarray = SOUND, **fields: Any) -> Transcript:
    asked = Asked(**{"language": "en", "timestamps": True, **fields})
    rounds = Rounds(transcriber_of(session).speech((sound, RATE), asked).transcription())
    outputs: Any = ()
    while (prompts := rounds.after(outputs)) is not None:
        outputs = session.finish([session.accept(*one) for one in prompts])
    return rounds.result


def pieces(sound: np.ndarray = SOUND) -> list[Piece]:
    return list(pieces_of(sound, RATE, RATE))


class Generated:
    """First round of Transformers' `generate` for a piece, with what it decides."""

    def __init__(self, folder: Path, oracle: Any, piece: Piece, **options: Any) -> None:
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        given = extractor(piece.samples_N, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        self.features = given.input_features
        self.decisions: list[tuple[bool, bool]] = []
        judge = oracle._need_fallback

        def judged(*arguments: Any) -> tuple[bool, bool]:
            self.decisions.append(judge(*arguments))
            return self.decisions[-1]

        oracle._need_fallback = judged
        try:
            with torch.no_grad():
                found = oracle.generate(
                    **given,
                    language="en",
                    task="transcribe",
                    return_timestamps=True,
                    return_segments=True,
                    return_token_timestamps=True,
                    max_new_tokens=ROOM,
                    **options,
                )
        finally:
            del oracle._need_fallback
        self.result = found["segments"][0][0]["result"] if found["segments"][0] else None

    @property
    def tokens(self) -> list[int]:
        tokens = self.result["sequences"][len(PROMPT) :].tolist()
        return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def generated(folder: Path, oracle: Any, **options: Any) -> list[Generated]:
    return [Generated(folder, oracle, piece, **options) for piece in pieces()]


def text_tokens(one: Generated) -> list[int]:
    return [token for token in one.tokens if token < END]


def test_segments_have_the_numbers_of_transformers(folder: Path, oracle: Any, session: Session) -> None:
    """Mean log-probability, probability of silence, and compression of each piece."""
    segments = transcribed(session).segments or []
    for piece, expected in zip(pieces(), generated(folder, oracle, temperature=(0.0,)), strict=True):
        found = [one for one in segments if one.seek == round(piece.start_s * 100)]
        # Segments of blanks are left out.
        visible = [token for token in text_tokens(expected) if session.tokenizer.decode([token]).strip()]
        assert [token for one in found for token in one.tokens if token in visible] == visible
        scores, tokens = expected.result["scores"], torch.tensor(expected.tokens)
        avg_logprob = float(oracle._retrieve_avg_logprobs(scores, tokens, 0.0))
        with torch.no_grad():
            logits = oracle(expected.features, decoder_input_ids=torch.tensor([PROMPT])).logits[0, 0]
        no_speech_prob = float(logits.softmax(-1)[SPECIAL_IDS["<|nospeech|>"]])
        content = session.tokenizer.decode(text_tokens(expected)).strip().encode()
        for one in found:
            assert one.avg_logprob == pytest.approx(avg_logprob, abs=1e-4)
            assert one.no_speech_prob == pytest.approx(no_speech_prob, rel=1e-4)
            assert one.compression_ratio == pytest.approx(len(content) / len(zlib.compress(content)))
            assert one.temperature == 0.0


def test_text_before_the_speech_is_part_of_what_tells_silence(oracle: Any, folder: Path, session: Session) -> None:
    transcript = transcribed(session, prompt="as before", params=SamplingParams(max_tokens=4))
    expected = generated(folder, oracle, temperature=(0.0,))[0]
    before = session.tokenizer.encode(" as before", add_special_tokens=False)
    prompt = torch.tensor([[SPECIAL_IDS["<|startofprev|>"], *before, PROMPT[0]]])
    with torch.no_grad():
        logits = oracle(expected.features, decoder_input_ids=prompt).logits[0, -1]
    no_speech_prob = float(logits.softmax(-1)[SPECIAL_IDS["<|nospeech|>"]])
    assert (transcript.segments or [])[0].no_speech_prob == pytest.approx(no_speech_prob, rel=1e-4)


def test_a_text_that_fails_is_generated_again_at_the_next_temperature(
    folder: Path, oracle: Any, session: Session
) -> None:
    """The pieces that Transformers generates again, and as a request at that temperature alone."""
    greedy, params = transcribed(session), SamplingParams(max_tokens=None, seed=5)
    logprobs = sorted({one.avg_logprob for one in greedy.segments or []})
    threshold = (logprobs[0] + logprobs[1]) / 2
    temperatures = (0.0, 0.4)
    expected = generated(folder, oracle, temperature=temperatures, logprob_threshold=threshold)
    fails = [one.decisions[0][0] for one in expected]
    assert sorted(set(fails)) == [False, True]
    found = transcribed(session, temperatures=temperatures, thresholds=Thresholds(logprob=threshold), params=params)
    warm = transcribed(session, temperatures=(0.4,), params=params)
    for piece, is_again in zip(pieces(), fails, strict=True):
        seek = round(piece.start_s * 100)
        of_piece = [[one for one in made.segments or [] if one.seek == seek] for made in (found, warm, greedy)]
        assert {one.temperature for one in of_piece[0]} == {0.4 if is_again else 0.0}
        assert [one.tokens for one in of_piece[0]] == [one.tokens for one in of_piece[1 if is_again else 2]]
        assert [one.tokens for one in of_piece[1]] != [one.tokens for one in of_piece[2]]


def test_the_last_attempt_stays_and_repetition_fails(session: Session) -> None:
    found = transcribed(session, temperatures=(0.0, 0.2), thresholds=Thresholds(compression_ratio=0.01))
    assert {one.temperature for one in found.segments or []} == {0.2}
    same = transcribed(session, temperatures=(0.0, 0.2), thresholds=Thresholds(compression_ratio=100.0))
    assert same == transcribed(session)


def test_silence_has_no_text(folder: Path, oracle: Any, session: Session) -> None:
    limits = {"logprob_threshold": 0.0, "no_speech_threshold": 0.0}
    expected = generated(folder, oracle, temperature=(0.0, 0.4), **limits)
    assert {one.decisions[0] for one in expected} == {(False, True)}
    silent = transcribed(session, temperatures=(0.0, 0.4), thresholds=Thresholds(logprob=0.0, no_speech=0.0))
    assert (silent.text, silent.segments) == ("", [])
    likely = transcribed(session, thresholds=Thresholds(logprob=-100.0, no_speech=0.0))
    assert likely == transcribed(session)


def test_several_temperatures_bring_the_usual_thresholds() -> None:
    usual = Thresholds(compression_ratio=2.4, logprob=-1.0, no_speech=0.6)
    assert thresholds_of((0.0, 0.2), {}) == usual
    assert thresholds_of((0.0,), {"logprob_threshold": None}) == NO_THRESHOLDS
    assert thresholds_of((0.0, 0.2), {"logprob_threshold": -2.0}) == Thresholds(2.4, -2.0, 0.6)


def test_words_have_the_times_of_transformers(folder: Path, oracle: Any, session: Session) -> None:
    transcript = transcribed(session, words=True)
    expected = []
    for piece, one in zip(pieces(), generated(folder, oracle, temperature=(0.0,)), strict=True):
        times = one.result["token_timestamps"][len(PROMPT) :].tolist()
        tokens = one.tokens
        segment: list[int] = []
        for number, token in enumerate([*tokens, END]):
            if token < END:
                segment.append(number)
                continue
            for text, begin, end in words_of(session.tokenizer.decode, [tokens[index] for index in segment], "en"):
                after = segment[end - 1] + 1
                times_of_word = times[segment[begin]], times[after] if after < len(tokens) else piece.seconds
                if text.strip():
                    expected.append((text.strip(), *(piece.start_s + time for time in times_of_word)))
            segment = []
    words = transcript.words or []
    assert [one.word for one in words] == [word for word, _, _ in expected]
    assert [one.start for one in words] == pytest.approx([start for _, start, _ in expected], abs=2e-3)
    assert [one.end for one in words] == pytest.approx([max(start, end) for _, start, end in expected], abs=2e-3)
    assert len({one.start for one in words}) > len(words) // 5
    assert transcript.segments == transcribed(session).segments
    assert transcribed(session).words is None


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (9, 40), (40, 9), (25, 25)])
def test_paths_of_attention_are_those_of_transformers(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[0])
    for attention in (rng.normal(size=shape), rng.integers(0, 3, size=shape)):
        tokens, positions = _dynamic_time_warping(-attention.astype(np.float64))
        first = [int(positions[tokens == token].min()) for token in range(shape[0])]
        assert positions_of_tokens(attention.astype(np.float32)) == first


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (" Hello, world! (It's 5 o'clock.)", "english"),
        ('No space before, "quoted" and ¿qué? - yes', "spanish"),
        (" naïve façade — 日本 🎉 end", "english"),
        ("日本語の文、です。「はい」", "japanese"),
        (" a ( b [ c", "english"),
    ],
)
def test_words_are_those_of_transformers(session: Session, text: str, language: str) -> None:
    codes = {"english": "en", "spanish": "es", "japanese": "ja"}
    tokens = session.tokenizer.encode(text, add_special_tokens=False)

    class OfTransformers:
        eos_token_id = END

        @staticmethod
        def decode(ids: list[int], *, decode_with_timestamps: bool = False) -> str:
            return session.tokenizer.decode(ids)

    words, _, numbers = _combine_tokens_into_words(OfTransformers(), tokens, language)
    expected = [(word, group[0], group[-1] + 1) for word, group in zip(words, numbers, strict=True)]
    assert words_of(session.tokenizer.decode, tokens, codes[language]) == expected


def test_words_without_alignment_heads_are_refused(folder: Path, session: Session) -> None:
    config = folder / "generation_config.json"
    content = config.read_text()
    config.write_text(json.dumps({name: value for name, value in SPEECH_RULES.items() if name != "alignment_heads"}))
    try:
        without = EngineConfig.create(str(folder), **SMALL)
    finally:
        config.write_text(content)
    transcriber = Transcriber(without, session.tokenizer, session.max_model_len)
    with pytest.raises(InvalidParameter, match=r"generation_config.json has no alignment_heads"):
        transcriber.speech((SOUND, RATE), Asked(timestamps=True, words=True))


def test_an_engine_with_other_log_probabilities_has_no_threshold_of_them(folder: Path, session: Session) -> None:
    config = EngineConfig.create(str(folder), **SMALL, logprobs_mode="raw_logits")
    transcriber = Transcriber(config, session.tokenizer, session.max_model_len)
    with pytest.raises(InvalidParameter, match=r"logprob_threshold=-1.0 needs an engine with logprobs_mode='raw_log"):
        transcriber.speech((SOUND, RATE), Asked(thresholds=Thresholds(logprob=-1.0)))
    assert not transcriber.has_logprobs


def test_stamps_follow_the_special_tokens(session: Session) -> None:
    assert transcriber_of(session).tokens.stamp(FIRST_STAMP) == 0
