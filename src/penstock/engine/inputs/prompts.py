"""Types and parsing of prompts: text, token ids in any container of integers, dictionaries, and lists of these.

Arrays and tensors are recognised by their `tolist` method, without importing their libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, cast

from penstock.config import vllm
from penstock.contract import Part, Parts
from penstock.contract.feature import feature_of_part
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest, UnsupportedParameter

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "parts")
# Fields of a prompt with media.
DATA, OPTIONS, UUIDS = MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
# Field of a prompt of embeddings.
PROMPT_EMBEDS = "prompt_embeds"
# Fields of a prompt of an encoder-decoder model.
ENCODER_PROMPT, DECODER_PROMPT = "encoder_prompt", "decoder_prompt"
_NO_ENCODER = "It is for encoder-decoder models, and this model has a decoder only"
_HINTS = {
    ENCODER_PROMPT: _NO_ENCODER,
    DECODER_PROMPT: _NO_ENCODER,
    "input_ids": "A tokenizer's result is not a prompt; give its input_ids as prompt_token_ids",
    "role": "Messages are for chat",
    "messages": "Messages are for chat",
}


class RenderedText(str):
    """Text of a prompt with its special tokens, as a chat template renders it; tokenising adds no others."""

    __slots__ = ()


class TextPair(NamedTuple):
    """Two texts that a cross-encoder reads together."""

    first: str
    second: str


class ArrayOfIds(Protocol):
    """An array or a tensor, of numpy, torch or another library."""

    def tolist(self) -> Any: ...


TokenIds: TypeAlias = Iterable[int] | ArrayOfIds


class PromptDict(TypedDict, total=False):
    """A prompt with its options; it needs `prompt`, `prompt_token_ids` or `prompt_embeds`.

    prompt: text; together with token ids only shown in outputs.
    prompt_token_ids: tokens, used as they are.
    cache_salt: cached prefixes are shared only among requests of the same salt.
    parts: data for plugins' features, by name: a `Part`, or its fields as plain data.
    multi_modal_data: images, audio and videos, by modality: an item or a list of items; the prompt has a placeholder
        for each.
    mm_processor_kwargs: options of the processor of these. multi_modal_uuids: names of the items, for caches.
    prompt_embeds: embeddings in place of tokens, a tensor or an array of floats [P, D], or base64 of what `torch.save`
        writes of one; for engines with enable_prompt_embeds.
    """

    prompt: str
    prompt_token_ids: TokenIds
    cache_salt: str | None
    parts: Mapping[str, Any] | None
    multi_modal_data: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    multi_modal_uuids: Mapping[str, Any] | None
    prompt_embeds: Any


Prompt: TypeAlias = str | TokenIds | PromptDict | TextPair
Prompts: TypeAlias = Prompt | Iterable[Prompt]


def as_list(value: Any) -> list[Any] | None:
    """Copy an array, a sequence, a view of values or an iterator to a list; None for anything else.

    Arrays become nested lists. Texts, bytes, dictionaries and sets are not lists.
    """
    if isinstance(value, (list, tuple)):
        return list(value)
    value = _plain(value)
    if isinstance(value, (str, bytes, bytearray)):
        return None
    return list(value) if isinstance(value, (Sequence, Iterator, ValuesView)) else None


def has_field(prompt: Any, key: str) -> bool:
    """Whether a prompt has a field that is not empty."""
    value = prompt.get(key) if isinstance(prompt, Mapping) else None
    return value is not None and not (isinstance(value, Mapping) and not value)


def with_parts(prompt: Prompt, parts: Iterable[Part]) -> Prompt:
    """The prompt with further parts of its request. Raises UnsupportedParameter for a pair of texts."""
    added = Parts.of(parts)
    if not added:
        return prompt
    if isinstance(prompt, TextPair):
        feature = feature_of_part(next(iter(added)))
        name = "Parts" if feature is None else feature.name
        raise UnsupportedParameter(f"{name} are not supported for pairs of texts. Leave them out.")
    fields: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if isinstance(prompt, Mapping):
        fields = dict(prompt)
    given = fields.get("parts") or {}
    if isinstance(given, Mapping):
        fields["parts"] = {**given, **added}
    return cast("Prompt", fields)


def list_of_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts; a list of numbers is one prompt, and an array of two dimensions has one per row."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = as_list(prompts)
    if listed is None:
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}. Allowed: text, token ids, a dictionary, or a list of these."
        )
    is_one_prompt = bool(listed) and all(isinstance(_scalar(item), (int, float)) for item in listed)
    return [listed] if is_one_prompt else listed


def list_of_params(name: str, params: Any, num_prompts: int) -> list[Any]:
    """Return parameters for each prompt, from one for all or one per prompt. name: of the argument, in errors."""
    listed = as_list(params)
    if listed is None:
        return [params] * num_prompts
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts but {len(listed)} {name}. Give one for all, or one per prompt."
        )
    return listed


def list_of_priorities(priority: Any, num_prompts: int) -> list[Any]:
    """Return the priority of each prompt, from one for all or one per prompt; None is 0."""
    if priority is None or isinstance(priority, int):
        return [priority or 0] * num_prompts
    listed = as_list(priority)
    if listed is None or len(listed) != num_prompts:
        raise InvalidRequest(f"priority={priority!r} is not valid. Allowed: an integer, or a list of {num_prompts}.")
    return listed


def list_of_ids(token_ids: Any) -> list[int]:
    """Copy one prompt's token ids to a list. Raises InvalidRequest for anything but integers."""
    ids = as_list(token_ids)
    if ids is None:
        raise InvalidRequest(
            f"The prompt is a {type(token_ids).__name__}. Allowed: text, a list or an array of token ids, or a "
            "dictionary with prompt or prompt_token_ids."
        )
    if all(type(token_id) is int for token_id in ids):
        return ids
    ids = [_scalar(token_id) for token_id in ids]
    for position, token_id in enumerate(ids):
        if as_list(token_id) is not None:
            raise InvalidRequest(
                f"The prompt has a {type(token_id).__name__} at position {position} of its token ids, so it has "
                "several rows. Allowed: the integers of one prompt; LLM.generate takes several prompts as a list."
            )
        if type(token_id) is not int:
            raise InvalidRequest(
                f"The prompt has {shown(token_id)} ({type(token_id).__name__}) at position {position} of its token "
                "ids. Allowed: integers."
            )
    return ids


