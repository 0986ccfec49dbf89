"""Fake cores for other processes, which import no torch for them."""

from __future__ import annotations

import logging
import time

from penstock.config import EngineConfig
from support.fake_engine import FakeCore


def slow_and_refusing(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(0.05)
    core.refuses = lambda request: request.prompt_token_ids[-1] == 12
    return core


def talking(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    logger = logging.getLogger("penstock.engine.talking")

    def talk(step: int) -> None:
        logger.debug("step %d of 100%%", step)
        logging.getLogger("penstock.other").info("not asked for")
        try:
            raise ZeroDivisionError("of all things")
        except ZeroDivisionError:
            logger.exception("step %d failed", step)

    core.on_step = talk
    return core
