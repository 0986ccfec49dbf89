"""Codec of messages: msgpack after a version header."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.contract.parts import read_custom
from penstock.errors import InvalidParameter, PenstockError

# Version of the message format: tests/contract/test_version.py fails when it must be raised.
CONTRACT_VERSION = 12
_Message = TypeVar("_Message")
_PREFIX = b"penstock"
_NUM_HEADER_BYTES = len(_PREFIX) + 2
_ENCODER = msgspec.msgpack.Encoder()


class ContractVersionError(PenstockError):
    """Bytes of another contract version, or no message at all."""


def encode(message: msgspec.Struct) -> bytearray:
    """Encode a message for `decode` with the same type. Arrays in it are copied once."""
    data = bytearray(_PREFIX + CONTRACT_VERSION.to_bytes(2, "little"))
    _ENCODER.encode_into(message, data, _NUM_HEADER_BYTES)
    return data


def decode(data: bytes | bytearray | memoryview, message_type: type[_Message]) -> _Message:
    """Decode a message of `encode`.

    Raises ContractVersionError for bytes of another version, damaged bytes, or an unregistered part.
    """
    header = _NUM_HEADER_BYTES
    if len(data) < header or data[: len(_PREFIX)] != _PREFIX:
        raise ContractVersionError(f"These {len(data)} bytes are no {message_type.__name__}: the header is missing.")
    version = int.from_bytes(data[len(_PREFIX) : header], "little")
    if version != CONTRACT_VERSION:
        raise ContractVersionError(
            f"This {message_type.__name__} has contract version {version}, but this process uses {CONTRACT_VERSION}. "
            "Run the same version of Penstock on both sides."
        )
    try:
        return msgspec.msgpack.decode(memoryview(data)[header:], type=message_type, dec_hook=read_custom)
    except (msgspec.MsgspecError, InvalidParameter) as error:
        raise ContractVersionError(f"A damaged {message_type.__name__}: {error}.") from error
