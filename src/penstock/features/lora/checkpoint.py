"""Adapter checkpoints in PEFT's format: low-rank matrices by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.json_file import shown
from penstock.errors import CheckpointError
from penstock.features.lora.low_rank import LowRank, check_rank
from penstock.features.lora.peft_config import PeftConfig, read_fields
from penstock.features.lora.request import LoRARequest
from penstock.features.lora.stacked import NO_STACKED_PARAMETERS, StackedParameters
from penstock.loader.pytorch_bin import iterate_pytorch_bins
from penstock.loader.safetensors import iterate_safetensors
from penstock.loader.weight_files import WeightFiles

_WEIGHTS = "adapter_model.safetensors"
_OLD_WEIGHTS = "adapter_model.bin"
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?:lora_(?P<matrix>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<base>base_layer)\.weight)"
)
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES_SHOWN = 6


def read_adapter(
    request: LoRARequest,
    max_rank: int,
    stacked: StackedParameters = NO_STACKED_PARAMETERS,
    named: Callable[[str], str] = str,
) -> dict[str, LowRank]:
    """Read an adapter's matrices by the names of their modules in Transformers.

    stacked: stacked parameters of the model. named: maps a module's name in the adapter to that in the model.

    Raises CheckpointError for missing or damaged files, unknown or incomplete tensors and ranks above `max_rank`, and
    UnsupportedFeature for fields of its configuration that are not implemented.
    """
    name = request.lora_name
    if request.tensors is None:
        try:
            fields, tensors = _read_folder(name, Path(request.lora_path).expanduser())
        except (OSError, RuntimeError) as error:
            # A path that is too long, or of a user that is not there; a folder that must not be read.
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"The adapter {name!r} cannot be read from lora_path={shown(request.lora_path)}: {reason}. Allowed: a "
                "folder in PEFT's format."
            ) from error
    else:
        fields, tensors = request.peft_config or {}, request.tensors.items()
    config = PeftConfig.read(name, fields)
    matrices = _by_module(name, tensors, named)
    if not matrices:
        raise CheckpointError(f"The adapter {name!r} has no tensors.")
    config = config.matched(name, [*matrices, *(stacked.names if config.target_parameters else ())])
    read: dict[str, LowRank] = {}
    for module, found in matrices.items():
        pair = found.get("A"), found.get("B")
        of_modules = stacked.split(name, module, pair, config, max_rank) if config.target_parameters else None
        for one, low_rank in (of_modules or {module: _low_rank(name, module, found, config, max_rank)}).items():
            if one in read:
                raise _given_twice(name, f"matrices of {one}")
            read[one] = low_rank
    return read


def _read_folder(name: str, folder: Path) -> tuple[Mapping[str, Any], Iterable[tuple[str, Tensor]]]:
    fields = read_fields(name, folder)
    if (folder / _WEIGHTS).is_file():
        return fields, iterate_safetensors(WeightFiles((folder / _WEIGHTS,)))
    if (folder / _OLD_WEIGHTS).is_file():
        return fields, iterate_pytorch_bins(WeightFiles((folder / _OLD_WEIGHTS,)))
    raise CheckpointError(f"The adapter {name!r} has neither {_WEIGHTS} nor {_OLD_WEIGHTS} in {folder}.")


def _by_module(
    name: str, tensors: Iterable[tuple[str, Tensor]], named: Callable[[str], str]
) -> dict[str, dict[str, Tensor]]:
    """Sort tensors by module of the model and kind: "A", "B" (of an embedding "embedding A" …), and "base"."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for tensor_name, tensor in tensors:
        match = _NAME.fullmatch(tensor_name)
        if match is None:
            unknown.append(tensor_name)
            continue
        kind = match["matrix"] or ("base" if match["base"] else f"embedding {match['embedding']}")
        if tensor.dim() != 2 or tensor.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"The adapter {name!r} has {tensor_name} as {list(tensor.shape)} in {tensor.dtype}. Allowed: matrices "
                "in float32, bfloat16 or float16."
            )
        of_module = found.setdefault(named(match["module"]), {})
        if kind in of_module:
            raise _given_twice(name, tensor_name)
        of_module[kind] = tensor
    if unknown:
        raise CheckpointError(
            f"The adapter {name!r} has {len(unknown)} tensors that are no LoRA matrices: {some_of(unknown)}. Train it "
            "without them, or merge it into a checkpoint."
        )
    return found


def _low_rank(name: str, module: str, matrices: Mapping[str, Tensor], config: PeftConfig, max_rank: int) -> LowRank:
    is_embedding = "embedding A" in matrices or "embedding B" in matrices
    kinds = ("embedding A", "embedding B") if is_embedding else ("A", "B")
    if set(matrices) - {"base"} != set(kinds):
        raise CheckpointError(
            f"The adapter {name!r} has only {', '.join(sorted(matrices))} of the matrices of {module}. "
            f"Needed: {' and '.join(kinds)}."
        )
    a, b = (matrices[kind] for kind in kinds)
    rank = config.rank_of(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"The adapter {name!r} has matrices of {list(a.shape)} and {list(b.shape)} for {module}, which do not have "
            f"the rank {rank} of its adapter_config.json (r, rank_pattern)."
        )
    check_rank(name, module, rank, max_rank)
    return LowRank(a, b, config.scaling_of(module), is_embedding, matrices.get("base"))


def _given_twice(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"The adapter {name!r} has {what} twice, such as under two names of its module. Leave one of them out."
    )


def some_of(names: list[str]) -> str:
    """The first names of a list, for errors."""
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
