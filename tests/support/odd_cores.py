"""Fake cores for other processes, which import no torch for them."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.config import EngineConfig
from support.fake_engine import FakeCore
from support.waiting import wait_until


def stopping_and_refusing(config: EngineConfig) -> FakeCore:
    """Core that refuses prompts ending with 12, and from its second step on waits for the file "go on"."""
    core, folder = FakeCore(config), Path(str(config.model.folder))

    def stop(step: int) -> None:
        if step > 1:
            (folder / "stopped").touch()
            wait_until((folder / "go on").exists, "the file to go on")

    core.on_step = stop
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
