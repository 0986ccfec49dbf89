"""Transcriber: requests for the pieces of a sound, and the transcript from their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from penstock.config import ModelConfig
from penstock.contract import SamplingParams
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.engine.transcription.pieces import Piece, pieces_of
from penstock.engine.transcription.speech_tokens import TASKS, SpeechTokens
from penstock.engine.transcription.transcript import Segment, Transcript, compression_ratio
from penstock.features.encoder_decoder.messages import SpeechPart
from penstock.features.encoder_decoder.spectrograms import Spectrograms
from penstock.media.audio import resampled
from penstock.media.item import AUDIO, Samples
from penstock.media.loader import MediaLoader
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """Wishes of a transcription.

    task: "transcribe", or "translate" into English. language: code of the speech; None detects it. prompt: text before
    the speech, whose words and style it follows. timestamps: the transcript has segments. params: of sampling.
    """

    task: str = TASKS[0]
    language: str | None = None
    prompt: str | None = None
    timestamps: bool = False
    params: SamplingParams = field(default_factory=partial(SamplingParams, temperature=0.0, max_tokens=None))


class Transcriber:
    """Transcriber of one model. Raises UnsupportedFeature for a model that is none of speech."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, max_model_len: int, loader: MediaLoader) -> None:
        self.tokens = SpeechTokens.of(model, tokenizer)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.spectrograms = Spectrograms(model.folder, model.hf_config)
        # Seconds of a position of the encoder's output, between two timestamps.
        positions = model.hf_config.get("max_source_positions", 1500)
        self.seconds_of_stamp = self.spectrograms.seconds / positions
        self._loader = loader

    def speech(self, sound: Any, asked: Asked, name: str = "audio") -> Speech:
        """Prepare the transcription of a sound; takes as long as its decoding.

        sound: as `MediaLoader.load` takes audio. name: of the sound, in errors.
        Raises InvalidMedia for what is no sound, InvalidParameter for what the model does not do.
        """
        self.tokens.check(asked.task, asked.language, timestamps=asked.timestamps)
        media = self._loader.load(AUDIO, sound, name)
        rate = self.spectrograms.rate
        return Speech(self, asked, resampled(media.value, media.rate or rate, rate))


class Speech:
    """A sound that is transcribed. pieces: each is a request of its own. duration: in seconds."""

    def __init__(self, transcriber: Transcriber, asked: Asked, samples_N: Samples) -> None:
        self._of = transcriber
        self._asked = asked
        rate, most = transcriber.spectrograms.rate, transcriber.spectrograms.num_samples
        self.pieces = list(pieces_of(samples_N, rate, most))
        self.duration = len(samples_N) / rate
        self._before = self._tokens_before()

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the pieces' requests."""
        return self._asked.params.with_fields(logprobs=0)

    def detection(self) -> tuple[Prompt, SamplingParams] | None:
        """Request that tells the language; None where it is known."""
        languages = self._of.tokens.languages
        if not languages or self._asked.language is not None:
            return None
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=sorted(languages.values()))
        return self._prompt(self.pieces[0], [self._of.tokens.start], None), params

    def language_of(self, output: RequestOutput | None) -> str | None:
        """The language by the output of `detection`, or the one that is known; None for a model of one language."""
        languages = self._of.tokens.languages
        if output is None or not languages:
            return self._asked.language
        (token_id,) = output.outputs[0].token_ids
        return next(code for code, one in languages.items() if one == token_id)

    def prompts(self, language: str | None) -> list[Prompt]:
        """A prompt for each piece."""
        asked = self._asked
        decoder = self._of.tokens.begin(asked.task, language, self._before, timestamps=asked.timestamps)
        rules = SpeechPart(timestamps=asked.timestamps)
        return [self._prompt(piece, decoder, rules) for piece in self.pieces]

    def transcript(self, language: str | None, outputs: Sequence[RequestOutput]) -> Transcript:
        """The transcript from the last outputs of the pieces."""
        segments: list[Segment] = []
        texts = []
        for piece, output in zip(self.pieces, outputs, strict=True):
            completion = output.outputs[0]
            texts.append(self.text(completion.token_ids))
            if self._asked.timestamps:
                segments += self._segments(piece, completion, len(segments))
        return Transcript(
            task=self._asked.task,
            language=language,
            duration=round(self.duration, 3),
            text="".join(texts).strip(),
            segments=segments,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a piece's tokens, without timestamps and other special ones."""
        return self._of.tokenizer.decode([one for one in token_ids if one < self._of.tokens.end])

    def _segments(self, piece: Piece, completion: CompletionOutput, number: int) -> list[Segment]:
        """Segments of a piece, by its timestamps. number: of the first segment."""
        found: list[Segment] = []
        begin_s, tokens, logprobs = 0.0, list[int](), list[float]()

        def end_segment(end_s: float) -> None:
            text = self.text(tokens)
            if text.strip():
                found.append(
                    Segment(
                        id=number + len(found),
                        seek=round(piece.start_s * 100),
                        start=round(piece.start_s + min(begin_s, piece.seconds), 3),
                        end=round(piece.start_s + min(max(begin_s, end_s), piece.seconds), 3),
                        text=text,
                        tokens=list(tokens),
                        temperature=self._asked.params.temperature,
                        avg_logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
                        compression_ratio=compression_ratio(text),
                    )
                )
            tokens.clear()
            logprobs.clear()

        for index, token_id in enumerate(completion.token_ids):
            stamp = self._of.tokens.stamp(token_id)
            if stamp is not None:
                end_segment(stamp * self._of.seconds_of_stamp)
                begin_s = stamp * self._of.seconds_of_stamp
            elif token_id < self._of.tokens.end:
                tokens.append(token_id)
                if completion.logprobs:
                    logprobs.append(completion.logprobs[index][token_id].logprob)
        end_segment(piece.seconds)
        return found

    def _prompt(self, piece: Piece, decoder: list[int], rules: SpeechPart | None) -> Prompt:
        audio = piece.samples_N, self._of.spectrograms.rate
        prompt: dict[str, Any] = {
            "encoder_prompt": {"multi_modal_data": {AUDIO: audio}},
            "decoder_prompt": {"prompt_token_ids": decoder},
        }
        if rules is not None:
            prompt["parts"] = {SpeechPart.feature: rules}
        return cast("Prompt", prompt)

    def _tokens_before(self) -> list[int]:
        """The last tokens of the text before the speech, in up to half of the context."""
        if not self._asked.prompt:
            return []
        most = self._of.max_model_len // 2 - 1
        return self._of.tokenizer.encode(" " + self._asked.prompt.strip(), add_special_tokens=False)[-most:]
