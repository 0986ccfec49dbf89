"""Latency of broadcasting steps to idle workers in other processes, and of detecting a worker's death.

    python -m benchmarks.broadcast [--ranks 4] [--steps 3000] [--pause-us 1000] [--deaths 30] [--output FOLDER]

The steps are the scheduler's: 32 decodes, and 32 new prompts of 512 tokens at once. All workers wait for a step before
it is sent, in one message, or in two as with structured output, in turns. "engine thread" is the time of the executor's
calls; "received" is from the first call until the last worker has read and decoded the message.

For the deaths, the last of two workers is killed while a call waits for both, or between calls: it is detected when the
call raises, or when the executor's loss callback runs.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.machine import described, machine, save
from penstock.config import EngineConfig, SchedulerConfig
from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    KVCacheSpec,
    RpcCall,
    SampledOutput,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
    encode,
)
from penstock.errors import WorkerError
from penstock.executor import MultiprocessExecutor
from penstock.executor.messages import pack_step
from penstock.models.interface import LanguageModel
from penstock.runner.async_output import ReadyOutput
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler
from penstock.worker import WorkerBase
from penstock.worker.memory_plan import MemoryPlan

_NUM_REQUESTS = 32
_PROMPT_LENGTH = 512
_STEP_S = 0.3e-3
# Of the first steps, in which caches settle.
_SKIPPED = 50


class ListeningWorker(WorkerBase):
    """Worker without a model: records when it gets a step, and answers later with a token for every request."""

    def init_device(self) -> None:
        self.told: list[float] = []

    def load_model(self) -> None: ...

    def execute_model(self, output: SchedulerOutput) -> None:
        self.told.append(_now_us())
        self._req_ids = list(output.num_scheduled_tokens)
        # Cores are few here, and the others are to be told too, before there are answers.
        time.sleep(_STEP_S)

    def sample_tokens(self, sampling: SamplingInput) -> ReadyOutput:
        tokens = [[1000]] * len(self._req_ids)
        return ReadyOutput(SampledOutput(step_id=sampling.step_id, req_ids=self._req_ids, sampled_token_ids=tokens))

    def wait(self) -> None:
        time.sleep(600)

    def take_told(self) -> list[float]:
        """Arrival times of the steps since the last call."""
        told, self.told = self.told, []
        return told

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        raise NotImplementedError

    def determine_available_memory(self) -> MemoryPlan:
        raise NotImplementedError

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def execute_dummy_batch(self) -> None: ...

    def get_model(self) -> LanguageModel:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


class Steps:
    """Scheduler without an engine."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype="float32")
        groups = (KVCacheGroupSpec(layer_names=("0",), spec=spec),)
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=_NUM_REQUESTS * _PROMPT_LENGTH),
            KVCacheConfig(pools=(KVCachePool(num_blocks=50_000),), groups=groups),
            max_model_len=20_000,
            enable_prefix_caching=False,
            async_scheduling=True,
        )
        self._numbers = random.Random(0)
        self._num_requests = 0

    def decodes(self, num_steps: int) -> Iterator[SchedulerOutput]:
        """Decode steps of 32 requests."""
        self._add(prompt_length=16, num_outputs=num_steps + 1)
        self._next()
        for _ in range(num_steps):
            yield self._next()

    def prefills(self, num_steps: int) -> Iterator[SchedulerOutput]:
        """Prefill steps of 32 new prompts each, with the removal of the previous ones."""
        for _ in range(num_steps):
            self._add(prompt_length=_PROMPT_LENGTH, num_outputs=1)
            yield self._next()

    def _add(self, *, prompt_length: int, num_outputs: int) -> None:
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_outputs, ignore_eos=True)
        for _ in range(_NUM_REQUESTS):
            self._num_requests += 1
            prompt = [self._numbers.randrange(10, 32_000) for _ in range(prompt_length)]
            self._scheduler.add_request(
                Request(req_id=str(self._num_requests), prompt_token_ids=prompt, sampling_params=params)
            )

    def _next(self) -> SchedulerOutput:
        output = self._scheduler.schedule()
        req_ids = list(output.num_scheduled_tokens)
        result = SampledOutput(step_id=output.step_id, req_ids=req_ids, sampled_token_ids=[[1000]] * len(req_ids))
        self._scheduler.update_from_output(output, result)
        return output


@dataclass(slots=True)
class Times:
    """Microseconds of each step sent in one way; begin: clock time."""

    begin: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)


