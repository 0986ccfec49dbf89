"""Weights from GGUF files, under the names and in the layout of Transformers' checkpoints."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.config.gguf.container import TensorInfo, models_in, parts_of, read_headers
from penstock.config.gguf.fields import Metadata
from penstock.errors import CheckpointError
from penstock.loader.gguf.blocks import StoredTensor, map_tensors
from penstock.loader.gguf.names import TensorNames, names_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Weights of one model. tensors: descriptions, checked against the files."""

    tensors: tuple[TensorInfo, ...]
    names: TensorNames

    @classmethod
    def find(cls, folder: Path) -> GgufWeights | None:
        """Find the GGUF model of a folder, which may be a link; None without one.

        Raises CheckpointError for a damaged file, or several models.
        """
        found = models_in(folder)
        if not found:
            return None
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds several GGUF models: {', '.join(path.name for path in found)}. Give the path of one."
            )
        # Errors name the file itself.
        header = read_headers([path.resolve() for path in parts_of(found[0])])
        names = names_of(Metadata(str(found[0].resolve()), header))
        tensors = tuple(tensor for tensor in header.tensors if names.name(tensor.name) is not None)
        return cls(tensors, names)

    def log_types(self) -> None:
        """Log how many tensors are of each type, and what becomes of them."""
        stored = list(map_tensors(self.tensors))
        kinds = Counter(tensor.type_name for tensor in stored)
        if any(tensor.is_quantized for tensor in stored):
            logger.info(
                "GGUF: %s. Quantised tensors are dequantised while loading, and kept in the dtype of the weights.",
                ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
            )

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights by name, one at a time: mapped memory, or dequantised to float32."""
        for tensor in map_tensors(self.tensors):
            yield self._named(tensor, tensor.dequantised())

    def iterate_without_memory(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over meta tensors of the weights, by name, without reading the files' blocks."""
        for tensor in map_tensors(self.tensors):
            yield self._named(tensor, tensor.without_memory())

    def _named(self, tensor: StoredTensor, values: Tensor) -> tuple[str, Tensor]:
        stored = tensor.info.name
        change = self.names.change(stored)
        return self.names.name(stored) or stored, values if change is None else change(values)
