"""Transcriber: requests for the pieces of a sound, and the transcript from their outputs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from penstock.config import EngineConfig
from penstock.contract import Part, SamplingParams
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.transcription.attempts import NO_THRESHOLDS, Attempt, Thresholds
from penstock.engine.transcription.pieces import Piece, pieces_of
from penstock.engine.transcription.speech_tokens import TASKS, SpeechTokens
from penstock.engine.transcription.timing import Timing
from penstock.engine.transcription.transcript import Transcript
from penstock.errors import InvalidParameter
from penstock.features.encoder_decoder.messages import AlignmentPart, SpeechPart, SpeechResult
from penstock.media.audio import resampled
from penstock.media.item import AUDIO, Samples
from penstock.media.loader import MediaLoader
from penstock.media.processors.spectrograms import Spectrograms
from penstock.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")
_RAW = "raw_logprobs"
# Prompts that may run together, each with its parameters.
Round: TypeAlias = Sequence[tuple[Prompt, SamplingParams]]


@dataclass(frozen=True, slots=True)
class Asked:
    """Wishes of a transcription.

    task: "transcribe", or "translate" into English. language: of the speech, by its code or its name; None detects it.
    prompt: text before the speech, whose words and style it follows. timestamps: the transcript has segments. words: it
    has words, too. temperatures: of a piece's attempts in their order, while they fail the thresholds. params: of
    sampling, beside it.
    """

    task: str = TASKS[0]
    language: str | None = None
    prompt: str | None = None
    timestamps: bool = False
    words: bool = False
    temperatures: Sequence[float] = (0.0,)
    thresholds: Thresholds = NO_THRESHOLDS
    params: SamplingParams = field(default_factory=partial(SamplingParams, max_tokens=None))


class Rounds(Generic[_Result]):
    """Rounds of prompts of a transcription, or of a part of it. result: theirs, once there are no more."""

    result: _Result

    def __init__(self, rounds: Generator[Round, Sequence[RequestOutput], _Result]) -> None:
        self._rounds = rounds
        self._has_begun = False

    def after(self, outputs: Sequence[RequestOutput]) -> Round | None:
        """The round after these outputs of the last one, of none at first; None for no more."""
        try:
            prompts = self._rounds.send(outputs) if self._has_begun else next(self._rounds)
        except StopIteration as end:
            self.result = end.value
            return None
        self._has_begun = True
        return prompts


class Transcriber:
    """Transcriber of an engine's model. Raises UnsupportedFeature for a model that is none of speech.

    has_logprobs: the engine's log-probabilities are the model's own, as `logprobs_mode` says.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, max_model_len: int) -> None:
        model = config.model
        self.has_logprobs = config.sampling.logprobs_mode == _RAW
        self.tokens = SpeechTokens.of(model, tokenizer)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.spectrograms = Spectrograms(model.folder, model.hf_config)
        # A position of the encoder's output lies between two timestamps.
        positions = model.hf_config.get("max_source_positions", 1500)
        self.timing = Timing(self.tokens, self.text, self.spectrograms.seconds / positions)
        self._loader = MediaLoader.of(config.multimodal)

    def speech(self, sound: Any, asked: Asked, name: str = "audio") -> Speech:
        """Prepare the transcription of a sound; takes as long as its decoding.

        sound: as `MediaLoader.load` takes audio. name: of the sound, in errors.
        Raises InvalidMedia for what is no sound, InvalidParameter for what the model does not do.
        """
        asked = replace(asked, language=self.tokens.code_of(asked.language))
        self.tokens.check(asked.task, timestamps=asked.timestamps, words=asked.words)
        if asked.thresholds.logprob is not None and not self.has_logprobs:
            raise InvalidParameter(
                f"logprob_threshold={asked.thresholds.logprob} needs an engine with logprobs_mode={_RAW!r}. Start "
                "it with that, or use one temperature without this threshold."
            )
        media = self._loader.load(AUDIO, sound, name)
        rate = self.spectrograms.rate
        return Speech(self, asked, resampled(media.value, media.rate or rate, rate))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a piece's tokens, without timestamps and other special ones."""
        return self.tokenizer.decode([one for one in token_ids if one < self.tokens.end])


