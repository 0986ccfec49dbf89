"""The columns of the table: how the workers of an engine are arranged, and on what they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.config.parallel import ParallelConfig

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """name: for people. asked: the options that ask for it, as given, or None in an engine that does not.
    parts: names of the arrangements that it consists of; what those cannot, it cannot.
    """

    name: str
    asked: Callable[[EngineConfig], str | None]
    parts: tuple[str, ...] = ()


def _of(asked: Callable[[ParallelConfig], str | None]) -> Callable[[EngineConfig], str | None]:
    return lambda config: asked(config.parallel)


def _size(option: str) -> Callable[[EngineConfig], str | None]:
    """Asked for by any value of an option but 1."""

    def asked(parallel: ParallelConfig) -> str | None:
        value = getattr(parallel, option)
        return None if value == 1 else f"{option}={value}"

    return _of(asked)


def _together(*arrangements: Arrangement) -> Arrangement:
    """Several at once."""

    def asked(config: EngineConfig) -> str | None:
        options = [one.asked(config) for one in arrangements]
        return None if None in options else ", ".join(map(str, options))

    return Arrangement(" x ".join(one.name for one in arrangements), asked, tuple(one.name for one in arrangements))


UNI = Arrangement("uni", _of(lambda p: "one worker in this process" if p.executor == "uni" else None))
MP = Arrangement("mp", _of(lambda p: "distributed_executor_backend='mp'" if p.executor == "mp" else None))
TP = Arrangement("TP", _size("tensor_parallel_size"), (MP.name,))
PP = Arrangement("PP", _size("pipeline_parallel_size"), (MP.name,))
DCP = Arrangement("DCP", _size("decode_context_parallel_size"), (TP.name,))
SP = Arrangement("SP", _of(lambda p: "enable_sp" if p.enable_sp and p.tensor_parallel_size > 1 else None), (TP.name,))

ARRANGEMENTS = (UNI, MP, TP, PP, _together(TP, PP), DCP, SP, _together(PP, DCP, SP))

# What the page and `penstock env --capabilities` call them besides.
MEANINGS = {
    UNI.name: "one worker, in this process",
    MP.name: "one worker in a process of its own: `distributed_executor_backend='mp'`",
    TP.name: "workers with a part of every layer: `tensor_parallel_size`",
    PP.name: "stages with layers of their own: `pipeline_parallel_size`",
    DCP.name: "workers that keep positions by turns: `decode_context_parallel_size`, with TP",
    SP.name: "workers that keep some tokens each between layers: `enable_sp`, with TP",
}
