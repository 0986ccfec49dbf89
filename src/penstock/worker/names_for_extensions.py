"""Names by which methods of trainers' extensions reach a worker's model (`worker_extension_cls`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from penstock.config import ModelConfig
from penstock.contract.live_model import LiveModel
from penstock.device import Device
from penstock.device.dtypes import DtypeChoice
from penstock.parallel import ParallelState


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
