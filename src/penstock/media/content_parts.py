"""Images, audio and video in messages: parts of OpenAI's and vLLM's APIs, and those that chat templates take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest, UnsupportedParameter
from penstock.media.item import AUDIO, IMAGE, VIDEO
from penstock.templates.content_format import MARKER

# Modality, and an example, of each type of part. The content is under the name of the type, unless it is noted.
_URL = '{{"type": "{0}_url", "{0}_url": {{"url": "..."}}}}'
_KINDS = {f"{modality}{end}": modality for modality in (IMAGE, AUDIO, VIDEO) for end in ("", "_url")}
_KINDS |= {"image_pil": IMAGE, "input_image": IMAGE, "input_audio": AUDIO}
# Features of an item: those of a tensor, or an object with the grid too.
_FEATURES = {"image_embeds": IMAGE, "audio_embeds": AUDIO}
_KINDS |= _FEATURES
_FIELDS = {"input_image": ("image_url",), IMAGE: (IMAGE, "url", "path"), AUDIO: (AUDIO, "url", "path")}
_FIELDS |= {VIDEO: (VIDEO, "url", "path")}
# Zero-width space.
_PARTING = "\u200b"
# Texts that stand for an item, by modality.
Markers: TypeAlias = Mapping[str, Callable[[], tuple[str, ...]]]
_WORDS = {IMAGE: "an image", AUDIO: "audio", VIDEO: "a video"}


@dataclass(frozen=True, slots=True, eq=False)
class GivenMedia:
    """An item as a caller gave it: see `MediaLoader.load`. name: in errors, such as "messages[0].content[1]"."""

    given: Any
    name: str
    detail: str | None = None


class MessageMedia:
    """Images, audio and video of a conversation, collected from its messages in order.

    markers: by modality of the model, gives texts that stand for an item in a prompt; templates that take texts get the
    first. data: items by modality. uuids: names that the caller gave them, None where it gave none.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._reserved: set[str] = set()
        self.data: dict[str, list[GivenMedia]] = {}
        self.uuids: dict[str, list[str | None]] = {}

    def without(self, message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """The message with parts for a template in the place of media. Raises InvalidRequest for what is no media."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            return message
        parts = [self._template_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)]
        return {**message, "content": parts}

    @property
    def has_uuids(self) -> bool:
        """Whether the caller gave an item a name."""
        return any(uuid is not None for uuids in self.uuids.values() for uuid in uuids)

    def as_text(self, value: Any) -> Any:
        """Data of a conversation in whose texts nothing stands for an item, which the parts alone do.

        Where a text has a placeholder, or the token of an item's features, an invisible character parts it.
        """
        if isinstance(value, str):
            for text in self._reserved:
                value = value.replace(text, f"{text[:1]}{_PARTING}{text[1:]}") if text else value
            return value
        if isinstance(value, Mapping) and MARKER not in value:
            return {name: self.as_text(one) for name, one in value.items()}
        return [self.as_text(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _template_part(self, part: Any, name: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            return part
        modality = _KINDS[kind]
        if modality not in self._markers:
            taken = ", ".join(["text", *self._markers])
            raise UnsupportedParameter(
                f"{name} of type {kind!r} is {_WORDS[modality]}, which this model does not take. Allowed: {taken}."
            )
        given, detail = _content(part, kind, name)
        uuid = part.get("uuid")
        if uuid is not None and not isinstance(uuid, str):
            raise InvalidRequest(f"{name}.uuid={shown(uuid)} is not valid. Allowed: text.")
        self.data.setdefault(modality, []).append(GivenMedia(given, name, detail))
        self.uuids.setdefault(modality, []).append(uuid)
        texts = self._markers[modality]()
        self._reserved.update(texts)
        return {"type": modality, MARKER: texts[0]}


def _content(part: Mapping[str, Any], kind: str, name: str) -> tuple[Any, str | None]:
    """Content of a part, for the loader of media, and the detail that it asks for."""
    fields = _FIELDS.get(kind, (kind,))
    given = next((part[field] for field in fields if part.get(field) is not None), None)
    detail = part.get("detail")
    if kind in _FEATURES and given is not None:
        return given if isinstance(given, Mapping) else {kind: given}, None
    if kind == "input_audio":
        data, form = (given.get("data"), given.get("format")) if isinstance(given, Mapping) else (None, None)
        if isinstance(data, str) and isinstance(form, str):
            return f"data:audio/{form};base64,{data}", None
    elif isinstance(given, Mapping) and isinstance(given.get("url"), str):
        return given["url"], given.get("detail", detail)
    elif given is not None and not isinstance(given, Mapping) and (isinstance(given, str) or not kind.endswith("_url")):
        return given, detail
    allowed = '{"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}'
    if kind != "input_audio":
        allowed = _URL.format(_KINDS[kind])
    raise InvalidRequest(f"{name} is {shown(part)}. Allowed: {allowed}.")