class Speech:
    """A sound that is transcribed. pieces: each is a request of its own. duration: in seconds."""

    def __init__(self, transcriber: Transcriber, asked: Asked, samples_N: Samples) -> None:
        self._of = transcriber
        self._asked = asked
        rate, most = transcriber.spectrograms.rate, transcriber.spectrograms.num_samples
        self.pieces = list(pieces_of(samples_N, rate, most))
        self.duration = len(samples_N) / rate
        self._before = self._tokens_before()

    def transcription(self) -> Generator[Round, Sequence[RequestOutput], Transcript]:
        """Transcribe: yields rounds of prompts, takes their outputs, and returns the transcript."""
        asked = self._asked
        language = yield from self.language()
        prompts = [prompt for prompt, _ in self.round(language)]
        attempts: dict[int, Attempt] = {}
        due = list(range(len(self.pieces)))
        for temperature in asked.temperatures:
            params = self._params(temperature)
            outputs = yield [(prompts[number], params) for number in due]
            attempts.update((number, self._attempt(one, temperature)) for number, one in zip(due, outputs, strict=True))
            due = [number for number in due if attempts[number].fails(asked.thresholds)]
            if not due:
                break
        spoken = {number: one for number, one in sorted(attempts.items()) if not one.is_silent(asked.thresholds)}
        transcript = Transcript(
            task=asked.task,
            language=language,
            duration=round(self.duration, 3),
            text="".join(attempt.text for attempt in spoken.values()).strip(),
        )
        if asked.timestamps:
            attention = (yield from self._attention(spoken)) if asked.words else {}
            transcript.segments, transcript.words = [], [] if asked.words else None
            for number, attempt in spoken.items():
                piece = self.pieces[number]
                segments = self._of.timing.segments(piece, attempt, len(transcript.segments))
                transcript.segments += [one.segment for one in segments]
                if transcript.words is not None and number in attention:
                    transcript.words += self._of.timing.words(piece, segments, attention[number], language)
        return transcript

    def language(self) -> Generator[Round, Sequence[RequestOutput], str | None]:
        """Tell the language, as `transcription`; None for a model of one language."""
        languages = self._of.tokens.languages
        if not languages or self._asked.language is not None:
            return self._asked.language
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=sorted(languages.values()))
        (output,) = yield [(self._prompt(self.pieces[0], [self._of.tokens.start]), params)]
        (token_id,) = output.outputs[0].token_ids
        return next(code for code, one in languages.items() if one == token_id)

    def round(self, language: str | None) -> Round:
        """The first attempts at all pieces."""
        asked = self._asked
        decoder = self._of.tokens.begin(asked.task, language, self._before, timestamps=asked.timestamps)
        wants_silence = asked.timestamps or asked.thresholds.no_speech is not None
        rules = SpeechPart(
            timestamps=asked.timestamps,
            no_speech=self._of.tokens.no_speech if wants_silence else None,
            start=decoder.index(self._of.tokens.start),
        )
        params = self._params(asked.temperatures[0])
        return [(self._prompt(piece, decoder, rules), params) for piece in self.pieces]

    def _params(self, temperature: float) -> SamplingParams:
        return self._asked.params.with_fields(temperature=temperature, logprobs=0)

    def _attempt(self, output: RequestOutput, temperature: float) -> Attempt:
        completion = output.outputs[0]
        total = completion.cumulative_logprob or 0.0
        result: SpeechResult | None = completion.parts.get(SpeechResult.feature)
        return Attempt(
            prompt_ids=output.prompt_token_ids,
            token_ids=completion.token_ids,
            text=self._of.text(completion.token_ids),
            temperature=temperature,
            avg_logprob=total / len(completion.token_ids) if self._of.has_logprobs and completion.token_ids else None,
            no_speech_prob=None if result is None else result.no_speech_prob,
        )

    def _attention(
        self, attempts: Mapping[int, Attempt]
    ) -> Generator[Round, Sequence[RequestOutput], dict[int, NDArray[np.float32]]]:
        """Attention of the attempts' tokens to the sound, but of each last one; of those with several."""
        spectrograms, tokens = self._of.spectrograms, self._of.tokens
        aligned = [number for number, attempt in attempts.items() if len(attempt.token_ids) > 1]
        if not aligned:
            return {}
        params = SamplingParams(temperature=0.0, max_tokens=1)
        prompts: list[tuple[Prompt, SamplingParams]] = []
        for number in aligned:
            piece, attempt = self.pieces[number], attempts[number]
            part = AlignmentPart(
                token_ids=[*attempt.prompt_ids, *attempt.token_ids[:-1]],
                begin=len(attempt.prompt_ids),
                positions=spectrograms.positions(len(piece.samples_N)),
                heads=list(tokens.alignment_heads),
            )
            prompts.append((self._prompt(piece, [tokens.start], part), params))
        outputs = yield prompts
        parts = (one.outputs[0].parts[SpeechResult.feature] for one in outputs)
        return {number: part.attention.to_numpy() for number, part in zip(aligned, parts, strict=True)}

    def _prompt(self, piece: Piece, decoder: list[int], part: Part | None = None) -> Prompt:
        audio = piece.samples_N, self._of.spectrograms.rate
        prompt: dict[str, Any] = {
            "encoder_prompt": {"multi_modal_data": {AUDIO: audio}},
            "decoder_prompt": {"prompt_token_ids": decoder},
        }
        if part is not None:
            prompt["parts"] = {part.feature: part}
        return cast("Prompt", prompt)

    def _tokens_before(self) -> list[int]:
        """The last tokens of the text before the speech, in up to half of the context."""
        if not self._asked.prompt:
            return []
        most = self._of.max_model_len // 2 - 1
        return self._of.tokenizer.encode(" " + self._asked.prompt.strip(), add_special_tokens=False)[-most:]
