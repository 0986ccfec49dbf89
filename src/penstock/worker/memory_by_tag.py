"""Long-lived memory of a worker by tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from penstock.contract.memory_tags import KV_CACHE, WEIGHTS
from penstock.device import Device
from penstock.layers.tensors_of import tensors_of
from penstock.runner.model_runner import ModelRunner
from penstock.worker.page_prefaulting import PagePrefaulting
from penstock.worker.weight_updates import WeightUpdates


class _Weights(Protocol):
    @property
    def model(self) -> nn.Module: ...

    @property
    def drafter(self) -> nn.Module | None: ...

    def is_mapped(self, tensor: Tensor) -> bool: ...


class _Features(Protocol):
    def tensors(self, tag: str) -> Sequence[Tensor]: ...

    def drop(self, tag: str) -> None: ...


class MemoryOwner(Protocol):
    """A worker, as far as its memory is concerned."""

    @property
    def own_device(self) -> Device: ...

    @property
    def weights(self) -> _Weights: ...

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def features(self) -> _Features: ...

    @property
    def updates(self) -> WeightUpdates: ...

    def forget_programs(self) -> None: ...


class TaggedTensors(NamedTuple):
    """Tensors of a tag. kept: those whose content comes again from a backup. others: those whose content is lost.

    mapped: those that stay in a file, whose pages are read again when they are used.
    """

    kept: list[Tensor]
    others: list[Tensor]
    mapped: list[Tensor]


class MemoryByTag:
    """Memory of a worker that features may give back, while no step runs.

    Tensors without a tag stay: per-slot state, buffers of steps, and tables that the configuration determines.

    updates: of the weights, which know whether there are any to compute with.
    """

    def __init__(self, worker: MemoryOwner) -> None:
        self._worker = worker
        self._pages: PagePrefaulting | None = None

    @property
    def updates(self) -> WeightUpdates:
        return self._worker.updates

    def tensors(self, tag: str, *, keeps_weights: bool = True) -> TaggedTensors:
        """Tensors of a tag. keeps_weights: whether the model's weights come again, or are sent by the caller."""
        found = TaggedTensors([], [], [])
        if tag == WEIGHTS:
            weights = self._worker.weights
            for one in tensors_of(weights.model):
                # Tables that the configuration determines do not come with weights that are sent.
                is_kept = keeps_weights or not one.is_weight
                kind = found.mapped if weights.is_mapped(one.tensor) else found.kept if is_kept else found.others
                kind.append(one.tensor)
            if weights.drafter is not None:
                found.kept.extend(one.tensor for one in tensors_of(weights.drafter))
        elif tag == KV_CACHE:
            found.others.extend(self._worker.runner.kv_cache.memory)
        found.kept.extend(self._worker.features.tensors(tag))
        return found

    def start_prefaulting(self) -> None:
        """Prefault pages of the KV cache, on a device with on-demand paging."""
        worker = self._worker
        if worker.own_device.kind == "cpu":
            runner = worker.runner
            self._pages = PagePrefaulting(worker.own_device, runner.block_tables, runner.kv_cache, runner.steps)

    def before_release(self, tag: str) -> None:
        """Drop what refers to memory of this tag, or would use it."""
        if tag == KV_CACHE:
            self.close()
        self._worker.features.drop(tag)
        # Their workspaces, and addresses on a device where they change.
        self._worker.forget_programs()

    def after_restore(self, tag: str) -> None:
        """Begin again with memory of this tag."""
        if tag == KV_CACHE:
            self.start_prefaulting()

    def close(self) -> None:
        """End the use of the KV cache beside the steps."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
