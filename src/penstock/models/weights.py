"""Strict weight loading: every checkpoint tensor once, no unexpected ones, all of the right shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.layers.weights import Shard, WeightSlot, weight_slots

# Rotary buffers in old checkpoints, derived from the configuration; matches ends of names.
ROTARY_BUFFERS = r"rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES_PER_COMPLAINT = 8
_DUPLICATE = "duplicate"
# Advice for a tensor that comes twice.
ONCE = "Each tensor may come once: remove files that do not belong to the model, or send it once in an update."


@dataclass(frozen=True, slots=True)
class Into:
    """Destination module of a checkpoint module's tensors, and their shard.

    transposed: the checkpoint has matrices as [inputs, outputs] instead of [outputs, inputs].
    """

    module: str
    shard: Shard | None = None
    transposed: bool = False


# Checkpoint module name to destination. `*` stands for a layer's number.
WeightTable = Mapping[str, Into]


def of_layers(table: WeightTable, layers: Iterable[int]) -> WeightTable:
    """Weights of the table's layers with these numbers alone."""
    return {
        name.replace("*", str(layer)): replace(into, module=into.module.replace("*", str(layer)))
        for layer in layers
        for name, into in table.items()
    }


class Elsewhere(nn.Module):
    """Placeholder of a module on another pipeline stage."""


def elsewhere() -> Any:
    """Return a placeholder, typed for attributes of any module class."""
    return Elsewhere()


def names_elsewhere(model: nn.Module, table: WeightTable, num_layers: int) -> list[str]:
    """Regular expressions for checkpoint tensors of the table that belong to other pipeline stages."""
    return [
        re.escape(pattern.replace("*", str(layer))) + r"\.\w+"
        for pattern, into in table.items()
        for layer in range(num_layers if "*" in pattern else 1)
        if _module(model, into, layer) is None
    ]


def _module(model: nn.Module, into: Into, layer: int) -> nn.Module | None:
    """The destination module; None on another stage."""
    module = model
    for name in into.module.replace("*", str(layer)).split("."):
        module = getattr(module, name)  # several times as fast as `get_submodule`
        if isinstance(module, Elsewhere):
            return None
    return module


def modules_of_table(
    model: nn.Module, table: WeightTable, num_layers: int
) -> dict[str, tuple[nn.Module | None, Shard | None]]:
    """Return the modules of a table and their shards, by the names of the checkpoint's modules.

    None for modules of other pipeline stages.
    """
    return {
        pattern.replace("*", str(layer)): (_module(model, into, layer), into.shard)
        for pattern, into in table.items()
        for layer in (range(num_layers) if "*" in pattern else (0,))
    }


def expand_table(model: nn.Module, table: WeightTable, num_layers: int) -> dict[str, WeightSlot]:
    """Return the slots of this stage's checkpoint tensors by name."""
    slots: dict[str, WeightSlot] = {}
    for pattern, into in table.items():
        for layer in range(num_layers) if "*" in pattern else (0,):
            module = _module(model, into, layer)
            if module is None:
                continue
            prefix = pattern.replace("*", str(layer))
            for parameter, slot in weight_slots(module, into.shard).items():
                slots[f"{prefix}.{parameter}"] = _transposed(slot) if into.transposed else slot
    filled = sum(slot.target.numel() for slot in slots.values())
    # A part beside the model, such as an encoder of images, has a table of its own.
    beside = [child for child in model.children() if getattr(child, "has_own_slots", False)]
    num_beside = sum(parameter.numel() for part in beside for parameter in part.parameters())
    owned = sum(parameter.numel() for parameter in model.parameters()) - num_beside
    assert filled == owned, f"the weight table of {type(model).__name__} fills {filled} of {owned} values"
    return slots


def _transposed(slot: WeightSlot) -> WeightSlot:
    last, part = len(slot.shape) - 1, slot.part
    return WeightSlot(slot.shape[::-1], slot.target.t(), part and replace(part, dim=last - part.dim))


def load_into_slots(
    slots: Mapping[str, WeightSlot], ignorable: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy each tensor into its slot.

    ignorable: regular expressions for names without a slot.
    Raises CheckpointError, after all tensors were seen, naming missing, unexpected, misshapen and duplicate ones and
    those of unsupported dtypes. The model's weights are then undefined.
    """
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignorable) or r"(?!)")
    seen: set[str] = set()
    complaints: dict[str, list[str]] = {}
    for name, tensor in weights:
        slot = slots.get(name)
        if slot is None and ignored.fullmatch(name):
            continue
        complaint = _complaint(name, tensor, slot, seen)
        seen.add(name)
        if complaint is not None:
            kind, detail = complaint
            complaints.setdefault(kind, []).append(detail)
        elif slot is not None:
            slot.load(tensor)
    missing = [name for name in slots if name not in seen]
    if missing:
        complaints["missing"] = missing
    if complaints:
        raise CheckpointError(_message(complaints))


def _complaint(name: str, tensor: Tensor, slot: WeightSlot | None, seen: set[str]) -> tuple[str, str] | None:
    """Return the kind of error of a tensor, and its name with details; None for a valid one."""
    if name in seen:
        return _DUPLICATE, name
    if slot is None:
        return "unexpected", name
    if tuple(tensor.shape) != slot.shape:
        return "misshapen", f"{name} (has {list(tensor.shape)}, needs {list(slot.shape)})"
    if tensor.dtype not in _FLOAT_DTYPES and not (slot.takes_integers and tensor.dtype is torch.int8):
        return "of a dtype other than float32, bfloat16 or float16", f"{name} ({tensor.dtype})"
    return None


def _message(complaints: Mapping[str, list[str]]) -> str:
    given = {kind: _listed(kind, names) for kind, names in complaints.items()}
    twice, parts = given.pop(_DUPLICATE, None), list(given.values())
    sentences = []
    if parts:
        sentences = [
            f"The checkpoint does not fit the model that config.json describes. Weights {'; '.join(parts)}.",
            "Check that the weight files belong to this config.json, and download them again if they do.",
        ]
    if twice is not None:
        sentences.append(f"Weights {twice}. {ONCE}")
    return " ".join(sentences)


def _listed(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_PER_COMPLAINT])
    more = f", and {len(names) - _NAMES_PER_COMPLAINT} more" if len(names) > _NAMES_PER_COMPLAINT else ""
    return f"{len(names)} {kind}: {shown}{more}"
