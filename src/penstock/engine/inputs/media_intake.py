"""Media intake: images, audio and video of prompts are counted, then loaded in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

from penstock.contract.param_checks import shown
from penstock.engine.inputs.prompts import (
    DATA,
    ENCODER_PROMPT,
    MEDIA_KEYS,
    OPTIONS,
    UUIDS,
    Prompt,
    as_list,
    has_field,
    with_parts,
)
from penstock.errors import InvalidMedia, InvalidRequest, UnsupportedParameter
from penstock.features.multimodal.inputs.request_media import ImagesAlone, LoadedPrompt, RequestMedia
from penstock.media.content_parts import GivenMedia
from penstock.media.features import are_features
from penstock.media.item import AUDIO, IMAGE, VIDEO, Media
from penstock.media.loader import MediaLoader

_NUM_THREADS = 8
# Decoded media of one prompt.
_MAX_BYTES = 2 << 30


class _Loading(NamedTuple):
    """Items of a prompt that are being loaded, and their names, by modality.

    around: the prompt, of which this one is the encoder's; None where it is the whole.
    """

    prompt: Mapping[str, Any]
    futures: dict[str, list[Future[Media]]]
    uuids: dict[str, list[str | None]]
    around: Mapping[str, Any] | None = None

    @property
    def all(self) -> list[Future[Media]]:
        return [future for futures in self.futures.values() for future in futures]

    def cancel(self) -> None:
        for future in self.all:
            future.cancel()

    def loaded(self) -> Prompt:
        """The prompt with the items, when all are there."""
        media = {modality: [future.result() for future in futures] for modality, futures in self.futures.items()}
        loaded = {**self.prompt, DATA: media, **({UUIDS: self.uuids} if self.uuids else {})}
        return cast("Prompt", loaded if self.around is None else {**self.around, ENCODER_PROMPT: loaded})


class MediaIntake:
    """Loader of the media of prompts.

    limits: most items of a prompt, by modality that the model takes. media: makes tokens of items; None for a model
    whose prompts have none of them among their tokens.
    """

    def __init__(
        self, loader: MediaLoader, limits: Mapping[str, int], media: RequestMedia | ImagesAlone | None = None
    ) -> None:
        self._loader = loader
        self._limits = limits
        self._media = media
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-media")

    def load(self, prompt: Prompt) -> Prompt:
        """The prompt, or its encoder's, with its media as lists of `Media`; one without media as it is.

        Raises InvalidRequest: InvalidMedia for an item that cannot be loaded, UnsupportedParameter for media that the
        model does not take.
        """
        loading = self._begin(prompt)
        if loading is None:
            return prompt
        try:
            return loading.loaded()
        finally:
            loading.cancel()

    async def load_async(self, prompt: Prompt) -> Prompt:
        """As `load`, beside the event loop."""
        loading = self._begin(prompt)
        if loading is None:
            return prompt
        try:
            await asyncio.gather(*map(asyncio.wrap_future, loading.all))
            return loading.loaded()
        finally:
            loading.cancel()

    def expanded(self, prompt: Prompt, encode: Callable[[str], list[int]]) -> Prompt:
        """A loaded prompt with its tokens, in which media have theirs, and the items as a part; any other as it is.

        encode: tokenises text. Raises InvalidRequest for media or placeholders that do not fit.
        """
        if self._media is None or not isinstance(prompt, Mapping) or not any(map(prompt.get, MEDIA_KEYS)):
            return prompt
        fields: Any = {name: value for name, value in prompt.items() if name not in MEDIA_KEYS}
        data, options, uuids = (cast("Any", prompt.get(key)) or {} for key in MEDIA_KEYS)
        if not isinstance(options, Mapping):
            raise InvalidRequest(f"{OPTIONS}={shown(options)} is not valid. Allowed: a dictionary.")
        names = {modality: uuids.get(modality) or [None] * len(listed) for modality, listed in data.items()}
        items = [item for modality in data for item in zip(data[modality], names[modality], strict=True)]
        if not items:
            return cast("Prompt", fields)
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        loaded = LoadedPrompt(
            items, options, str(text) if isinstance(text, str) else None, None if token_ids is None else list(token_ids)
        )
        token_ids, part = self._media.expand(loaded, encode)
        return with_parts(cast("Prompt", {**fields, "prompt_token_ids": token_ids}), [part])

    def cache_counts(self) -> tuple[int, int]:
        """Numbers of items that were looked up among processed ones so far, and found."""
        return (0, 0) if self._media is None else self._media.cache_counts

    def reset_cache(self) -> None:
        """Forget processed media."""
        if self._media is not None:
            self._media.reset_cache()

    def shutdown(self) -> None:
        """End the threads after their current work, without waiting."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, prompt: Prompt) -> _Loading | None:
        """Begin to load the media of a prompt; None for one without, and for a model that takes none.

        Raises InvalidRequest for a wrong number.
        """
        if self._limits and has_field(prompt, ENCODER_PROMPT):
            around: Any = prompt
            inner = self._begin(around[ENCODER_PROMPT])
            return None if inner is None else inner._replace(around=around)
        if not self._limits or not has_field(prompt, DATA):
            return None
        fields: Any = prompt
        given = self._checked(fields[DATA])
        uuids = _uuids(fields.get(UUIDS), {modality: len(items) for modality, items in given.items()})
        sizes: list[int] = []

        def load(modality: str, item: GivenMedia) -> Media:
            if sum(sizes) > _MAX_BYTES:
                raise InvalidMedia(
                    f"{item.name}: the media before it have more than {_MAX_BYTES:,} bytes. Give fewer of them."
                )
            media = self._loader.load(modality, item.given, item.name, detail=item.detail)
            sizes.append(media.num_bytes)
            return media

        def future(modality: str, item: GivenMedia) -> Future[Media]:
            if not isinstance(item.given, Media):
                return self._threads.submit(load, modality, item)
            # It was loaded before.
            done: Future[Media] = Future()
            done.set_result(item.given)
            return done

        return _Loading(fields, {name: [future(name, item) for item in items] for name, items in given.items()}, uuids)

    def _checked(self, data: Any) -> dict[str, list[GivenMedia]]:
        if not isinstance(data, Mapping):
            raise InvalidRequest(
                f"multi_modal_data={shown(data)} is not valid. Allowed: a dictionary of lists by modality."
            )
        checked = {}
        for modality, items in data.items():
            if items is None:
                continue
            if modality not in self._limits:
                taken = ", ".join(["text", *self._limits])
                raise UnsupportedParameter(
                    f"multi_modal_data has {shown(modality)}, which this model does not take. Allowed: {taken}."
                )
            has_features = isinstance(items, Mapping) and are_features(modality, items)
            name = f"multi_modal_data.{modality}"
            listed = self._loader.features(modality, items, name) if has_features else _listed(modality, items)
            most = self._limits[modality]
            if len(listed) > most:
                raise InvalidRequest(
                    f"The prompt has {len(listed)} items of {modality}. Allowed: {most} (limit_mm_per_prompt)."
                )
            checked[modality] = [
                item if isinstance(item, GivenMedia) else GivenMedia(item, f"{name}[{number}]")
                for number, item in enumerate(listed)
            ]
        return checked


