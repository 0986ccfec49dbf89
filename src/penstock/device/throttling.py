"""Warning about a control group's CPU quota that stops the threads."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from penstock.device import limits

logger = logging.getLogger(__name__)
_INTERVAL_S = 10.0
# Part of the time that throttling may take without a warning.
_TOLERATED = 0.05


class ThrottleWatch:
    """Looks at a quota's throttling every ten seconds in a thread, and warns once. Without a quota it does nothing."""

    def __init__(self, root: Path = limits.CGROUP_ROOT, membership: Path = limits.SELF_CGROUP) -> None:
        self._paths = root, membership
        self._closed = threading.Event()
        self._throttled_s, self._looked_at = limits.throttled_s(*self._paths), time.monotonic()
        if limits.cpu_quota(*self._paths) is not None and self._throttled_s is not None:
            threading.Thread(target=self._run, name="penstock-throttling", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self, now: float) -> bool:
        """Warn if the quota has stopped the threads for more than 5% of the time since the last look.

        now: in monotonic seconds. Returns whether it has warned.
        """
        throttled_s = limits.throttled_s(*self._paths)
        if throttled_s is None or self._throttled_s is None:
            return False
        stopped_s, passed_s = throttled_s - self._throttled_s, now - self._looked_at
        self._throttled_s, self._looked_at = throttled_s, now
        if stopped_s <= _TOLERATED * passed_s:
            return False
        logger.warning(
            "The control group's CPU quota of %s CPUs stopped this process for %.1f of the last %.0f s. Raise the "
            "quota, or use fewer threads (num_threads).",
            limits.cpu_quota(*self._paths),
            stopped_s,
            passed_s,
        )
        return True

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            if self.look(time.monotonic()):
                return
