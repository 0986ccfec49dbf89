"""What a loaded model is made of, as text."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from penstock.layers.linear import LinearLayer, weights_size_bytes
from penstock.observability.units import format_bytes


def inspect_model(model: nn.Module) -> str:
    """A tree of modules: class, how it computes, its own tensors with shape and dtype, and the bytes of it all.

    Layers that are alike but for their number are shown once.
    """
    return "\n".join(_lines("", model, 0))


def _lines(name: str, module: nn.Module, depth: int) -> Iterator[str]:
    label = f"{name}: " if name else ""
    details = ", ".join(_own(module))
    size = weights_size_bytes(module)
    yield (
        "  " * depth
        + f"{label}{type(module).__name__}"
        + (f"  {details}" if details else "")
        + (f"  {format_bytes(size)}" if size else "")
    )
    for first, last, child in _runs(module):
        count = "" if first == last else f" ({int(last) - int(first) + 1} alike)"
        yield from _lines(first if first == last else f"{first}-{last}{count}", child, depth + 1)


def _own(module: nn.Module) -> Iterator[str]:
    if isinstance(module, LinearLayer):
        yield f"{module.input_size} -> {module.output_size}, {type(module.method).__name__}"
        if module.shares_weight:
            yield "tied"
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        # A weight that a method keeps in its own form leaves an empty parameter behind.
        if tensor.numel():
            yield f"{name} {_form(tensor)}"


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _runs(module: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """Children, numbered neighbours of the same form as one run: (first name, last name, the first)."""
    runs: list[tuple[str, str, nn.Module]] = []
    former = None
    for name, child in module.named_children():
        form = tuple(_lines("", child, 0)) if name.isdecimal() else None
        if form is not None and form == former:
            runs[-1] = (runs[-1][0], name, runs[-1][2])
        else:
            runs.append((name, name, child))
        former = form
    return runs