def measure(
    executor: MultiprocessExecutor, steps: Iterable[SchedulerOutput], pause_s: float
) -> tuple[int, list[Times]]:
    """Bytes of the last step, and times of steps in one message and in two, in turns."""
    times = [Times(), Times()]
    executor.collective_rpc(RpcCall("take_told"))
    for number, output in enumerate(steps):
        turn = number % len(times)
        by_way = times[turn]
        awaiting_req_ids = list(output.num_scheduled_tokens) if turn else []
        output = msgspec.structs.replace(output, awaiting_req_ids=awaiting_req_ids)
        sampling = SamplingInput(step_id=output.step_id)
        time.sleep(pause_s)
        begin = _now_us()
        executor.execute_model(output)
        handle = executor.sample_tokens(sampling)
        sent = _now_us()
        handle.get_output()
        by_way.answered.append(_now_us() - begin)
        by_way.kept.append(sent - begin)
        by_way.begin.append(begin)
    told = list(map(max, zip(*executor.collective_rpc(RpcCall("take_told")), strict=True)))
    for turn, by_way in enumerate(times):
        by_way.told = [a - b for a, b in zip(told[turn :: len(times)], by_way.begin, strict=True)]
    return len(encode(pack_step(output))), times


def time_of_death(executor: MultiprocessExecutor, *, is_waited_for: bool) -> float:
    """Microseconds from the kill of the last worker until its detection."""
    heard: queue.SimpleQueue[float] = queue.SimpleQueue()
    killed: queue.SimpleQueue[float] = queue.SimpleQueue()

    def kill() -> None:
        killed.put(_now_us())
        os.kill(executor.process_ids[-1], signal.SIGKILL)

    if is_waited_for:
        threading.Timer(0.2, kill).start()
        try:
            executor.collective_rpc(RpcCall("wait"))
        except WorkerError:
            heard.put(_now_us())
    else:
        executor.on_loss(lambda: heard.put(_now_us()))
        time.sleep(0.2)
        kill()
    return heard.get(timeout=60) - killed.get()


def deaths(num: int) -> Iterator[str]:
    """Table of detection latencies of workers' deaths."""
    yield from ["", "Milliseconds from the kill of a worker until that is known.", ""]
    yield from ["| waiting | deaths | median | quartiles | longest |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, is_waited_for in (("a call", True), ("no call", False)):
        times = []
        for _ in range(num):
            executor = MultiprocessExecutor(_config(2))
            times.append(time_of_death(executor, is_waited_for=is_waited_for) / 1e3)
            executor.shutdown()
        low, median, high = statistics.quantiles(times, n=4)
        yield f"| {name} | {num} | {median:.2f} | {low:.2f} to {high:.2f} | {max(times):.2f} |"


def _config(num_ranks: int) -> EngineConfig:
    return EngineConfig.create(
        "demo",
        device="cpu",
        num_threads=num_ranks,
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="mp",
        worker_cls=f"benchmarks.broadcast.{ListeningWorker.__name__}",
    )


def _now_us() -> float:
    return time.perf_counter_ns() / 1e3


def _spread(values: list[float]) -> str:
    ordered = sorted(values[min(_SKIPPED, len(values) // 10) :])
    return f"{statistics.median(ordered):.0f} ({ordered[int(0.99 * len(ordered))]:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pause-us", type=float, default=1000.0, help="before each step, so that all wait for it")
    parser.add_argument("--deaths", type=int, default=30, help="of workers, for each who may hear of them; 0 for none")
    parser.add_argument("--output", type=Path, help="a folder for the table")
    arguments = parser.parse_args()
    lines = ["# Steps on their way to workers", "", described(machine(1)), ""]
    lines += ["Microseconds: medians, and in parentheses what 99 of 100 do not exceed.", ""]
    lines += ["| step | workers | messages | bytes | engine thread | received | answered |"]
    lines += ["| --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for num_ranks in arguments.ranks:
        executor = MultiprocessExecutor(_config(num_ranks))
        for title, steps in (
            ("32 requests decode", Steps().decodes(arguments.steps)),
            ("32 prompts of 512", Steps().prefills(arguments.steps // 10)),
        ):
            num_bytes, times = measure(executor, steps, arguments.pause_us / 1e6)
            for way, by_way in zip(("one", "two"), times, strict=True):
                cells = " | ".join(map(_spread, (by_way.kept, by_way.told, by_way.answered)))
                lines.append(f"| {title} | {num_ranks} | {way} | {num_bytes:,} | {cells} |")
        executor.shutdown()
    if arguments.deaths > 0:
        lines += deaths(arguments.deaths)
    page = "\n".join(lines) + "\n"
    print(page)
    if arguments.output is not None:
        save(arguments.output, "broadcast", page=page)


if __name__ == "__main__":
    main()
