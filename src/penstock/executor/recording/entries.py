"""Entries of a recording, and their file format.

A file is one line of JSON with the format's version, then entries: the length and the CRC-32 in 4 bytes each,
little-endian, and msgpack.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from penstock.checkpoints.json_file import check_regular_file
from penstock.contract import KVCacheConfig, ModelRunnerOutput, NewRequestData, SamplingInput, SchedulerOutput
from penstock.contract.codec import CONTRACT_VERSION
from penstock.contract.parts import Parts, read_custom
from penstock.errors import InvalidParameter, InvalidRecording
from penstock.system.file_lock import is_locked, lock_while_open
from penstock.worker.plugins import load_plugins

# Version of the entries below; messages inside them have `CONTRACT_VERSION`.
FORMAT_VERSION = 3
_HEAD = struct.Struct("<II")
_KIND = "penstock recording"


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Engine and its state when the recording begins. Times of entries are of one clock, in seconds.

    options: engine options that differ from the defaults. kv_cache_config: of each worker.
    requests: requests that the workers hold, with their tokens so far. calls: earlier calls that gave
    features their state. created_at: seconds since 1970. arithmetic: of the workers, `describe_arithmetic`; empty where
    it is not known.
    """

    model: str
    options: dict[str, Any]
    kv_cache_config: KVCacheConfig
    max_model_len: int
    vocab_size: int
    is_redacted: bool
    requests: list[NewRequestData] = []
    calls: list[Parts] = []
    created_at: float = 0.0
    arithmetic: str = ""


class Executed(msgspec.Struct, frozen=True, kw_only=True, tag="executed"):
    """Step that is about to be launched. begin_s: of the launch."""

    step: SchedulerOutput
    begin_s: float


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """Sampling of the executed step. executed_s: when its launch had returned."""

    executed_s: float
    sampling: SamplingInput
    begin_s: float
    end_s: float


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Result of a step. begin_s: when its caller began to wait."""

    result: ModelRunnerOutput
    begin_s: float
    end_s: float


class Called(msgspec.Struct, frozen=True, kw_only=True, tag="called"):
    """Call that changes the workers between two steps.

    call: it, as its feature's part; None for a call that cannot be replayed.
    """

    method: str
    call: Parts | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Failure of the workers, or the end of the recording."""

    reason: str
    at_s: float


Entry: TypeAlias = Start | Executed | Sampled | Read | Called | Failed


@dataclass(frozen=True, slots=True)
class Recording:
    """Contents of a file. is_cut: whether its last entry is incomplete, as after a crash."""

    start: Start
    entries: list[Entry] = field(default_factory=list)
    is_cut: bool = False


class RecordingFile:
    """File of entries, to be written, and locked while it is open. Raises OSError where it cannot be created."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        lock_while_open(self._file)
        self._encoder = msgspec.msgpack.Encoder()
        versions = {
            "kind": _KIND,
            "format": FORMAT_VERSION,
            "contract": CONTRACT_VERSION,
            "penstock": metadata.version("penstock"),
        }
        self._file.write(json.dumps(versions).encode() + b"\n")

    def write(self, entry: Entry) -> None:
        """Append an entry; it survives the end of this process."""
        data = self._encoder.encode(entry)
        self._file.write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def is_being_written(path: Path) -> bool:
    """Whether another `RecordingFile` of this path is open, in this process or another one."""
    try:
        return is_locked(path)
    except OSError:
        return False


def read_recording(path: Path) -> Recording:
    """Read a file, with the message parts of built-in features and plugins, which are loaded.

    Raises InvalidRecording for another format, another version, and damaged entries.
    """
    load_plugins()
    check_regular_file(path, InvalidRecording)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRecording(f"{path} cannot be read: {error.strerror}.") from error
    line, found, _ = data.partition(b"\n")
    _check_versions(path, line if found else b"")
    decoder = msgspec.msgpack.Decoder(Entry, dec_hook=read_custom)
    entries: list[Entry] = []
    position = len(line) + 1
    while position + _HEAD.size <= len(data):
        begin = position + _HEAD.size
        length, checksum = _HEAD.unpack_from(data, position)
        end = begin + length
        if end > len(data):
            break
        if zlib.crc32(data[begin:end]) != checksum:
            raise InvalidRecording(f"{path} is damaged at byte {begin:,}: the entry has another checksum.")
        try:
            entries.append(decoder.decode(data[begin:end]))
        except (msgspec.MsgspecError, InvalidParameter, RecursionError) as error:
            raise InvalidRecording(f"{path} is damaged at byte {begin:,}: {error}.") from error
        position = end
    if not entries or not isinstance(entries[0], Start):
        raise InvalidRecording(f"{path} has no beginning: it was cut, or is still empty.")
    return Recording(entries[0], entries[1:], is_cut=position != len(data))


def now_s() -> float:
    """Clock of recordings, in seconds."""
    return time.monotonic()


def _check_versions(path: Path, line: bytes) -> None:
    try:
        versions = json.loads(line)
        is_ours = versions["kind"] == _KIND
    except (ValueError, TypeError, KeyError, RecursionError):
        is_ours = False
    if not is_ours:
        raise InvalidRecording(f"{path} is no recording: `record` of an engine writes those.")
    wanted, found = (FORMAT_VERSION, CONTRACT_VERSION), (versions.get("format"), versions.get("contract"))
    if wanted != found:
        raise InvalidRecording(
            f"{path} has format {found[0]}.{found[1]}, but this version of Penstock reads {wanted[0]}.{wanted[1]}. "
            f"Replay it with Penstock {versions.get('penstock')}, which wrote it."
        )
