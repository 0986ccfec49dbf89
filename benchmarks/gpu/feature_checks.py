"""Engines of the cases of `feature_cases.py`, and comparisons of their results.

Token ids must be equal, also sampled ones, and log-probabilities up to `TOLERANCE`. A greedy token may differ where the
expected two best are as close.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "worker")]

from penstock import LLM  # noqa: E402
from penstock.contract import RpcCall  # noqa: E402
from penstock.engine.core.engine_core import EngineCore  # noqa: E402
from support.checkpoints import VOCAB_SIZE  # noqa: E402
from support.engines import Result, make_core, random_prompts  # noqa: E402

TOLERANCE = 2e-3
PROMPTS = random_prompts((1, 3, 40, 17, 33, 55), VOCAB_SIZE)
DEMO_PROMPTS = ["ROMEO:", "The king is", "Good morrow, my lord."]


@dataclass(frozen=True)
class Bench:
    """folder: where a case may write. device: the one that is tried."""

    folder: Path
    device: str

    @contextlib.contextmanager
    def core(self, model: Path | str, device: str | None = None, **options: Any) -> Iterator[EngineCore]:
        """A core in float32, unless `dtype` says otherwise."""
        core = make_core(model, **{"dtype": "float32", "device": device or self.device, **options})
        try:
            yield core
        finally:
            core.close()

    @contextlib.contextmanager
    def llm(self, model: Path | str, device: str | None = None, **options: Any) -> Iterator[LLM]:
        given = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "num_threads": 1, **options}
        llm = LLM(str(model), device=device or self.device, **given)
        try:
            yield llm
        finally:
            llm.close()

    @property
    def devices(self) -> tuple[str, str]:
        return self.device, "cpu"


def assert_alike(found: Any, expected: Any) -> None:
    """Results as lists and dictionaries: equal, but for the last digits of numbers."""
    differences = list(_differences(found, expected, ""))
    if differences:
        raise AssertionError(f"{len(differences)} differences: {'; '.join(differences[:3])}")


def _differences(found: Any, expected: Any, where: str) -> Iterator[str]:
    if isinstance(expected, float):
        if not abs(found - expected) <= TOLERANCE * max(1.0, abs(expected)) and found != expected:
            yield f"{where} {found} for {expected}"
    elif isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for key, value in expected.items():
            yield from _differences(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list) and isinstance(found, list) and all(isinstance(each, int) for each in expected):
        if found != expected:
            equal = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
            yield f"{where}[{equal}:] {found[equal : equal + 4]} for {expected[equal : equal + 4]}"
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for index, value in enumerate(expected):
            yield from _differences(found[index], value, f"{where}[{index}]")
    elif found != expected:
        yield f"{where} {str(found)[:60]} for {str(expected)[:60]}"


def assert_same_results(found: Sequence[Result], expected: Sequence[Result]) -> str:
    """Tokens and log-probabilities of requests, until the first token with a near tie. Returns a note of ties."""
    ties = 0
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.error == theirs.error, f"r{index}: {ours.error}"
        assert_alike(ours.prompt_logprobs, theirs.prompt_logprobs)
        until = next(
            (i for i, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if len({*pair}) > 1), None
        )
        if until is not None:
            likely = sorted(theirs.logprobs[until].values())[-2:] if until < len(theirs.logprobs) else [0.0, 1.0]
            assert likely[1] - likely[0] <= TOLERANCE, (
                f"r{index}: token {until} of {len(theirs.tokens)} is {ours.tokens[until]}, not {theirs.tokens[until]}; "
                f"log-probabilities here {ours.logprobs[until : until + 1]}, there {theirs.logprobs[until : until + 1]}"
            )
            ties += 1
        else:
            assert len(ours.tokens) == len(theirs.tokens), (
                f"r{index}: {len(ours.tokens)} tokens for {len(theirs.tokens)}"
            )
        for row, other in list(zip(ours.logprobs, theirs.logprobs, strict=False))[:until]:
            common = row.keys() & other.keys()
            assert len(common) >= len(other) - 1, f"r{index}: the best tokens {row} for {other}"
            assert_alike({token: row[token] for token in common}, {token: other[token] for token in common})
    return f"{ties} near ties" if ties else ""


def graphs_of(core: EngineCore) -> str:
    """Note of CUDA graphs: steps replayed, or why none were."""
    (execution,) = core.collective_rpc(RpcCall(lambda worker: worker.runner.execution))
    replays = getattr(execution, "num_replays", None)
    if replays is None:
        return ""
    refusals = "; ".join(str(reason)[:80] for reason in getattr(execution, "refusals", ()))
    return f"{replays} replays" + (f", not captured: {refusals}" if refusals else "")
