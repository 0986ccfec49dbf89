"""Pooling parameters of a request."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import param_checks as check
from penstock.contract.named_parameters import Parameters

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify")


class PoolingParams(Parameters, kw_only=True, forbid_unknown_fields=True):
    """Pooling parameters of one request, with vLLM's names.

    task: "embed", "classify", "score", "token_embed" or "token_classify"; None takes the model's first.
    dimensions: size that an embedding is cut to, for models that were trained for it (Matryoshka embeddings).
    use_activation: whether embeddings are normalised, and logits of classes become probabilities; None for what the
        model's files say.
    truncate_prompt_tokens: most tokens of the text, special ones included; -1 for as many as fit; None refuses a text
        that is too long.
    truncation_side: "right" drops the end of a text that is too long, "left" its beginning; None as the tokenizer does.
    skip_reading_prefix_cache: compute the whole text; None where the vector needs all of its hidden states.
    step_tag_id, returned_token_ids: of token_classify: tokens whose rows are returned, and their columns; None for all.

    Filled in by the engine when it accepts the request:
    second_text_start: position from which on a pair's second text is; None for a single text.
    max_length: most tokens of the text, if that is less than the engine takes: of a query, say.

    Raises InvalidParameter for a value outside its range or an unknown name.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    skip_reading_prefix_cache: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    second_text_start: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            raise check.invalid("task", self.task, f"{', '.join(POOLING_TASKS)}, or None")
        if self.dimensions is not None:
            check.check_integer("dimensions", self.dimensions, 1, None, "at least 1, or None")
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check.check_flag(name, getattr(self, name))
        if self.max_length is not None:
            check.check_integer("max_length", self.max_length, 1, None, "at least 1, or None")
        check.check_num_kept(self.truncate_prompt_tokens)
        if self.truncation_side not in (None, "left", "right"):
            raise check.invalid("truncation_side", self.truncation_side, "left, right, or None")
        for name in ("step_tag_id", "second_text_start"):
            if getattr(self, name) is not None:
                check.check_integer(name, getattr(self, name), 0, None, "0 or more, or None")
        if self.returned_token_ids is not None:
            self._set("returned_token_ids", check.token_ids("returned_token_ids", self.returned_token_ids))
