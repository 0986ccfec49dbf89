"""A message that changes its form gets a new contract version, so that two sides that differ refuse each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type, type_info

import penstock.contract as contract

# By version: what `fingerprint` says of its messages. When the test below fails, raise CONTRACT_VERSION by one (unless
# the present one was never released) and note the new fingerprint with it here.
FINGERPRINTS = {
    2: "61a4b3c71d17bd51",
    3: "cf0cc266976972f7",
    4: "5b4bcba0ed4da031",
    5: "2535c3ae03b7aba9",
    6: "93567f0649f0a0d6",
    7: "fbe31f372e60e505",
    8: "7c1f123e4ede78a8",
    9: "08df81cb6458177f",
    10: "e9aa765a3c4424d2",
    11: "1502c5836f75b4a1",
    12: "58d81dea1cac4530",
}


def structs_of_the_contract() -> list[type[msgspec.Struct]]:
    exported = [getattr(contract, name) for name in sorted(contract.__all__)]
    return [item for item in exported if isinstance(item, type) and issubclass(item, msgspec.Struct)]


def describe(messages: Iterable[type[msgspec.Struct]]) -> str:
    """A line per struct and field that these messages are written with: names, types, tags, in their order.

    Docstrings and defaults are left out: every field is always written.
    """
    structs: dict[str, list[str]] = {}
    for message in messages:
        _note(type_info(message), structs)
    return "\n".join(line for name in sorted(structs) for line in structs[name])


def _note(found: Any, structs: dict[str, list[str]]) -> str:
    """The type as text; structs inside it are noted by name."""
    if isinstance(found, StructType):
        name = found.cls.__name__
        if name not in structs:
            lines = structs[name] = [f"{name} tag={found.tag_field}:{found.tag} array={found.array_like}"]
            lines += [f"  {field.encode_name}: {_note(field.type, structs)}" for field in found.fields]
        return name
    if isinstance(found, Type):
        inner = [getattr(found, field) for field in found.__struct_fields__]
        return f"{type(found).__name__}({', '.join(_note(value, structs) for value in inner if value is not None)})"
    if isinstance(found, tuple):
        return ", ".join(_note(value, structs) for value in found)
    return repr(found)


def fingerprint(messages: Iterable[type[msgspec.Struct]]) -> str:
    return hashlib.sha256(describe(messages).encode()).hexdigest()[:16]


def test_the_version_belongs_to_the_form_of_the_messages() -> None:
    messages = structs_of_the_contract()
    assert len(messages) > 10
    version, found = contract.CONTRACT_VERSION, fingerprint(messages)
    assert FINGERPRINTS.get(version) == found, (
        f"The contract's messages have the form {found}, which is not that of version {version}. Raise "
        "CONTRACT_VERSION (contract/codec.py) and note the fingerprint here."
    )


def test_whatever_changes_the_bytes_changes_the_fingerprint() -> None:
    """And what does not, such as a default or a docstring, leaves it as it is."""

    def message(name: str = "Message", **options: Any) -> type[msgspec.Struct]:
        fields = options.pop("fields", [("count", int), ("names", list[str])])
        return msgspec.defstruct(name, fields, kw_only=True, **options)

    inner, other = message("Inner"), message("Inner", fields=[("count", float)])
    variants = [
        message(),
        message("Renamed"),
        message(tag=True),
        message(tag="other"),
        message(tag_field="kind", tag=True),
        message(array_like=True),
        message(rename="upper"),
        message(fields=[("count", int)]),
        message(fields=[("count", int), ("names", list[int])]),
        message(fields=[("count", int), ("names", tuple[str, ...])]),
        message(fields=[("count", int | None), ("names", list[str])]),
        message(fields=[("names", list[str]), ("count", int)]),
        message(fields=[("inner", inner)]),
        message(fields=[("inner", other)]),
    ]
    assert len({fingerprint([variant]) for variant in variants}) == len(variants)
    same = message(fields=[("count", int, 7), ("names", list[str], msgspec.field(default_factory=list))])
    same.__doc__ = "Something else."
    assert fingerprint([same]) == fingerprint([message()])
