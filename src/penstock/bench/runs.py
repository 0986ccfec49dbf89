"""Timed runs of requests through an engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.bench.workloads import Settings
from penstock.contract import SamplingParams
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.session import Session
from penstock.errors import ContextTooLong, PenstockError
from penstock.scheduler.acceptance import SpecDecodeMetrics

_Measured = TypeVar("_Measured")
# Called after each run.
Tick = Callable[[], object]


@dataclass(frozen=True)
class Run:
    """Results of a run. seconds: from the first admission to the last finish. outputs: in the order of the prompts."""

    seconds: float
    outputs: list[RequestOutput]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(one.token_ids) for output in self.outputs for one in output.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def num_preemptions(self) -> int:
        return sum(output.metrics.num_preemptions for output in self.outputs)

    @property
    def spec_decode_metrics(self) -> SpecDecodeMetrics:
        """Speculative decoding metrics of the run."""
        total = SpecDecodeMetrics()
        for output in self.outputs:
            total.add(output.metrics.spec_decode_metrics)
        return total

    @property
    def first_token_seconds(self) -> list[float]:
        """Time to first token of each request, in seconds."""
        times = [output.metrics.time_to_first_token_s for output in self.outputs]
        return [value for value in times if value is not None]

    @property
    def per_token_seconds(self) -> list[float]:
        """Time per output token of each request with two tokens or more, in seconds."""
        times = [output.metrics.time_per_output_token_s for output in self.outputs]
        return [value for value in times if value is not None]


def run(session: Session, prompts: Sequence[list[int]], output_len: int, n: int = 1) -> Run:
    """Generate `n` outputs of `output_len` tokens for each prompt, all requests at once.

    Raises ContextTooLong if a prompt and its output do not fit, PenstockError if a request fails.
    """
    longest = max(map(len, prompts))
    if longest + output_len > session.max_model_len:
        raise too_long(longest, output_len, session.max_model_len)
    # Several outputs are sampled.
    temperature = 0.0 if n == 1 else 1.0
    params = SamplingParams(n=n, temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    requests = [session.accept({"prompt_token_ids": prompt}, params) for prompt in prompts]
    outputs = session.finish(requests)
    seconds = time.perf_counter() - begin
    for output in outputs:
        if output.error is not None:
            raise PenstockError(f"A request of the benchmark failed: {output.error}")
    return Run(seconds, outputs)


def repeat(settings: Settings, tick: Tick, measure: Callable[[], _Measured]) -> list[_Measured]:
    """Return the results of the measured runs, after warm-up runs."""
    runs = []
    for _ in range(settings.num_iters_warmup + settings.num_iters):
        runs.append(measure())
        tick()
    return runs[settings.num_iters_warmup :]


def too_long(prompt_len: int, output_len: int, max_model_len: int) -> ContextTooLong:
    """Error for prompts that do not fit together with their output."""
    return ContextTooLong(
        f"Prompts of {prompt_len:,} tokens and {output_len:,} to generate do not fit into a context of "
        f"{max_model_len:,} tokens. Ask for less, or for a longer context (--max-model-len)."
    )


class Prompts:
    """Prompts of random token ids. Equal seeds give equal sequences; no two prompts share a prefix."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def one(self, length: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(length)]

    def many(self, count: int, length: int) -> list[list[int]]:
        return [self.one(length) for _ in range(count)]
