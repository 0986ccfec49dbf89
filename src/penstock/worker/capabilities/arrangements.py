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


def _backend(name: str) -> Callable[[EngineConfig], str | None]:
    return _of(lambda p: f"distributed_executor_backend={name!r}" if p.executor == name else None)


def _core_process(parallel: ParallelConfig) -> str | None:
    if not parallel.has_core_process:
        return None
    # Several engines have it without being asked.
    return _engines(parallel) or "enable_multiprocessing=True"


def _engines(parallel: ParallelConfig) -> str | None:
    size = parallel.data_parallel_size
    return f"data_parallel_size={size}" if parallel.num_engines_here > 1 else None


UNI = Arrangement("uni", _of(lambda p: "one worker in this process" if p.executor == "uni" else None))
TP = Arrangement("TP", _size("tensor_parallel_size"))
PP = Arrangement("PP", _size("pipeline_parallel_size"))
DCP = Arrangement("DCP", _size("decode_context_parallel_size"), (TP.name,))
SP = Arrangement("SP", _of(lambda p: "enable_sp" if p.enable_sp else None), (TP.name,))
MP = Arrangement("mp", _backend("mp"))
CORE = Arrangement("core", _of(_core_process))
DP = Arrangement("DP", _of(_engines), (CORE.name,))
RAY = Arrangement("Ray", _backend("ray"))
LAUNCHED = Arrangement("torchrun", _backend("external_launcher"))
LAUNCHED_PP = _together(LAUNCHED, PP)
LAUNCHED_CORE = _together(LAUNCHED, CORE)

# By what is arranged. One of each group together can do what both can, unless they are refused together.
ARRANGEMENT_GROUPS: dict[str, tuple[Arrangement, ...]] = {
    "parallelism": (UNI, TP, PP, _together(TP, PP), DCP, SP, _together(PP, DCP, SP)),
    "executors and engines": (MP, CORE, DP, RAY, LAUNCHED, LAUNCHED_PP, LAUNCHED_CORE),
}
ARRANGEMENTS = tuple(arrangement for group in ARRANGEMENT_GROUPS.values() for arrangement in group)

# Explanations for the page and `penstock env --capabilities`.
MEANINGS = {
    UNI.name: "one worker, in this process",
    TP.name: "tensor parallel: workers that share every layer: `tensor_parallel_size`",
    PP.name: "pipeline parallel: stages with layers of their own: `pipeline_parallel_size`",
    DCP.name: "decode context parallel: KV cache sharded along the sequence: `decode_context_parallel_size`, with TP",
    SP.name: "sequence parallel: tokens between layers sharded over workers: `enable_sp`, with TP",
    MP.name: "workers in processes of their own: `distributed_executor_backend='mp'`",
    CORE.name: "engine core in a process of its own: `enable_multiprocessing`",
    DP.name: "data parallel: engine replicas, each with a core of its own: `data_parallel_size`",
    RAY.name: "workers on the nodes of a Ray cluster: `distributed_executor_backend='ray'`",
    LAUNCHED.name: (
        "every process of torchrun, or a similar launcher, is a worker with an engine: "
        "`distributed_executor_backend='external_launcher'`"
    ),
}
