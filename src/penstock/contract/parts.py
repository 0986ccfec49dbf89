"""Message parts: typed data that a feature or a plugin adds to requests, steps and results.

    class AdapterPart(Part, frozen=True, kw_only=True):
        feature = "adapter"
        adapter_id: int

        def block_keys(self) -> tuple[str, ...]:
            return (str(self.adapter_id),)

    register_feature(Feature(name="adapters", parts=(AdapterPart,)))

Every process that reads such messages registers the type, as a plugin does. A message without parts has None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from penstock.contract.param_checks import shown
from penstock.errors import ConfigError, InvalidParameter


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of message parts. feature: key of the part in messages.

    may_repeat: whether a step with this part, or with a request that has it, may be repeated.
    """

    feature: ClassVar[str]
    may_repeat: ClassVar[bool] = True

    def anon_repr(self) -> str:
        """Describe the part for logs and recordings, without a user's data."""
        return type(self).__name__

    def check(self, vocab_size: int) -> None:
        """Raise InvalidMessage for data that a worker must not use; called before a step is sampled with the part."""

    def block_keys(self) -> tuple[str, ...]:
        """Return extra keys of block hashes: only requests with equal keys share cached prefixes."""
        return ()

    def replayed(self) -> Part:
        """Return the part for a replay of its message, which may be on another machine."""
        return self

    @property
    def has_lasting_keys(self) -> bool:
        """Whether `block_keys` and `keys_of_block` mean the same in other processes, as hashes do."""
        return False

    @property
    def needs_all_tokens(self) -> bool:
        """Whether all tokens of a request with this part are computed, without prefix-cache hits."""
        return False

    @property
    def has_prompt_ids(self) -> bool:
        """Whether the ids of the prompt's tokens say what they are; given embeddings have placeholders."""
        return True

    @property
    def given_values(self) -> str | None:
        """Name of the field with values that the model computes with as they are, such as embeddings; None without."""
        return None

    @property
    def source_length(self) -> int:
        """Positions of the encoder's output that the request's cross attention reads; 0 without any."""
        return 0

    def of_tokens_from(self, start: int) -> Part:
        """Return the part for a worker that computes the tokens from start on, without data of earlier ones."""
        return self

    def of_replayed_step(self, req_id: str, start: int, stop: int) -> Part | None:
        """Return the feature's part of a step that computes the request's tokens from start to stop in a replay.

        Such a step computes again what the recorded engine had in its prefix cache. None for a feature without one.
        """
        return None

    def keys_of_block(self, start: int, stop: int) -> tuple[str, ...]:
        """Return extra keys of the block of the tokens from start to stop, such as of an image among them.

        Blocks after it are shared by requests with equal keys of it alone, too.
        """
        return ()


class OutputPart(Part, frozen=True, kw_only=True):
    """Base of parts of a request's outputs (`SchedulerFeature.parts_of_outputs`)."""

    def after(self, before: OutputPart | None) -> OutputPart:
        """Return the part of the output so far, which may be the earlier one, changed. before: that before this step.

        A lost core's replacement begins again with the request's first token.
        """
        return self

    def result(self, num_tokens: int) -> Any:
        """Return the result for the caller at the request's end. num_tokens: of the prompt and the output."""
        return self


_AnyPart = TypeVar("_AnyPart", bound=Part)
_types: dict[str, type[Part]] = {}


class Parts(dict[str, Part]):
    """Parts of a message by feature."""

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Parts:
        """Collect parts by feature."""
        return cls((part.feature, part) for part in parts)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Parts:
        """Convert plain data, or parts. Raises InvalidParameter for an unknown feature or wrong data."""
        parts = cls()
        if not isinstance(data, Mapping):
            raise InvalidParameter(f"Parts are {shown(data)}. Allowed: a mapping by feature.")
        for name, value in data.items():
            part_type = _types.get(name)
            if part_type is None:
                raise InvalidParameter(
                    f"There is no part {name!r}. Allowed: {', '.join(sorted(_types)) or 'none'}. Load the plugin of "
                    "its feature in every process."
                )
            try:
                parts[name] = value if isinstance(value, part_type) else msgspec.convert(value, part_type)
            except msgspec.ValidationError as error:
                raise InvalidParameter(f"The part {name!r} is not valid: {error}.") from error
        return parts

    @property
    def may_repeat(self) -> bool:
        """Whether all parts allow repeated steps."""
        return all(part.may_repeat for part in self.values())

    @property
    def have_lasting_keys(self) -> bool:
        """Whether the keys of a request's blocks mean the same to other engines, and after a restart."""
        return all(
            part.has_lasting_keys or not (part.block_keys() or type(part).keys_of_block is not Part.keys_of_block)
            for part in self.values()
        )

    @property
    def need_all_tokens(self) -> bool:
        """Whether a part needs all tokens computed."""
        return any(part.needs_all_tokens for part in self.values())

    @property
    def have_prompt_ids(self) -> bool:
        """Whether the ids of the prompt's tokens say what they are."""
        return all(part.has_prompt_ids for part in self.values())

    @property
    def given_values(self) -> str | None:
        """Name of a part's field with values that the model computes with as they are."""
        return next((name for part in self.values() if (name := part.given_values) is not None), None)

    @property
    def source_length(self) -> int:
        """Positions of the encoder's output."""
        return sum(part.source_length for part in self.values())

    def of_tokens_from(self, start: int) -> Parts:
        """As `Part.of_tokens_from`, of all parts."""
        return Parts((name, part.of_tokens_from(start)) for name, part in self.items())

    def anon_repr(self) -> str:
        """Describe all parts for logs."""
        return ", ".join(part.anon_repr() for part in self.values())


def register_part(part_type: type[_AnyPart]) -> type[_AnyPart]:
    """Register a part type; idempotent, and usable as a decorator.

    Raises ConfigError if another type has the same feature name.
    """
    known = _types.setdefault(part_type.feature, part_type)
    if (known.__module__, known.__qualname__) != (part_type.__module__, part_type.__qualname__):
        raise ConfigError(f"Two types of parts are named {part_type.feature!r}: {known} and {part_type}.")
    _types[part_type.feature] = part_type
    return part_type


def part_of(parts: Parts | None, part_type: type[_AnyPart]) -> _AnyPart | None:
    """Return the part of this type, or None."""
    part = None if parts is None else parts.get(part_type.feature)
    return part if isinstance(part, part_type) else None


def read_custom(wanted: type, data: Any) -> Any:
    """Decoding hook of msgspec for `Parts`."""
    if wanted is Parts:
        return Parts.read(data)
    raise NotImplementedError(f"Messages cannot carry {wanted}.")
