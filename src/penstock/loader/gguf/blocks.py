"""Tensors of GGUF files as they are stored: blocks of a quantised type, in mapped memory.

Products of the blocks take `grid`, everything else takes `dequantised`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoints.gguf.container import TensorInfo
from penstock.checkpoints.json_file import clipped
from penstock.device.stand_in import stands_for_cpu
from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.loader.gguf.grids import BLOCK_TYPES, BlockGrid, grid_of, grid_without_memory

# Types that need no computation, by ggml's number.
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a file, or a part of one.

    shape: outermost dimension first. blocks: uint8 [rows, bytes of a row], a view of the mapped file, of whole blocks.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    blocks: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def type_name(self) -> str:
        """ggml's name of the type, such as Q4_K."""
        return str(_quantization_type(self.info).name)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `dequantised`."""
        return _FLOATS.get(self.info.kind, torch.float32)

    def grid(self) -> BlockGrid | None:
        """The matrix's scales and minimums, on the meta device where tensors stand for the CPU's.

        None for a type without products of its blocks.
        """
        type_ = BLOCK_TYPES.get(self.info.kind)
        if type_ is None or len(self.shape) != 2:
            return None
        if stands_for_cpu():
            return grid_without_memory(self.shape, type_)
        return grid_of(self.blocks, self.shape, type_)

    def multiple(self, dim: int) -> int:
        """Elements along a dimension that are stored together: those of a block, in the last one."""
        return _block_size_and_bytes(self.info)[0] if dim == len(self.shape) - 1 else 1

    def part(self, dim: int, start: int, size: int) -> StoredTensor:
        """Elements `start` to `start + size` of a vector or matrix along a dimension, both multiples of `multiple`."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        if dim < len(self.shape) - 1:
            return replace(self, shape=shape, blocks=self.blocks[start : start + size])
        block_size, block_bytes = _block_size_and_bytes(self.info)
        first = start // block_size * block_bytes
        return replace(self, shape=shape, blocks=self.blocks[:, first : first + size // block_size * block_bytes])

    def at(self, index: int) -> StoredTensor:
        """The tensor at an index of the first dimension."""
        num_rows = len(self.blocks) // self.shape[0]
        rows = self.blocks[index * num_rows : (index + 1) * num_rows]
        return replace(self, shape=self.shape[1:], blocks=rows)

    @property
    def is_quantized(self) -> bool:
        return self.info.kind not in _FLOATS

    def dequantised(self) -> Tensor:
        """The values: a view of the file for float types, float32 from the blocks for others.

        Raises UnsupportedFeature for a type that cannot be dequantised.
        """
        kind = self.info.kind
        if kind in _FLOATS:
            return _readonly_view(self.blocks).view(_FLOATS[kind]).view(self.shape)
        quants = _library("quants")
        try:
            values = quants.dequantize(self.blocks, _quantization_type(self.info))
        except NotImplementedError as error:
            raise UnsupportedFeature(
                f"{self.info.path}: {self.info.name} is of type {self.type_name}, which cannot be dequantised. "
                "Take a file with another quantisation, such as Q4_K_M or Q8_0."
            ) from error
        return torch.from_numpy(values).view(self.shape)


def map_tensors(tensors: Sequence[TensorInfo]) -> Iterator[StoredTensor]:
    """Iterate over tensors of files, in mapped memory.

    Raises CheckpointError, naming tensor and offset, for a truncated file, UnsupportedFeature for an unknown type.
    """
    mapped: dict[Path, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    for info in tensors:
        if info.path not in mapped:
            mapped[info.path] = np.memmap(info.path, dtype=np.uint8, mode="r")
        data, size = mapped[info.path], _size_bytes(info)
        _check_end(info, size, len(data))
        blocks = data[info.start : info.start + size].reshape(math.prod(info.shape[:-1]), -1)
        yield StoredTensor(info, info.shape, blocks)


def check_layout(tensors: Sequence[TensorInfo]) -> None:
    """Raise CheckpointError unless each file's tensors lie one behind another, in order and aligned, as in llama.cpp,
    and end in the file.

    tensors: all of a model, in their files' order. Raises UnsupportedFeature for an unknown type.
    """
    expected: dict[Path, int] = {}
    for info in tensors:
        start = expected.get(info.path, info.data_start)
        if info.start != start:
            raise CheckpointError(
                f"{info.path} is damaged: the tensor {clipped(info.name)} is at offset {info.start}, but those before "
                f"it end at {start}. Download it again."
            )
        end = start + _size_bytes(info)
        expected[info.path] = end + (info.data_start - end) % info.alignment
        _check_end(info, end - start, info.path.stat().st_size)


def _check_end(info: TensorInfo, size: int, file_size: int) -> None:
    if info.start + size > file_size:
        raise CheckpointError(
            f"{info.path} is truncated: the tensor {clipped(info.name)} needs the bytes {info.start} to "
            f"{info.start + size}, and the file has {file_size}. Download it again."
        )


def _block_size_and_bytes(info: TensorInfo) -> tuple[int, int]:
    sizes: tuple[int, int] = _library().GGML_QUANT_SIZES[_quantization_type(info)]
    return sizes


def _size_bytes(info: TensorInfo) -> int:
    block_size, block_bytes = _block_size_and_bytes(info)
    row = info.shape[-1] if info.shape else 0
    if row % block_size or not math.prod(info.shape):
        raise CheckpointError(
            f"{info.path} is damaged: the tensor {clipped(info.name)} at offset {info.start} has the shape "
            f"{list(info.shape)}, whose rows are not of whole blocks of {block_size}. Download it again."
        )
    return math.prod(info.shape) // block_size * block_bytes


def _quantization_type(info: TensorInfo) -> Any:
    try:
        return _library().GGMLQuantizationType(info.kind)
    except ValueError as error:
        raise UnsupportedFeature(
            f"{info.path}: the tensor {clipped(info.name)} at offset {info.start} is of type {info.kind}, which is not "
            "known here. Take a file with another quantisation, such as Q4_K_M or Q8_0."
        ) from error


def _readonly_view(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        # Weights are copied out of the tensor, and never written.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


@cache
def _library(module: str = "") -> ModuleType:
    """The package gguf, or a module of it. Raises UnsupportedFeature where it is not installed."""
    from importlib import import_module

    try:
        return import_module(f"gguf.{module}" if module else "gguf")
    except ImportError as error:
        raise UnsupportedFeature(
            "GGUF files need the package gguf. Install the extra: pip install 'penstock[gguf]'."
        ) from error
