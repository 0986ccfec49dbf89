"""Media of requests, decoded from what callers give, within limits that are checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from penstock.config.multimodal import MultimodalConfig
from penstock.contract.param_checks import shown
from penstock.errors import InvalidMedia, InvalidRequest, UnsupportedParameter
from penstock.media.audio import read_audio
from penstock.media.features import are_features, features_of
from penstock.media.images import read_image
from penstock.media.item import AUDIO, IMAGE, VIDEO, Media
from penstock.media.options import MediaOptions
from penstock.media.sources import MediaSources
from penstock.media.video import read_video

DETAILS = ("auto", "low", "high")
# Longer side of an image of low detail, as OpenAI's.
_LOW_PIXELS = 512


class MediaLoader:
    """Loader of the media of requests. Any thread may call it; what it calls mostly releases the interpreter's lock."""

    def __init__(
        self,
        sources: MediaSources | None = None,
        options: MediaOptions | None = None,
        *,
        takes_features: bool = False,
    ) -> None:
        self._sources = sources or MediaSources()
        self._options = options or MediaOptions()
        self._takes_features = takes_features

    @classmethod
    def of(cls, config: MultimodalConfig) -> Self:
        """Loader with the options of an engine. Raises ConfigError for a wrong one."""
        sources = MediaSources(config.allowed_local_media_path, config.allowed_media_domains)
        given: Any = config.media_io_kwargs
        return cls(sources, MediaOptions.read(given), takes_features=config.enable_mm_embeds)

    def features(self, modality: str, given: Any, name: str) -> list[Media]:
        """Items that are given by their features, as `features_of` takes them. name: of them, in errors.

        Raises InvalidRequest; UnsupportedParameter where the engine takes none.
        """
        with _named(name):
            return self._features(modality, given)

    def load(self, modality: str, given: Any, name: str, *, detail: str | None = None) -> Media:
        """Load an item.

        given: a URL or path as text, a `pathlib.Path`, bytes of a file, or `Media`; an image of PIL or an array; audio
            as an array, or as (array, rate); a video as frames, or as (frames, metadata). With features, what
            `features_of` takes.
        name: of the item, in errors. detail: of an image.

        Raises InvalidMedia; UnsupportedParameter for a format whose package is not installed.
        """
        with _named(name):
            return self._loaded(modality, given, detail)

    def _features(self, modality: str, given: Any) -> list[Media]:
        if not self._takes_features:
            raise UnsupportedParameter(
                f"{modality}_embeds is not allowed in this engine. Start it with enable_mm_embeds=True."
            )
        return features_of(modality, given)

    def _loaded(self, modality: str, given: Any, detail: str | None) -> Media:
        if isinstance(given, Media):
            if given.modality != modality:
                raise InvalidMedia(f"It is {given.modality}. Allowed: {modality}.")
            return given
        if are_features(modality, given) and (self._takes_features or isinstance(given, Mapping)):
            found = self._features(modality, given)
            if len(found) > 1:
                raise InvalidMedia(f"It has the features of {len(found)} items. Allowed: one.")
            return found[0]
        if isinstance(given, str) and modality == VIDEO and (frames := self._sources.frames(given)) is not None:
            given = frames
        elif isinstance(given, (str, Path)):
            given = self._sources.read(given)
        elif isinstance(given, (bytearray, memoryview)):
            given = bytes(given)
        media = self._decoded(modality, given, detail)
        return replace(media, file_hash=blake2b(given).hexdigest()) if isinstance(given, bytes) else media

    def _decoded(self, modality: str, given: Any, detail: str | None) -> Media:
        if modality == AUDIO:
            return read_audio(given, self._options.audio)
        if modality == VIDEO:
            return read_video(given, self._options)
        if detail not in (None, *DETAILS):
            raise InvalidMedia(f"detail={shown(detail)} is not valid. Allowed: {', '.join(DETAILS)}.")
        image = read_image(given, self._options.image)
        if detail == "low":
            image.thumbnail((_LOW_PIXELS, _LOW_PIXELS))
        return Media(IMAGE, image, detail=detail or "auto")


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
