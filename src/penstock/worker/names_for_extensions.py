"""Names by which functions, and methods of trainers' extensions (`worker_extension_cls`), reach a worker's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.config import ModelConfig
from penstock.contract.live_model import LiveModel
from penstock.device import Device
from penstock.device.dtypes import DtypeChoice
from penstock.errors import UnsupportedFeature
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState


def load_by_updates(model: nn.Module, load: Callable[[list[tuple[str, Any]]], object]) -> None:
    """Let `load_weights` of a model that serves take tensors as an update of its weights.

    load: takes (name, tensor) pairs. Models within it refuse tensors of their own.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedFeature(
            f"A part of {type(model).__name__} takes no weights by itself while the engine runs. Call load_weights of "
            "the whole model, with all tensors of its checkpoint."
        )

    for module in model.modules():
        if isinstance(module, CausalLM):
            module.load_weights = refuse  # type: ignore[method-assign]
    model.load_weights = LiveModel(load).load_weights  # type: ignore[assignment]


class ExtensionsModelConfig:
    """Configuration of the worker's model, with torch's dtype of its weights, which trainers compare with theirs."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class NamesForExtensions(ABC):
    """vLLM's names in a worker: `model_runner.model.load_weights`, `model_config`, `device` and `local_rank`."""

    config: Any
    parallel: ParallelState

    @property
    @abstractmethod
    def dtype(self) -> DtypeChoice: ...

    @property
    @abstractmethod
    def own_device(self) -> Device: ...

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace weights of the model."""

    @property
    def model_runner(self) -> SimpleNamespace:
        """Runner whose `model.load_weights` replaces weights; it has nothing else."""
        return SimpleNamespace(model=LiveModel(self.load_weights))

    @property
    def model_config(self) -> ExtensionsModelConfig:
        return ExtensionsModelConfig(self.config.model, self.dtype.weights_torch_dtype)

    @property
    def device(self) -> torch.device:
        """Torch's device of the worker's tensors."""
        return self.own_device.torch_device

    @property
    def local_rank(self) -> int:
        """Rank among those of this machine."""
        rank = self.parallel.local_rank
        return self.parallel.rank if rank is None else rank
