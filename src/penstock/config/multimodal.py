"""Options of images, audio and video in prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.config.checks import check_flag, check_integer
from penstock.errors import ConfigError

MODALITIES = ("image", "audio", "video")
# Items of a modality in a prompt without a limit of its own.
DEFAULT_LIMIT = 999


@dataclass(frozen=True, slots=True)
class MultimodalConfig:
    """encoder_cache_size: tokens of items whose features are kept on the device, at least those of the largest item;
    None takes max_num_batched_tokens, at least 4,096.
    max_num_encoder_input_tokens: tokens of items that a step encodes; None takes encoder_cache_size.
    mm_processor_cache_gb: GiB of processed items that each front end keeps, by their content; 0 for none.
    allowed_local_media_path: folder of the files that requests may name; None allows none.
    allowed_media_domains: servers from which items may be fetched; None allows all with public addresses, an empty list
        none.
    media_io_kwargs: options and limits of reading items, by modality, such as {"video": {"num_frames": 64}}, or JSON.
    enable_mm_embeds: take features in place of images and audio, as the model's encoder makes them (`image_embeds`).
    """

    encoder_cache_size: int | None = None
    max_num_encoder_input_tokens: int | None = None
    mm_processor_cache_gb: float = 4.0
    allowed_local_media_path: str | Path | None = None
    allowed_media_domains: Sequence[str] | None = None
    media_io_kwargs: Mapping[str, Any] | str | None = None
    enable_mm_embeds: bool = False

    def __post_init__(self) -> None:
        for name in ("encoder_cache_size", "max_num_encoder_input_tokens"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        cache_gb = self.mm_processor_cache_gb
        if not isinstance(cache_gb, (int, float)) or isinstance(cache_gb, bool) or not 0 <= cache_gb <= _MAX_CACHE_GB:
            raise ConfigError(f"mm_processor_cache_gb={cache_gb!r} is not valid. Allowed: 0 to {_MAX_CACHE_GB:,}.")
        check_flag("enable_mm_embeds", self.enable_mm_embeds)
        object.__setattr__(self, "media_io_kwargs", _read("media_io_kwargs", self.media_io_kwargs) or None)
        domains = self.allowed_media_domains
        domains = [domains] if isinstance(domains, str) else domains
        if domains is not None and not all(isinstance(domain, str) for domain in domains):
            raise ConfigError(f"allowed_media_domains={domains!r} is not valid. Allowed: a list of names of servers.")
        object.__setattr__(self, "allowed_media_domains", domains)

    def cache_rows(self, max_num_batched_tokens: int) -> int:
        """Rows of the encoder cache."""
        return self.encoder_cache_size or max(max_num_batched_tokens, _MIN_CACHE_ROWS)

    def budget(self, max_num_batched_tokens: int) -> int:
        """Rows that a step encodes at most."""
        return self.max_num_encoder_input_tokens or self.cache_rows(max_num_batched_tokens)

    def item_rows(self, max_num_batched_tokens: int) -> int:
        """Rows of the largest item: it is encoded in one step, and cached."""
        return min(self.budget(max_num_batched_tokens), self.cache_rows(max_num_batched_tokens))


_MIN_CACHE_ROWS = 4096
_MAX_CACHE_GB = 65_536


def media_limits(given: Mapping[str, Any] | str | None, modalities: tuple[str, ...]) -> dict[str, int]:
    """Items of each modality that a prompt may have, without those that it may not have.

    given: value of limit_mm_per_prompt. Raises ConfigError for another value.
    """
    limits = _read("limit_mm_per_prompt", given)
    for name, limit in limits.items():
        count = limit.get("count", DEFAULT_LIMIT) if isinstance(limit, Mapping) else limit
        if name not in MODALITIES or not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(
                f"limit_mm_per_prompt has {name}={shown(limit)}. Allowed: a count of 0 or more for "
                f"{', '.join(MODALITIES)}."
            )
        limits[name] = count
    counts = {modality: limits.get(modality, DEFAULT_LIMIT) for modality in modalities}
    return {modality: count for modality, count in counts.items() if count}


def _read(name: str, given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Dictionary of an option by modality."""
    try:
        fields = parse_json_text(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(
            f"{name}={shown(given)} is not JSON: {error}. Allowed: a dictionary by modality, or JSON of one, such as "
            '{"image": ...}.'
        ) from error
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{name}={shown(given)} is not valid. Allowed: a dictionary by modality, or JSON.")
    return dict(fields)
