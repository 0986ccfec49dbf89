"""Processing of pooling requests: texts and parameters are checked against the model."""

from __future__ import annotations

import msgspec

from penstock.checkpoints.pooling import PoolingConfig
from penstock.config.pooling import TOKEN_TASKS
from penstock.contract import PoolingParams
from penstock.engine.inputs.prompts import RenderedText, TextPair
from penstock.errors import ContextTooLong, InvalidParameter
from penstock.text.tokenizer import TextToEncode


class PoolingInputs:
    """Checks the texts and parameters of one pooling model. max_model_len: most tokens of a text."""

    def __init__(self, pooling: PoolingConfig, *, model: str, max_model_len: int) -> None:
        self.pooling = pooling
        self._model = model
        self._max_model_len = max_model_len

    def params(self, params: PoolingParams) -> PoolingParams:
        """The parameters as the worker needs them. Raises InvalidParameter for what the model cannot do."""
        pooling = self.pooling
        task = params.task or pooling.tasks[0]
        if task not in pooling.tasks:
            raise InvalidParameter(
                f"task={task!r} is not one of {self._model}, which has {pooling.architecture.name}. "
                f"Allowed: {', '.join(pooling.tasks)}."
            )
        embeds = task in ("embed", "token_embed")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, embeds=embeds, task=task)
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(params, name) is not None and task != "token_classify":
                raise InvalidParameter(f"{name} has no meaning for task={task!r}. Allowed: for token_classify.")
        for column in params.returned_token_ids or ():
            if column >= len(pooling.labels):
                raise InvalidParameter(
                    f"returned_token_ids has {column}, but the model has {len(pooling.labels)} classes. Allowed: 0 to "
                    f"{len(pooling.labels) - 1}."
                )
        skips = params.skip_reading_prefix_cache
        reads = pooling.reads_prefix_cache and task not in TOKEN_TASKS
        if skips is False and not reads:
            raise InvalidParameter(
                f"skip_reading_prefix_cache=False is not valid: {task} with pooling {pooling.pooling!r} needs the "
                "hidden states of the whole text."
            )
        return msgspec.structs.replace(params, task=task, skip_reading_prefix_cache=bool(skips) or not reads)

    def text(self, text: str | TextPair, params: PoolingParams) -> TextToEncode:
        """A text or a pair as the tokenizer takes it, cut as the parameters say.

        A long text that is not to be cut is tokenised up to the first token too many.
        """
        first, second = text if isinstance(text, TextPair) else (text, None)
        limit, side = self._limit(params), params.truncation_side
        is_rendered = isinstance(text, RenderedText)
        given = TextToEncode(str(first), second, add_special_tokens=not is_rendered, limit=limit, side=side)
        return given._replace(limit=self._longest(params) + 1) if given.is_long and limit is None else given

    def cut(self, token_ids: list[int], params: PoolingParams) -> list[int]:
        """Cut token ids as the parameters say. Raises ContextTooLong."""
        limit = self._limit(params)
        if limit is not None and len(token_ids) > limit:
            return token_ids[-limit:] if params.truncation_side == "left" else token_ids[:limit]
        self.check_length(len(token_ids), params)
        return token_ids

    def _limit(self, params: PoolingParams) -> int | None:
        kept = params.truncate_prompt_tokens
        if kept is None:
            return None
        if kept > self._max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens={kept} is not valid. Allowed: at most {self._max_model_len} (max_model_len), "
                "or -1 for as many as that."
            )
        longest = self._longest(params)
        return longest if kept == -1 else min(kept, longest)

    def check_length(self, num_tokens: int, params: PoolingParams, *, is_whole: bool = True) -> None:
        """Raise ContextTooLong for a text with more tokens than fit. is_whole: whether all of it was tokenised."""
        longest = self._longest(params)
        if num_tokens > longest:
            limit = (
                "max_model_len" if longest == self._max_model_len else "query_length or document_length of the model"
            )
            count = f"{num_tokens:,} tokens{'' if is_whole else ' or more'}"
            raise ContextTooLong(
                f"The text has {count}, but this engine takes {longest:,} at most ({limit}). "
                "Shorten it, or cut it with truncate_prompt_tokens=-1 (of PoolingParams, as pooling_params=, and of a "
                "request over HTTP)."
            )

    def _longest(self, params: PoolingParams) -> int:
        return min(self._max_model_len, params.max_length or self._max_model_len)

    def _check_dimensions(self, dimensions: int, *, embeds: bool, task: str) -> None:
        pooling = self.pooling
        if not embeds:
            raise InvalidParameter(
                f"dimensions={dimensions} has no meaning for task={task!r}. Allowed: for embeddings."
            )
        if pooling.dimensions is None:
            raise InvalidParameter(
                f"dimensions={dimensions} is not valid: {self._model} was not trained for shorter embeddings "
                "(config.json has neither matryoshka_dimensions nor is_matryoshka). Leave it out."
            )
        if pooling.dimensions and dimensions not in pooling.dimensions:
            raise InvalidParameter(
                f"dimensions={dimensions} is not valid. Allowed: {', '.join(map(str, pooling.dimensions))}."
            )
        if pooling.embedding_size is not None and dimensions > pooling.embedding_size:
            raise InvalidParameter(
                f"dimensions={dimensions} is not valid. Allowed: at most {pooling.embedding_size}, as embeddings have."
            )


def text_parameters_refused(pooling: PoolingConfig, given: object) -> InvalidParameter:
    """Error for sampling parameters, or anything else, where a model pools."""
    return InvalidParameter(
        f"This engine pools, and generates no text: it takes PoolingParams, not {type(given).__name__}. Its tasks: "
        f"{', '.join(pooling.tasks)}."
    )
