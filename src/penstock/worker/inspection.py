"""Text tree of a loaded model's modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import Tensor, nn

from penstock.layers.linear import LinearLayer, PackedMethod, weights_size_bytes
from penstock.observability.units import format_bytes


def inspect_model(model: nn.Module) -> str:
    """Return the module tree: class, linear method, tensors with shape and dtype, and bytes.

    Consecutive equal layers are shown once.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    ties = {parameter: " (tied)" for parameter, count in owners.items() if count > 1}
    for name, module in model.named_modules():
        if isinstance(module, LinearLayer):
            lent = [embedding for embedding in module.tied_to if embedding.lookup is not None]
            ties |= {id(embedding): f"reads the weight of {name} (tied)" for embedding in lent}
    return "\n".join(_lines("", model, 0, ties))


# Notes on tied weights, by id of a parameter that several modules share, or of an embedding that reads another module's
# packed weight.
_Ties: TypeAlias = Mapping[int, str]


def _lines(name: str, module: nn.Module, depth: int, ties: _Ties) -> Iterator[str]:
    label = f"{name}: " if name else ""
    details = ", ".join(_own(module, ties))
    size = weights_size_bytes(module)
    yield (
        "  " * depth
        + f"{label}{type(module).__name__}"
        + (f"  {details}" if details else "")
        + (f"  {format_bytes(size)}" if size else "")
    )
    for first, last, child in _runs(module, ties):
        count = "" if first == last else f" ({int(last) - int(first) + 1} alike)"
        yield from _lines(first if first == last else f"{first}-{last}{count}", child, depth + 1, ties)


def _own(module: nn.Module, ties: _Ties) -> Iterator[str]:
    if isinstance(module, LinearLayer):
        yield f"{module.input_size} -> {module.output_size}, {module.method.description}"
        if module.has_smoothed_inputs:
            yield "inputs smoothed"
        kept = module.method.kept if isinstance(module.method, PackedMethod) else ()
        if kept:
            lends = any(embedding.lookup is not None for embedding in module.tied_to)
            forms = " and ".join(map(_form, kept))
            yield f"packed {forms}" + (" (tied: the embedding reads it too)" if lends else "")
    if id(module) in ties:
        yield ties[id(module)]
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        # A weight that a linear method has packed leaves an empty parameter.
        if tensor.numel():
            yield f"{name} {_form(tensor)}" + ties.get(id(tensor), "")


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _runs(module: nn.Module, ties: _Ties) -> list[tuple[str, str, nn.Module]]:
    """Return children, consecutive equal ones as one run: (first name, last name, first module)."""
    runs: list[tuple[str, str, nn.Module]] = []
    former = None
    for name, child in module.named_children():
        form = tuple(_lines("", child, 0, ties)) if name.isdecimal() else None
        if form is not None and form == former:
            runs[-1] = (runs[-1][0], name, runs[-1][2])
        else:
            runs.append((name, name, child))
        former = form
    return runs
