"""LoRA adapters in messages: the adapter that a caller names, and the part of a request that refers to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.contract.param_checks import shown
from penstock.contract.parts import Part
from penstock.errors import InvalidParameter

# Highest `lora_int_id`.
MAX_NUMBER = 2**31 - 1


class LoRARequest(msgspec.Struct, frozen=True, eq=False):
    """LoRA adapter in PEFT's format, of a folder or in memory; or a reference to one that was added before.

    lora_name: display name. lora_int_id: number of the adapter in its engine, from 1 on.
    lora_path: folder with `adapter_config.json` and the adapter's weights.
    tensors, peft_config: the weights by their names in `adapter_model.safetensors`, and the contents of
        `adapter_config.json`; instead of a folder. With neither, requests use the adapter that was added by this
        number.
    load_inplace: load it again if the engine has an adapter of this number already.
    base_model_name: the model that it changes, as a server's clients see it; "" for the served one.
    identity: identifies the adapter in its deployment, also after its removal; given by the `AdapterList`, 0 before.
    stamp: that of its files when it was listed (`stamp_of`); given by the `AdapterList`.
    version: changes when other weights replace the adapter's in place; given by the `AdapterList`.

    Raises InvalidParameter for fields that are missing or contradict each other.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    tensors: Mapping[str, Any] | None = None
    peft_config: Mapping[str, Any] | None = None
    load_inplace: bool = False
    base_model_name: str = ""
    identity: int = 0
    stamp: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameter(f"lora_name={self.lora_name!r} is not valid. Allowed: a text that is not empty.")
        if type(self.lora_int_id) is not int or not 1 <= self.lora_int_id <= MAX_NUMBER:
            raise InvalidParameter(f"lora_int_id={self.lora_int_id!r} is not valid. Allowed: integers from 1 on.")
        if (self.tensors is None) != (self.peft_config is None):
            raise InvalidParameter(
                f"The adapter {self.lora_name!r} needs both tensors and peft_config, or neither and lora_path."
            )
        if self.tensors is not None and self.lora_path:
            raise InvalidParameter(
                f"The adapter {self.lora_name!r} has a lora_path and also tensors. Give lora_path, or tensors and "
                "peft_config."
            )

    @property
    def has_weights(self) -> bool:
        """Whether the weights are given, as a folder or in memory."""
        return self.tensors is not None or bool(self.lora_path)

    @property
    def key(self) -> int:
        """Key of the adapter in a core and its workers: its identity, or the number of one that has none."""
        return self.identity or self.lora_int_id

    @property
    def reference(self) -> LoRARequest:
        """The adapter by its number alone."""
        return LoRARequest(self.lora_name, self.lora_int_id)

    @property
    def part(self) -> AdapterPart:
        """The part of requests with this adapter."""
        return AdapterPart(
            lora_int_id=self.lora_int_id,
            lora_name=self.lora_name,
            lora_path=self.lora_path,
            identity=self.identity,
            stamp=self.stamp,
            version=self.version,
        )


def parts_of_adapter(lora_request: Any) -> list[AdapterPart]:
    """The part of a request with this adapter, or none for None. Raises InvalidParameter for anything else."""
    if lora_request is None:
        return []
    if not isinstance(lora_request, LoRARequest):
        raise InvalidParameter(f"lora_request={shown(lora_request)} is not valid. Allowed: a LoRARequest, or None.")
    return [lora_request.part]


def adapter_of(parts: Mapping[str, Part] | None) -> LoRARequest | None:
    """The adapter of a request with these parts."""
    part = (parts or {}).get(AdapterPart.feature)
    return part.adapter if isinstance(part, AdapterPart) else None


def stamp_of(folder: str) -> str:
    """Sizes and times of change of an adapter's files, which tell whether they are still the same; "" without files."""
    try:
        files = sorted(Path(folder).expanduser().glob("adapter_*"))
        return ";".join(f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files)
    except (OSError, RuntimeError, ValueError):
        return ""


class AdapterPart(Part, frozen=True, kw_only=True):
    """The adapter of a request.

    lora_path: "" for an adapter in memory. identity, stamp: as in `LoRARequest`; a request keeps those which it began
    with.
    version: as in `LoRARequest`, but that of files without a stamp changes each time that they are read; it keeps
    cached prefixes of different weights apart.
    digest: of the adapter's matrices, where blocks are kept beyond the engine; "" where it is not known.
    """

    feature = "lora"
    lora_int_id: int
    lora_name: str
    lora_path: str = ""
    identity: int = 0
    stamp: str = ""
    version: int = 0
    digest: str = ""

    @property
    def key(self) -> int:
        """As in `LoRARequest`."""
        return self.identity or self.lora_int_id

    @property
    def adapter(self) -> LoRARequest:
        """The adapter, of its folder."""
        return LoRARequest(
            self.lora_name,
            self.lora_int_id,
            self.lora_path,
            identity=self.identity,
            stamp=self.stamp,
            version=self.version,
        )

    def anon_repr(self) -> str:
        return f"AdapterPart({self.lora_int_id}, {self.identity})"

    def replayed(self) -> AdapterPart:
        """The part without a stamp: copies of files have other times of change."""
        return msgspec.structs.replace(self, stamp="")

    @property
    def has_lasting_keys(self) -> bool:
        return bool(self.digest)

    def block_keys(self) -> tuple[str, ...]:
        return (self.digest or f"{self.key}.{self.version}",)
