"""Counting of tensor memory on devices without allocator statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Dispatch mode that tracks live and peak bytes of operator outputs, by storage.

    Exact, unlike RSS, which includes whole pages and the allocator's cache. Temporaries inside an operator, and
    memory of other objects, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: for modes that skip dynamo, torch imports it, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, given)) if _has_storage(leaf)}
        result = func(*args, **given)
        for leaf in tree_leaves(result):
            if _has_storage(leaf):
                self._note(leaf, known)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that was not made by an operator."""
        self._note(tensor, set())

    def _note(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in known or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.num_bytes += self._alive[key]
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._alive.pop(key, 0)


def _has_storage(leaf: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with a storage. Opaque oneDNN tensors (packed weights) have none; steps make none."""
    return isinstance(leaf, Tensor) and not leaf.is_mkldnn