def _listed(modality: str, items: Any) -> list[Any]:
    """Items of a modality, of which one may be given without a list."""
    num_dimensions = getattr(items, "ndim", None)
    if num_dimensions is not None:
        # Arrays and tensors: of one item, or of several of one size.
        of_one = {IMAGE: (2, 3), AUDIO: (1,), VIDEO: (4,)}[modality]
        return [items] if num_dimensions in of_one else list(items)
    if modality == VIDEO and isinstance(items, list) and items and all(map(_is_frame, items)):
        return [items]
    if modality == AUDIO and isinstance(items, list) and items and all(isinstance(one, (int, float)) for one in items):
        return [items]
    # (array, rate), or (frames, metadata).
    is_pair = isinstance(items, tuple) and modality != IMAGE
    listed = None if is_pair else as_list(items)
    return [items] if listed is None else listed


def _is_frame(item: Any) -> bool:
    """Whether an item of a list is a frame of a video: an array of an image, or an image of PIL."""
    return getattr(item, "ndim", None) in (2, 3) or callable(getattr(item, "getchannel", None))


def _uuids(given: Any, counts: Mapping[str, int]) -> dict[str, list[str | None]]:
    """Names of items, a list per modality. Raises InvalidRequest for other numbers than of items."""
    uuids = {}
    for modality, names in given.items() if isinstance(given, Mapping) else [] if given is None else [("", given)]:
        listed = [names] if isinstance(names, str) else as_list(names)
        count = counts.get(modality, 0)
        if listed is None or len(listed) != count or not all(name is None or isinstance(name, str) for name in listed):
            raise InvalidRequest(
                f"{UUIDS}={shown(given)} is not valid. Allowed: a dictionary of lists by modality, with a text or None "
                f"for each item: {dict(counts)}."
            )
        uuids[modality] = listed
    return uuids
