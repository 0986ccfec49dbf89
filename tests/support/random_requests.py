"""Requests that come and end at random, for features of the KV cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.scheduler.outputs import EngineCoreOutput
from support.engines import Result, add


def run_at_random(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    expected: Sequence[Sequence[int]],
    choose: random.Random,
    disturb: Callable[[], object] = lambda: None,
) -> None:
    """Run requests that come and are aborted at random, with resets of the prefix cache in between.

    expected: tokens of the prompts. Those that are not aborted have them, and all blocks have their holders.
    disturb: called before each step.
    """
    order, results, aborted = choose.sample(range(len(prompts)), len(prompts)), dict[str, Result](), set[str]()

    def take(outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            results.setdefault(output.req_id, Result()).take(output)

    for _ in range(5000):
        if not order and not core.has_unfinished_requests():
            break
        if order and choose.random() < 0.3:
            index = order.pop()
            add(core, str(index), prompts[index], params)
            if choose.random() < 0.2:
                aborted.add(str(index))
        if aborted and choose.random() < 0.1:
            take(core.abort_requests([choose.choice(sorted(aborted))]))
        if choose.random() < 0.02:
            core.reset_prefix_cache(reset_running_requests=choose.random() < 0.5)
        disturb()
        take(core.step())
        core.scheduler.kv_cache.check_integrity()
        core.wait_for_work()
    assert len(results) == len(prompts)
    for name, result in results.items():
        if name not in aborted:
            assert result.tokens == expected[int(name)]
