"""Decode speed with long contexts, compared with the memory bandwidth that weights and KV cache need."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.bench.memory_speed import read_speed
from penstock.bench.runs import Prompts, Tick, repeat, run, too_long
from penstock.bench.statistics import summary
from penstock.bench.workloads import LONG_CONTEXT_BATCHES, LONG_CONTEXTS, Settings
from penstock.engine.session import Session


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a decode step reads. weights: of all matrices. kv_per_token: KV cache of a token."""

    weights: int
    kv_per_token: int

    def of(self, batch_size: int, context: int) -> int:
        return self.weights + batch_size * context * self.kv_per_token


def cases(settings: Settings, max_model_len: int) -> list[tuple[int, int]]:
    """Return pairs of context length and batch size: those of the settings, else the usual ones that fit.

    Raises ContextTooLong if the settings do not fit.
    """
    assert settings.output_len is not None
    longest = max_model_len - settings.output_len
    if settings.input_len is not None:
        contexts = [settings.input_len]
    else:
        contexts = [context for context in LONG_CONTEXTS if context <= longest] or [longest]
    if min(contexts) < 1 or max(contexts) > longest:
        raise too_long(max(contexts), settings.output_len, max_model_len)
    batches = LONG_CONTEXT_BATCHES if settings.batch_size is None else (settings.batch_size,)
    return [(context, batch) for context in contexts for batch in batches]


def measure(
    session: Session, prompts: Prompts, settings: Settings, step_bytes: StepBytes | None, tick: Tick
) -> list[dict[str, Any]]:
    """Measure by context length and batch size. step_bytes: None leaves out the comparison with memory bandwidth."""
    rows = []
    for context, batch_size in cases(settings, session.max_model_len):
        runs = repeat(settings, tick, partial(_measure_case, session, prompts, context, batch_size, settings))
        rows.append(_row(context, batch_size, runs, step_bytes))
    return rows


def _measure_case(
    session: Session, prompts: Prompts, context: int, batch_size: int, settings: Settings
) -> dict[str, float]:
    """Prefill, then repeat the prompts: with prefix-cache hits, all requests decode together."""
    assert settings.output_len is not None
    requests = prompts.many(batch_size, context)
    prefill = run(session, requests, 1)
    decode = run(session, requests, settings.output_len)
    return {
        "prefill_s": prefill.seconds,
        "step_s": statistics.median(decode.per_token_seconds),
        "cached_share": decode.num_cached_tokens / (batch_size * context),
        "memory_bytes_per_s": read_speed(),
    }


def _row(context: int, batch_size: int, runs: list[dict[str, float]], step_bytes: StepBytes | None) -> dict[str, Any]:
    step_s = [done["step_s"] for done in runs]
    row: dict[str, Any] = {
        "context": context,
        "batch_size": batch_size,
        "prefill_tokens_per_s": summary([batch_size * context / done["prefill_s"] for done in runs]),
        "step_s": summary(step_s),
        "output_tokens_per_s": summary([batch_size / seconds for seconds in step_s]),
        "cached_share": min(done["cached_share"] for done in runs),
        "memory_gb_per_s": summary([done["memory_bytes_per_s"] / 1e9 for done in runs]),
    }
    if step_bytes is not None:
        num_bytes = step_bytes.of(batch_size, context)
        shares = [num_bytes / done["memory_bytes_per_s"] / done["step_s"] for done in runs]
        row |= {"step_bytes": num_bytes, "share_of_memory_speed": summary(shares)}
    return row
