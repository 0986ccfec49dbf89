"""Adapters that a replacement core needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.contract.lora import LoRARequest


class KeptAdapters:
    """Adapters that callers have added, offered, pinned and removed in one engine, in their last state.

    A core learns of others from the requests that name their folders.
    """

    def __init__(self) -> None:
        self._adapters: dict[int, LoRARequest] = {}
        self._pinned: set[int] = set()
        self._removed: set[int] = set()

    def note(self, method: str | Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Note a worker method that was called; others than those of adapters are ignored."""
        if method not in ("add_lora", "offer_loras", "remove_lora", "pin_lora"):
            return
        (argument,) = arguments
        if method == "add_lora":
            # The last one is loaded last, and so stays longest.
            self._adapters.pop(argument.lora_int_id, None)
            self._keep(replace(argument, load_inplace=False))
        elif method == "offer_loras":
            for adapter in argument:
                if adapter.lora_int_id not in self._adapters and adapter.lora_int_id not in self._removed:
                    self._keep(adapter)
        elif method == "remove_lora":
            self._adapters.pop(argument, None)
            self._pinned.discard(argument)
            self._removed.add(argument)
        elif argument in self._adapters:
            self._pinned.add(argument)

    def calls(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Methods and arguments that bring a new core into this state; it reads folders when requests need them."""
        for adapter in self._adapters.values():
            if adapter.tensors is not None or adapter.lora_int_id in self._pinned:
                yield "add_lora", (adapter,)
        if self._adapters:
            yield "offer_loras", (list(self._adapters.values()),)
        for lora_id in sorted(self._pinned):
            yield "pin_lora", (lora_id,)
        for lora_id in sorted(self._removed):
            yield "remove_lora", (lora_id,)

    def _keep(self, adapter: LoRARequest) -> None:
        self._adapters[adapter.lora_int_id] = adapter
        self._removed.discard(adapter.lora_int_id)
