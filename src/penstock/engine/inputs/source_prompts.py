"""Prompts of encoder-decoder models: the encoder's input, and the tokens that the decoder's text begins with.

    {"encoder_prompt": "A text", "decoder_prompt": None}

A prompt of another form is the encoder's; beside audio, which an encoder of speech takes, a text is the decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.checkpoints.context_length import source_positions
from penstock.checkpoints.shown_model import shown_model
from penstock.config import ModelConfig
from penstock.config.request_limits import RequestLimits
from penstock.contract import ArrayBytes
from penstock.contract.param_checks import shown
from penstock.engine.inputs.field_limits import check_text
from penstock.engine.inputs.prompts import DATA, DECODER_PROMPT, ENCODER_PROMPT, Prompt, list_of_ids
from penstock.errors import ContextTooLong, InvalidMedia, InvalidRequest, ModelError
from penstock.features.encoder_decoder.messages import SourcePart
from penstock.media.audio import resampled
from penstock.media.item import AUDIO
from penstock.media.processors.spectrograms import Spectrograms
from penstock.text.tokenizer import Tokenizer

_OF_SOURCES = ("prompt", "prompt_token_ids", DATA)
_OF_REQUESTS = ("cache_salt", "parts")


class SourcePrompts:
    """Separates prompts into the decoder's, and a part with the encoder's input.

    max_model_len, vocab_size: limits of the core. media_limits: items that a prompt has for the encoder, by modality.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._longest = source_positions(model.hf_config) or max_model_len
        self._start = self._first_tokens()
        takes_audio = "num_mel_bins" in model.hf_config
        self._spectrograms = Spectrograms(model.folder, model.hf_config) if takes_audio else None
        self.media_limits = {AUDIO: 1} if takes_audio else {}

    def decoder_prompt(self, prompt: Prompt) -> Prompt:
        """The decoder's prompt, with the encoder's input as a part. prompt: with its media loaded (`MediaIntake`).

        Raises InvalidRequest for an input that the encoder does not take, ContextTooLong for one that is too long.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {ENCODER_PROMPT: prompt}
        parts = fields.get("parts") or {}
        if SourcePart.feature in parts:
            return prompt
        source, decoder = self._sides(fields)
        prompt_token_ids, part = self._decoder_ids(decoder), self._source(source)
        kept = {key: value for key, value in fields.items() if key == "cache_salt"}
        return cast(
            "Prompt",
            {**kept, "prompt_token_ids": prompt_token_ids, "parts": {**parts, SourcePart.feature: part}},
        )

    def _sides(self, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """The encoder's and the decoder's prompt. Raises InvalidRequest for a field that is neither's."""
        is_explicit = ENCODER_PROMPT in fields
        _check_keys(fields, (ENCODER_PROMPT, DECODER_PROMPT) if is_explicit else _OF_SOURCES, "The prompt")
        if is_explicit:
            return fields[ENCODER_PROMPT], fields.get(DECODER_PROMPT)
        if self._spectrograms is None:
            return fields, None
        text = {key: value for key, value in fields.items() if key in _OF_SOURCES[:2] and value}
        return {DATA: fields.get(DATA)}, text or None

    def _source(self, source: Any) -> SourcePart:
        if isinstance(source, Mapping):
            _check_keys(source, _OF_SOURCES, "The encoder's prompt")
        if self._spectrograms is not None:
            return self._of_audio(self._spectrograms, source)
        if isinstance(source, Mapping):
            if source.get(DATA):
                raise InvalidRequest(f"The encoder of {shown_model(self._model.model)} takes text. Leave {DATA} out.")
            text, ids = source.get("prompt"), source.get("prompt_token_ids")
            source = ids if ids is not None else text
        if isinstance(source, str):
            check_text(source, self._limits, where="The encoder's prompt")
            encoded = self._tokenizer.encode_up_to(source, True, self._longest)
            token_ids = [] if isinstance(encoded, int) else encoded
            length = encoded if isinstance(encoded, int) else len(encoded)
        elif source is None:
            raise InvalidRequest(f"The prompt has nothing for the encoder. Give text or token ids as {ENCODER_PROMPT}.")
        else:
            token_ids = list_of_ids(source)
            length = len(token_ids)
        if length > self._longest:
            raise ContextTooLong(
                f"The encoder's prompt has {length:,} tokens, but the encoder of {shown_model(self._model.model)} "
                f"takes {self._longest:,}. Shorten it."
            )
        self._check_ids(token_ids, "The encoder's prompt")
        return SourcePart(length=length, token_ids=token_ids)

    def _of_audio(self, spectrograms: Spectrograms, source: Any) -> SourcePart:
        """The spectrogram of a sound."""
        media = source.get(DATA) if isinstance(source, Mapping) else None
        if not media or not media.get(AUDIO):
            raise InvalidRequest(
                f"The encoder of {shown_model(self._model.model)} takes one sound. Give {DATA}={{{AUDIO!r}: "
                "(samples, rate)}."
            )
        (sound,) = media[AUDIO]
        samples = resampled(sound.value, sound.rate or spectrograms.rate, spectrograms.rate)
        try:
            features_CP = spectrograms.of(samples)
        except InvalidMedia as error:
            raise InvalidMedia(f"{DATA}[{AUDIO!r}]: {error}") from None
        return SourcePart(length=features_CP.shape[1] // 2, features=ArrayBytes.of(features_CP))

    def _decoder_ids(self, decoder: Any) -> list[int]:
        """Tokens of the decoder's prompt, which begins with its start token."""
        if isinstance(decoder, Mapping):
            ids = decoder.get("prompt_token_ids")
            decoder = ids if ids is not None else decoder.get("prompt")
        if decoder is None:
            return list(self._start)
        if isinstance(decoder, str):
            check_text(decoder, self._limits, where="The decoder's prompt")
            ids = self._tokenizer.encode(decoder, add_special_tokens=False)
        else:
            ids = list_of_ids(decoder)
        self._check_ids([*self._start, *ids], "The decoder's prompt")
        # Text before it may come first, as with Whisper.
        begins = self._start[0] in (ids if self._spectrograms is not None else ids[:1])
        return ids if begins else [*self._start[:1], *ids]

    def _check_ids(self, ids: list[int], what: str) -> None:
        if not ids:
            raise InvalidRequest(f"{what} has no tokens. Give at least one.")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(
                f"{what} has a token id that the model's vocabulary of {self._vocab_size} tokens lacks. Allowed: 0 to "
                f"{self._vocab_size - 1}."
            )

    def _first_tokens(self) -> list[int]:
        """The decoder's start token, and the one that is to follow it, if the model's files name one."""
        start = self._field("decoder_start_token_id")
        start = self._field("bos_token_id") if start is None else start
        if start is None:
            raise ModelError(
                f"{self._model.model} has no decoder_start_token_id, with which the decoder's text begins. Give one in "
                "hf_overrides."
            )
        forced = self._field("forced_bos_token_id")
        return [start] if forced is None else [start, forced]

    def _field(self, name: str) -> int | None:
        """A token id of generation_config.json, else of config.json."""
        found = self._model.hf_generation_config.get(name)
        found = self._model.hf_config.get(name) if found is None else found
        return found if type(found) is int and found >= 0 else None


def _check_keys(fields: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    """Raise InvalidRequest for a field beside the allowed ones and those of every request."""
    unknown = sorted(fields.keys() - {*allowed, *_OF_REQUESTS})
    if unknown:
        listed = ", ".join((*allowed, *_OF_REQUESTS))
        raise InvalidRequest(f"{what} has a field {shown(unknown[0])}. Allowed: {listed}.")
