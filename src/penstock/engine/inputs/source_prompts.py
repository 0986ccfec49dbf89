"""Prompts of encoder-decoder models: the encoder's input, and the tokens that the decoder's text begins with.

    {"encoder_prompt": "A text", "decoder_prompt": None}

A prompt of another form is the encoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from penstock.checkpoints.context_length import source_positions
from penstock.checkpoints.shown_model import shown_model
from penstock.config import ModelConfig
from penstock.config.request_limits import RequestLimits
from penstock.contract.param_checks import shown
from penstock.engine.inputs.field_limits import check_text
from penstock.engine.inputs.prompts import DECODER_PROMPT, ENCODER_PROMPT, Prompt, list_of_ids
from penstock.errors import ContextTooLong, InvalidRequest, ModelError
from penstock.features.encoder_decoder.messages import SourcePart
from penstock.text.tokenizer import Tokenizer


class SourcePrompts:
    """Separates prompts into the decoder's, and a part with the encoder's input.

    max_model_len, vocab_size: limits of the core.
    """

    def __init__(
        self, model: ModelConfig, tokenizer: Tokenizer, limits: RequestLimits, *, max_model_len: int, vocab_size: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._longest = source_positions(model.hf_config) or max_model_len
        self._start = self._first_tokens()

    def decoder_prompt(self, prompt: Prompt) -> Prompt:
        """The decoder's prompt, with the encoder's input as a part.

        Raises InvalidRequest for an input that the encoder does not take, ContextTooLong for one that is too long.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {ENCODER_PROMPT: prompt}
        parts = fields.get("parts") or {}
        if SourcePart.feature in parts:
            return prompt
        kept = {key: value for key, value in fields.items() if key == "cache_salt"}
        if ENCODER_PROMPT in fields:
            unknown = fields.keys() - {ENCODER_PROMPT, DECODER_PROMPT, "cache_salt", "parts"}
            if unknown:
                raise InvalidRequest(
                    f"The prompt has a field {shown(sorted(unknown)[0])} beside {ENCODER_PROMPT}. Allowed: "
                    f"{DECODER_PROMPT}, cache_salt, parts."
                )
            source, decoder = fields[ENCODER_PROMPT], fields.get(DECODER_PROMPT)
        else:
            source, decoder = fields, None
        kept["prompt_token_ids"] = self._decoder_ids(decoder)
        kept["parts"] = {**parts, SourcePart.feature: self._source(source)}
        return cast("Prompt", kept)

    def _source(self, source: Any) -> SourcePart:
        if isinstance(source, Mapping):
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
        return ids if ids[:1] == self._start[:1] else [*self._start[:1], *ids]

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
