"""LoRA adapters in recordings."""

from __future__ import annotations

from typing import Self

from msgspec.structs import replace

from penstock.contract import RpcCall
from penstock.contract.recorded_call import RecordedCall
from penstock.features.lora.request import LoRARequest


class RecordedAdapter(RecordedCall, frozen=True, kw_only=True):
    """Call that loads or removes an adapter. adapter: None for one in memory, and in a call that removes it."""

    feature = "lora_call"
    methods = ("add_lora", "prefetch_lora", "remove_lora")
    key: int
    adapter: LoRARequest | None = None

    @classmethod
    def of(cls, call: RpcCall) -> Self:
        (given,) = call.args
        if not isinstance(given, LoRARequest):
            return cls(method=call.name, key=given)
        return cls(method=call.name, key=given.key, adapter=given if given.tensors is None else None)

    @property
    def place(self) -> int:
        return self.key

    @property
    def empties_place(self) -> bool:
        return self.method == "remove_lora"

    @property
    def is_whole(self) -> bool:
        return self.adapter is not None or self.empties_place

    def redacted(self) -> Self:
        if self.adapter is None:
            return self
        number = self.adapter.lora_int_id
        adapter = LoRARequest(
            str(number), number, load_inplace=self.adapter.load_inplace, identity=self.adapter.identity
        )
        return replace(self, adapter=adapter)

    def repetition(self) -> RpcCall:
        """The call with the adapter's folder as it is now, of which this machine may have a copy."""
        argument = self.key if self.adapter is None else replace(self.adapter, stamp="")
        return RpcCall(self.method, (argument,))
