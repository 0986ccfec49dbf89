"""Header of a packed state: what is needed to build the layers around its tensors, as a typed record.

It is JSON in the files, and checked as a whole when it is read, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

from penstock.checkpoints.json_file import clipped, shown
from penstock.errors import CheckpointError
from penstock.kernels.native import NATIVE
from penstock.layers.linear import NativeBfloat16Method, NativeMethod, OneDnnMethod, PlainMethod
from penstock.layers.quantization.float8 import Float8Method
from penstock.layers.quantization.method import PRODUCTS, Int4ResidualMethod, QuantizedMethod, ReorderedMethod

# Raised when a packed weight of the same sizes gets other bytes, or the header another meaning.
LAYOUT_VERSION = 1
# Field of the metadata of a file, or name of a tensor in it.
HEADER = "penstock_packed_state"
TORCH = "torch"
NATIVE_METHODS = {method.__name__: method for method in (NativeMethod, NativeBfloat16Method)}
QUANTIZED_METHODS = {method.__name__: method for method in (QuantizedMethod, Int4ResidualMethod, ReorderedMethod)}
_LARGEST = 1 << 31
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_ADVICE = "Save the weights again, or load the checkpoint that they were made from."
_Record = TypeVar("_Record")

FloatName: TypeAlias = Literal["float32", "bfloat16", "float16"]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a header, all of them required."""


class Kernels(_Fields, frozen=True):
    """Layout of packed weights. device: "cpu" or "cuda". floats, integers: instruction sets whose kernels read weights
    of floats and quantised ones; "torch" without C++ kernels.
    """

    device: str
    floats: str
    integers: str

    @classmethod
    def here(cls, device: str) -> Kernels:
        if device != "cpu":
            return cls(device=device, floats=TORCH, integers=TORCH)
        floats = TORCH if NATIVE is None else NATIVE.instruction_set.name
        return cls(device=device, floats=floats, integers=getattr(PRODUCTS, "name", TORCH))


class FormOfWeight(_Fields, frozen=True):
    """Fields of a `QuantizedShape` that the layer does not say."""

    bits: Literal[4, 8]
    group_size: Size
    has_minimums: bool
    scale_bytes: Literal[1, 2, 4]


class LayerEntry(_Fields, frozen=True):
    """Entry of a linear layer. method: class of its linear method. is_smoothed: `LinearLayer.has_smoothed_inputs`."""

    method: str
    is_smoothed: bool


class PackedEntry(LayerEntry, frozen=True):
    """Entry of a layer whose method has its weight packed. tensors: attributes of the method. dtype: of the values."""

    tensors: list[str]
    dtype: FloatName


class QuantizedEntry(PackedEntry, frozen=True):
    shape: FormOfWeight


class Float8Entry(PackedEntry, frozen=True):
    block_size: Size


class _OfMethod(msgspec.Struct, frozen=True):
    """The field of an entry that says which others there are."""

    method: str


class PackedHeader(_Fields, frozen=True):
    """Header of a packed state.

    quantization: option that the state was made with. dtype, weights_dtype: of the computation, and of matrices.
    is_tied: whether the output projection is the embedding. layers: a `LayerEntry` by the name of each linear layer.
    """

    version: int
    kernels: Kernels
    quantization: str | None
    dtype: FloatName
    weights_dtype: FloatName
    is_tied: bool
    layers: dict[str, Any]

    def encoded(self) -> str:
        """The header as JSON."""
        return msgspec.json.encode(self).decode()


def decode_object(path: Path | str, written: str | bytes) -> dict[str, Any]:
    """Decode a header. Raises CheckpointError, naming the file, for text that is no JSON object."""
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its {HEADER} is no JSON object. {_ADVICE}") from error


def checked_header(path: Path | str, content: Mapping[str, Any]) -> PackedHeader:
    """Return the header with this content.

    Raises CheckpointError, naming the file, the field and its value, for one of another version, and for fields that
    are missing, unknown, of another type, or out of their range.
    """
    version = content.get("version")
    if type(version) is int and version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{path} has packed weights of layout version {version}, but this version of Penstock reads "
            f"{LAYOUT_VERSION}. Load the checkpoint that they were made from, and save them again."
        )
    header = checked(path, content, PackedHeader)
    layers = {name: _checked_entry(path, f"layers.{name}", entry) for name, entry in header.layers.items()}
    return msgspec.structs.replace(header, layers=layers)


def checked(path: Path | str, content: object, kind: type[_Record], name: str = "") -> _Record:
    """Return a record of a type with this content. name: of the record in the header, where it is a part.

    Raises CheckpointError as `checked_header`.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        complaint, _, place = str(error).partition(" - at `$")
        raise _invalid(path, content, kind, name, complaint, place.removesuffix("`")) from error


def _checked_entry(path: Path | str, name: str, content: object) -> LayerEntry:
    method = checked(path, content, _OfMethod, name).method
    kind: type[LayerEntry] = PackedEntry
    if method in (PlainMethod.__name__, OneDnnMethod.__name__):
        kind = LayerEntry
    elif method in QUANTIZED_METHODS:
        kind = QuantizedEntry
    elif method == Float8Method.__name__:
        kind = Float8Entry
    elif method not in NATIVE_METHODS and isinstance(content, Mapping):
        # A layer's own method, or one that is not available here.
        content = {field: value for field, value in content.items() if field in PackedEntry.__struct_fields__}
    entry = checked(path, content, kind, name)
    needed = {"packed_OI"} if isinstance(entry, PackedEntry) else set()
    if isinstance(entry, Float8Entry):
        needed.add("_scales_OC")
    if isinstance(entry, PackedEntry) and (missing := needed - set(entry.tensors)):
        raise CheckpointError(
            f"{path} is damaged: its {HEADER} lacks {min(missing)} in {name}.tensors={shown(entry.tensors)}. {_ADVICE}"
        )
    return entry


def _invalid(
    path: Path | str, content: object, kind: type[Any], name: str, complaint: str, place: str
) -> CheckpointError:
    """Error for a complaint of msgspec about a place in the content."""
    value, steps = content, [field or int(index) for field, index in _STEP.findall(place)]
    allowed: Any = kind
    for step in steps:
        value = value[step]  # type: ignore[index]
        allowed = get_type_hints(allowed)[step] if isinstance(step, str) else None
    field = (name + place).removeprefix(".")
    of_record = re.fullmatch("Object (missing required|contains unknown) field `(.*)`", complaint)
    if of_record is not None:
        field = f"{field}.{of_record[2]}".removeprefix(".")
        what = f"lacks {clipped(field)}" if of_record[1] == "missing required" else f"has an unknown {clipped(field)}"
    else:
        expected = f"one of {', '.join(map(str, get_args(allowed)))}" if "enum" in complaint else complaint
        what = (
            f"has {clipped(field)}={shown(value)}, and needs {expected.partition(', got')[0].removeprefix('Expected ')}"
        )
    return CheckpointError(f"{path} is damaged: its {HEADER} {what}. {_ADVICE}")
