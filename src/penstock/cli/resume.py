"""Resumption of an earlier run: its answers are found by a hash of their requests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.cli.output_file import PartialFile, partial_files
from penstock.cli.work import Work
from penstock.config import EngineConfig
from penstock.server.batches.lines import BATCH_ID_PREFIX


class _Line(msgspec.Struct):
    """Fields of a result, in either format, that identify its request."""

    request_hash: Any = None
    id: Any = None
    sample: int = 0
    error: Any = None


class _Place(NamedTuple):
    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length).removesuffix(b"\n")


def request_hashes(work: Sequence[Work], config: EngineConfig, further: Sequence[str] = ()) -> list[str | None]:
    """Return the hash of everything that determines each request's answer; None for requests that cannot run.

    It covers the request's name (`custom_id`, or its index), the prompt, the sampling parameters with their defaults,
    the options of the engine that change tokens, and what else does (`further`). Two requests of a
    file have different hashes.
    """
    # Limits decide whether a request is answered, not its tokens.
    model = dataclasses.replace(config.model, max_model_len=None)
    options: tuple[Any, ...] = (
        model,
        config.cache.kv_cache_dtype,
        config.cache.state_dtypes,
        config.sampling,
        config.structured,
        config.speculative,
    )
    basis = hashlib.blake2b(_encode((*options, *further)), digest_size=16)
    return [_request_hash(basis.copy(), index, item) for index, item in enumerate(work)]


def take_answers(path: Path, out: PartialFile, work: Sequence[Work], hashes: Sequence[str | None]) -> set[int]:
    """Copy answers of earlier runs for `path` to `out`. Returns the numbers of their requests.

    Answers are read from `path` itself and from the partial files beside it. Answers with an error do not count, nor
    do those of which a part is missing. A partial file that has nothing else is removed then.
    """
    partials = partial_files(path)
    found: dict[str, dict[int, _Place]] = {}
    num_lines = dict.fromkeys(partials, 0)
    for source in (path, *partials):
        if source.is_file():
            for request, sample, place in _answers(source):
                found.setdefault(request, {})[sample] = place
                num_lines[source] = num_lines.get(source, 0) + 1
    taken: set[int] = set()
    for index, (item, request_hash) in enumerate(zip(work, hashes, strict=True)):
        samples = found.get(request_hash or "", {})
        if samples and len(samples) == item.format.num_lines(item.sampling_params.n):
            places = [samples[sample] for sample in sorted(samples)]
            out.put(index, "".join(f"{place.read().decode()}\n" for place in places))
            taken.add(index)
            del found[request_hash or ""]
    out.sync()
    unused = {place.path for samples in found.values() for place in samples.values()}
    for partial in partials:
        if partial not in unused:
            partial.unlink()
    read = [source.name for source in (path, *partials) if num_lines.get(source)]
    print(f"penstock: {_about(taken, work, read, [one for one in partials if one in unused])}", file=sys.stderr)
    return taken


def _about(taken: set[int], work: Sequence[Work], read: list[str], kept: list[Path]) -> str:
    whence = f" ({', '.join(read)})" if read else ""
    stays = f" {', '.join(one.name for one in kept)}: has answers to other requests, and stays." if kept else ""
    return f"an earlier run{whence} has answered {len(taken):,} of {len(work):,} requests; the rest run now.{stays}"


def _answers(source: Path) -> Iterable[tuple[str, int, _Place]]:
    """Request hash, number of the output, and place of each line that is an answer."""
    decoder = msgspec.json.Decoder(_Line)
    with source.open("rb") as file:
        offset = 0
        for line in file:
            place = _Place(source, offset, len(line))
            offset += len(line)
            try:
                fields = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                # A line that was cut off when the run was killed.
                continue
            request = _hash_of(fields)
            if request is not None and fields.error is None:
                yield request, fields.sample, place


def _hash_of(fields: _Line) -> str | None:
    if isinstance(fields.request_hash, str):
        return fields.request_hash
    if isinstance(fields.id, str) and fields.id.startswith(BATCH_ID_PREFIX):
        return fields.id.removeprefix(BATCH_ID_PREFIX)
    return None


def _request_hash(hasher: Any, index: int, item: Work) -> str | None:
    if item.error is not None:
        return None
    try:
        hasher.update(_encode((item.format.identity(index), item.prompt, item.sampling_params)))
    except RecursionError:
        # The engine refuses a request with such nesting.
        return None
    return str(hasher.hexdigest())


def _encode(value: Any) -> bytes:
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    return json.dumps(plain, sort_keys=True, default=sorted).encode()
