"""Scheduler of an engine core, with the scheduler sides of its features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from penstock.contract import RpcCall
from penstock.contract.feature import Feature, features_of, make_side
from penstock.engine.core.startup import StartedEngine
from penstock.scheduler.draft_budget import Speculation
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.services import SchedulerServices
from penstock.scheduler.step_times import StepTimes


class CoreScheduler(NamedTuple):
    """Scheduler of a core. by_method: scheduler sides of its features, by the methods of their deployment sides."""

    scheduler: Scheduler
    by_method: dict[str, SchedulerFeature]

    def call_feature(self, call: RpcCall) -> list[Any]:
        """Answer a call of a feature's deployment side."""
        return self.by_method[call.name].call(call)


def make_scheduler(
    engine: StartedEngine, services_of: Callable[[Scheduler], SchedulerServices], *, runs_ahead: bool
) -> CoreScheduler:
    """Create the scheduler of an engine.

    services_of: the core's services for features of this scheduler. runs_ahead: asynchronous scheduling.
    """
    by_method: dict[str, SchedulerFeature] = {}

    def make(feature: Feature, scheduler: Scheduler) -> SchedulerFeature:
        side: SchedulerFeature = make_side(feature.scheduler_side, services_of(scheduler))
        by_method.update(dict.fromkeys(feature.deployment_methods, side))
        return side

    config = engine.config
    features = features_of(config, engine.features_of_model)
    scheduler = Scheduler(
        config.scheduler,
        engine.kv_cache_config,
        max_model_len=engine.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        async_scheduling=runs_ahead,
        speculation=Speculation(
            num_speculative_tokens=engine.executor.num_speculative_tokens,
            num_lookahead_tokens=config.speculative.num_lookahead_tokens,
            blocks_need_next_token=config.speculative.reads_next_token,
            step_times=None if engine.step_costs is None else StepTimes(engine.step_costs),
        ),
        max_concurrent_steps=config.max_concurrent_batches,
        # A request for which the scheduler fails ends as one that a feature ends.
        tell_ends=lambda ended: services_of(scheduler).tell_ends(ended),
        sends_whole_parts=config.recording.record is not None,
        features=[partial(make, feature) for feature in features if feature.scheduler_side is not None],
    )
    return CoreScheduler(scheduler, by_method)
