"""Benchmarks of latency, throughput, prefill and prefix caching."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.bench.runs import Prompts, Run, Tick, repeat, run
from penstock.bench.statistics import summary
from penstock.bench.workloads import Settings
from penstock.engine.session import Session
from penstock.scheduler.acceptance import SpecDecodeMetrics


def measure(session: Session, prompts: Prompts, settings: Settings, tick: Tick) -> dict[str, Any]:
    """Measure one of these workloads. The result has `seconds` of each measured run."""
    if settings.workload == "prefix":
        return _measure_prefix(session, prompts, settings, tick)
    input_len, output_len = settings.input_len, settings.output_len or 1
    assert input_len is not None, "these workloads have a length of input"

    def generate() -> Run:
        return run(session, prompts.many(settings.num_requests, input_len), output_len, settings.n)

    runs = repeat(settings, tick, generate)
    return {**_of_runs(runs), **_rates(runs, settings.num_requests * input_len)}


def _measure_prefix(session: Session, prompts: Prompts, settings: Settings, tick: Tick) -> dict[str, Any]:
    """Measure requests with a new shared prefix, then new requests with the same, cached prefix."""
    prefix_len, input_len, output_len = settings.prefix_len, settings.input_len, settings.output_len
    assert prefix_len is not None
    assert input_len is not None
    assert output_len is not None

    def measure_both() -> list[Run]:
        prefix = prompts.one(prefix_len)
        both = ([prefix + own for own in prompts.many(settings.num_requests, input_len)] for _ in range(2))
        return [run(session, requests, output_len) for requests in both]

    new, known = map(list, zip(*repeat(settings, tick, measure_both), strict=True))
    num_input_tokens = settings.num_requests * (prefix_len + input_len)
    return {
        "new_prefix": {**_of_runs(new), **_rates(new, num_input_tokens)},
        "known_prefix": {**_of_runs(known), **_rates(known, num_input_tokens)},
    }


def _of_runs(runs: list[Run]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "seconds": [done.seconds for done in runs],
        "latency_s": summary([done.seconds for done in runs]),
        "time_to_first_token_s": summary([value for done in runs for value in done.first_token_seconds]),
        "cached_tokens_per_run": sum(done.num_cached_tokens for done in runs) / len(runs),
        "preemptions_per_run": sum(done.num_preemptions for done in runs) / len(runs),
    }
    drafts = SpecDecodeMetrics()
    for done in runs:
        drafts.add(done.spec_decode_metrics)
    if drafts.num_drafts:
        figures["speculation"] = {
            **msgspec.structs.asdict(drafts),
            "acceptance_rate": drafts.acceptance_rate,
            "acceptance_rate_per_pos": drafts.acceptance_rate_per_pos,
            "mean_acceptance_length": drafts.mean_acceptance_length,
        }
    per_token = [value for done in runs for value in done.per_token_seconds]
    return {**figures, "time_per_output_token_s": summary(per_token)} if per_token else figures


def _rates(runs: list[Run], num_input_tokens: int) -> dict[str, Any]:
    """Input and output tokens per second over whole runs."""
    return {
        "input_tokens_per_run": num_input_tokens,
        "output_tokens_per_run": runs[0].num_output_tokens,
        "input_tokens_per_s": summary([num_input_tokens / done.seconds for done in runs]),
        "output_tokens_per_s": summary([done.num_output_tokens / done.seconds for done in runs]),
        "requests_per_s": summary([len(done.outputs) / done.seconds for done in runs]),
    }