def check_fields(prompt: Mapping[Any, Any]) -> None:
    """Check the fields of a prompt. Raises InvalidRequest for an unknown or missing field.

    A field of vLLM's raises UnsupportedParameter (an InvalidRequest), which names its feature.
    """
    for key in MEDIA_KEYS:
        if has_field(prompt, key):
            raise UnsupportedParameter(f"The prompt has {key}, which this model does not take. Leave it out.")
    if has_field(prompt, PROMPT_EMBEDS):
        raise UnsupportedParameter(
            "prompt_embeds is not allowed in this engine. Start it with enable_prompt_embeds=True, for a model that "
            "generates text."
        )
    known = (*PROMPT_KEYS, *MEDIA_KEYS, PROMPT_EMBEDS)
    if not prompt.keys() <= set(known):
        for key in vllm.fields_as_ours(prompt, known):
            if key not in known:
                hint = f" {_HINTS[key]}." if key in _HINTS else ""
                raise InvalidRequest(f"The prompt has a field {shown(key)}.{hint} Allowed: {', '.join(PROMPT_KEYS)}.")
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise InvalidRequest("The prompt has neither text nor tokens. Give prompt or prompt_token_ids.")
    for key in ("prompt", "cache_salt"):
        value = prompt.get(key)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{key}={shown(value)} is a {type(value).__name__}. Allowed: text.")
    parts = prompt.get("parts")
    if parts is not None and not isinstance(parts, Mapping):
        raise InvalidRequest(f"parts={shown(parts)} is a {type(parts).__name__}. Allowed: a dictionary by feature.")


def _plain(value: Any) -> Any:
    """Convert an array to nested lists, or to a number if it has no dimension."""
    return value.tolist() if hasattr(value, "tolist") else value


def _scalar(value: Any) -> Any:
    """Convert a number of another library to Python's; return anything else unchanged."""
    return value if type(value) is int or getattr(value, "ndim", None) != 0 else _plain(value)
