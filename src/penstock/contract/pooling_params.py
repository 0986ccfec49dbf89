"""Pooling parameters of a request."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from penstock.contract import param_checks as check
from penstock.contract.named_parameters import NamedParameters

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify")


class PoolingParams(msgspec.Struct, metaclass=NamedParameters, kw_only=True, forbid_unknown_fields=True):
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
        kept = self.truncate_prompt_tokens
        if kept is not None:
            allowed = "at least 1, -1 (as many as fit), or None"
            check.check_integer("truncate_prompt_tokens", kept, -1, None, allowed)
            if kept == 0:
                raise check.invalid("truncate_prompt_tokens", kept, allowed)
        if self.truncation_side not in (None, "left", "right"):
            raise check.invalid("truncation_side", self.truncation_side, "left, right, or None")
        for name in ("step_tag_id", "second_text_start"):
            if getattr(self, name) is not None:
                check.check_integer(name, getattr(self, name), 0, None, "0 or more, or None")
        if self.returned_token_ids is not None:
            self._set("returned_token_ids", check.token_ids("returned_token_ids", self.returned_token_ids))

    def __setattr__(self, name: str, value: Any) -> None:
        checked = self.clone(**{name: value})
        self._set(name, getattr(checked, name))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Create parameters from a dictionary, such as a line of JSON."""
        return cls(**fields)

    def clone(self, **changes: Any) -> Self:
        """Return a deep copy with changed fields. Raises InvalidParameter as `from_dict`."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return self.from_dict(copy.deepcopy(fields) | changes)

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)
