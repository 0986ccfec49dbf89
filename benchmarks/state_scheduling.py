"""Scheduler of decoding requests with and without recurrent states, in turns in one process, without a model.

    python -m benchmarks.state_scheduling [--requests 64] [--rounds 12] [--steps 100]

A step schedules all requests and takes in a token of each. The hybrid has states beside attention, of which each
request leaves a snapshot for every block of 16 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

from penstock.config import SchedulerConfig
from penstock.config.cache import Snapshots
from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    KVCacheSpec,
    RecurrentStateSpec,
    SampledOutput,
    SamplingParams,
)
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler

_BLOCK_SIZE, _MAX_MODEL_LEN = 16, 4096


def make_scheduler(num_reqs: int, snapshots: Snapshots | None) -> Scheduler:
    """Scheduler with so many requests of different prompts. snapshots: of a hybrid; None for attention alone."""
    full = FullAttentionSpec(block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    specs: list[KVCacheSpec] = [full]
    num_blocks = [1 + num_reqs * _MAX_MODEL_LEN // _BLOCK_SIZE]
    if snapshots is not None:
        specs.append(RecurrentStateSpec(state_bytes=1024, block_size=_BLOCK_SIZE, snapshots=snapshots))
        num_blocks.append(1 + 3 * num_reqs if snapshots == "align" else num_blocks[0])
    config = KVCacheConfig(
        pools=tuple(KVCachePool(num_blocks=count) for count in num_blocks),
        groups=tuple(
            KVCacheGroupSpec(layer_names=(f"{pool}",), spec=spec, pool=pool) for pool, spec in enumerate(specs)
        ),
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_reqs, max_num_batched_tokens=8192),
        config,
        max_model_len=_MAX_MODEL_LEN,
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    for number in range(num_reqs):
        prompt = [number, *range(100 + number)]
        scheduler.add_request(Request(f"{number}", prompt, SamplingParams(max_tokens=3500, ignore_eos=True)))
    return scheduler


def run(scheduler: Scheduler, num_steps: int) -> float:
    """Processor seconds per step."""
    begin = time.process_time()
    for _ in range(num_steps):
        step = scheduler.schedule()
        req_ids = list(step.num_scheduled_tokens)
        sampled = SampledOutput(step_id=step.step_id, req_ids=req_ids, sampled_token_ids=[[5]] * len(req_ids))
        scheduler.update_from_output(step, sampled)
    return (time.process_time() - begin) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    modes: dict[str, Snapshots | None] = {"attention alone": None, "hybrid, align": "align", "hybrid, all": "all"}
    schedulers = {name: make_scheduler(given.requests, snapshots) for name, snapshots in modes.items()}
    for scheduler in schedulers.values():
        run(scheduler, 20)
    rounds = [{name: run(one, given.steps) for name, one in schedulers.items()} for _ in range(given.rounds)]
    for name in modes:
        seconds = [each[name] for each in rounds]
        ratio = statistics.median(each[name] / each["attention alone"] for each in rounds)
        print(f"{name:<16} {1 / statistics.median(seconds):>8,.0f} steps/s  {ratio:.2f} x the time")


if __name__ == "__main__":
    main()
