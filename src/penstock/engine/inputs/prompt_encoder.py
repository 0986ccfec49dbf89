"""Prompt encoding: tokenises prompts, and checks their tokens against the engine's context and vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.shown_model import shown_model
from penstock.config import ModelConfig
from penstock.config.request_limits import RequestLimits
from penstock.contract.param_checks import shown
from penstock.engine.inputs.field_limits import check_text
from penstock.engine.inputs.prompts import Prompt
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest
from penstock.text.tokenizer import TextToEncode, Tokenizer

logger = logging.getLogger(__name__)
# Special tokens that a tokenizer puts around a text, at most.
_MOST_SPECIAL_TOKENS = 32


class PromptEncoder:
    """Encoder of one engine's prompts. max_model_len, vocab_size: limits of the core. limits: of texts."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        limits: RequestLimits | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._limits = (limits or RequestLimits()).resolved(max_model_len)
        self._has_warned_of_second_bos = False

    def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None, num_kept: int | None = None
    ) -> list[int]:
        """Tokenise a prompt; a text that cannot fit is refused early, unless its last `num_kept` tokens are kept.

        No more of a long text is tokenised than these need.
        """
        if num_kept is not None:
            check_text(text, self._limits)
            limit = self._num_kept(num_kept) + _MOST_SPECIAL_TOKENS
            wanted = TextToEncode(text, add_special_tokens=add_special_tokens, limit=limit, side="left")
            token_ids = self._tokenizer.encode_texts([wanted])[0].token_ids
        else:
            check_text(text, self._limits)
            token_ids = self.encode_expanded(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        bos_token_id = self._tokenizer.bos_token_id
        if add_special_tokens and bos_token_id is not None and token_ids[:2] == [bos_token_id] * 2:
            self._warn_of_second_bos(bos_token_id)
        return token_ids

    def encode_expanded(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Tokenise a text whose placeholders of media became their tokens; how long it was before was checked."""
        limit = self._longest(max_tokens)
        # A token has about four characters, so a shorter text may fit.
        longest = self._tokenizer.longest_token if len(text) > 4 * self.max_model_len else None
        if longest is not None and len(text) > longest * limit:
            raise ContextTooLong(
                f"The prompt has {len(text):,} characters, which are {len(text) // longest:,} tokens at least, but "
                f"{self._limit(len(text) // longest)}"
            )
        token_ids = self._tokenizer.encode_up_to(text, add_special_tokens, limit)
        if isinstance(token_ids, int):
            raise ContextTooLong(f"The prompt has {token_ids:,} tokens, but {self._limit(token_ids)}")
        return token_ids

    def _warn_of_second_bos(self, bos_token_id: int) -> None:
        if self._has_warned_of_second_bos:
            return
        self._has_warned_of_second_bos = True
        logger.warning(
            "A prompt begins with %r, and the tokenizer puts another such token (BOS) in front, so that the model sees "
            "two. Leave it out of the text, or give the prompt's tokens (prompt_token_ids) or messages (chat). "
            "Further prompts like it get no warning.",
            self._tokenizer.token_text(bos_token_id),
        )

    def check_num_ids(self, prompt: Prompt, sampling_params: Any) -> None:
        """Refuse a list of token ids that is too long before its items are checked."""
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if isinstance(token_ids, (list, tuple)):
            self.check_length(len(token_ids), getattr(sampling_params, "max_tokens", None))

    def check_token_ids(self, token_ids: list[int]) -> None:
        """Raise InvalidRequest for no tokens, or one that is not in the vocabulary."""
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it has no tokens. Give at least one.")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(
                f"The prompt has token id {shown(wrong)}, but the model's vocabulary has {self._vocab_size} tokens. "
                f"Allowed: 0 to {self._vocab_size - 1}."
            )

    def truncated(self, prompt_token_ids: list[int], num_kept: int | None) -> list[int]:
        """Truncate the prompt to its last `num_kept` tokens; -1 keeps as many as leave room for one token."""
        return prompt_token_ids if num_kept is None else prompt_token_ids[-self._num_kept(num_kept) :]

    def _num_kept(self, num_kept: int) -> int:
        longest = self.max_model_len - 1
        if num_kept > longest:
            raise InvalidParameter(
                f"truncate_prompt_tokens={num_kept} is not valid. Allowed: at most {longest}, which leaves room for "
                "one token in this engine's context (max_model_len), or -1 for as many as that."
            )
        return longest if num_kept == -1 else num_kept

    def check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise ContextTooLong unless the context has room for the prompt and one token; `max_tokens` may exceed it."""
        if num_prompt_tokens <= self._longest(max_tokens):
            return
        asked = "" if max_tokens is None else f" and asks for {max_tokens:,} more"
        limit = self._limit(num_prompt_tokens, max_tokens)
        raise ContextTooLong(f"The prompt has {num_prompt_tokens:,} tokens{asked}, but {limit}")

    def _longest(self, max_tokens: int | None) -> int:
        """Longest prompt: the context less one token, which the single token of an answer does not need."""
        return self.max_model_len - (max_tokens != 1)

    def _limit(self, num_prompt_tokens: int, max_tokens: int | None = None) -> str:
        """Text of an error about a prompt that is too long: the limit, and options that raise it."""
        return (
            f"this engine was started for {self.max_model_len:,} (max_model_len), of which at least one is the "
            f"answer's. Shorten the prompt to {self.max_model_len - 1:,} tokens"
            f"{self._advice(num_prompt_tokens, num_prompt_tokens + (max_tokens or 1))}"
        )

    def _advice(self, num_prompt_tokens: int, wanted: int) -> str:
        longest = self._model.longest_context
        if num_prompt_tokens < longest:
            return f", or start with max_model_len={min(wanted, longest)}."
        return f"; {shown_model(self._model.model)} was made for no more than {longest:,}."
