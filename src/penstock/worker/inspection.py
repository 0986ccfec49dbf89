"""What a loaded model is made of, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from penstock.layers.linear import LinearLayer, PackedMethod, weights_size_bytes
from penstock.observability.units import format_bytes


def inspect_model(model: nn.Module) -> str:
    """A tree of modules: class, how it computes, its own tensors with shape and dtype, and the bytes of it all.

    Layers that are alike but for their number are shown once.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = frozenset(parameter for parameter, count in owners.items() if count > 1)
    return "\n".join(_lines("", model, 0, tied))


def _lines(name: str, module: nn.Module, depth: int, tied: frozenset[int]) -> Iterator[str]:
    label = f"{name}: " if name else ""
    details = ", ".join(_own(module, tied))
    size = weights_size_bytes(module)
    yield (
        "  " * depth
        + f"{label}{type(module).__name__}"
        + (f"  {details}" if details else "")
        + (f"  {format_bytes(size)}" if size else "")
    )
    for first, last, child in _runs(module, tied):
        count = "" if first == last else f" ({int(last) - int(first) + 1} alike)"
        yield from _lines(first if first == last else f"{first}-{last}{count}", child, depth + 1, tied)


def _own(module: nn.Module, tied: frozenset[int]) -> Iterator[str]:
    if isinstance(module, LinearLayer):
        yield f"{module.input_size} -> {module.output_size}, {type(module.method).__name__}"
        packed = module.method.packed_OI if isinstance(module.method, PackedMethod) else None
        if packed is not None:
            yield f"packed {_form(packed)}"
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        note = " (tied)" if id(tensor) in tied else ""
        # A weight that a method keeps in its own form leaves an empty parameter behind.
        if tensor.numel() or note:
            yield f"{name} {_form(tensor) if tensor.numel() else 'elsewhere'}{note}"


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _runs(module: nn.Module, tied: frozenset[int]) -> list[tuple[str, str, nn.Module]]:
    """Children, numbered neighbours of the same form as one run: (first name, last name, the first)."""
    runs: list[tuple[str, str, nn.Module]] = []
    former = None
    for name, child in module.named_children():
        form = tuple(_lines("", child, 0, tied)) if name.isdecimal() else None
        if form is not None and form == former:
            runs[-1] = (runs[-1][0], name, runs[-1][2])
        else:
            runs.append((name, name, child))
        former = form
    return runs
