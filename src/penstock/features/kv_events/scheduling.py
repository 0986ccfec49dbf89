"""Scheduler side of KV cache events: each turn's events are a batch."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ConfigError
from penstock.features.kv_events.event_log import EventLog
from penstock.features.kv_events.events import AllBlocksCleared
from penstock.features.kv_events.publisher import EventPublisher
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.services import SchedulerServices


class EventScheduling(EventLog, SchedulerFeature):
    """Watches the prefix cache, and publishes its events. The first batch says that this engine has no blocks yet."""

    def __init__(self, services: SchedulerServices) -> None:
        config, kv_cache = services.config, services.scheduler.kv_cache
        options = config.kv_events.events
        assert options is not None, "the feature is on"
        if not kv_cache.caches_prefixes:
            raise ConfigError("kv_events_config is not valid for a model that shares no prefixes. Leave it out.")
        super().__init__(kv_cache.groups, keeps_elsewhere=config.kv_tiers.option is not None)
        self._publisher = EventPublisher(options, config.parallel.data_parallel_rank or 0)
        self._publisher.publish([AllBlocksCleared()])
        kv_cache.watch(self)

    def _publish(self) -> None:
        if events := self.take_events():
            self._publisher.publish(events)

    def after_step(self) -> None:
        self._publish()

    def reset(self) -> None:
        super().reset()
        self._publish()

    def reset_connector(self) -> bool:
        # The other features have forgotten what they keep.
        self._publish()
        return True

    def counters(self) -> Mapping[str, int]:
        return {
            "kv_event_batches": self._publisher.num_batches,
            "kv_event_batches_dropped": self._publisher.num_dropped,
        }

    def close(self) -> None:
        self._publish()
        self._publisher.close()
