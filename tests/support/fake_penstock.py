"""The `penstock` command over the fake core, for tests of what happens to a process.

Environment: FAKE_STEP_SECONDS and FAKE_CLOSE_SECONDS how long a step and closing take, FAKE_CLOSED a file that is
written when the core is closed, FAKE_FAILING the first token of prompts that fail, FAKE_START what goes wrong while the
core starts, FAKE_MAX_MODEL_LEN its longest context.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.config import EngineConfig
from penstock.errors import OutOfMemory
from support.fake_engine import FakeCore, install_fake_core


class ObservedCore(FakeCore):
    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        start(os.environ.get("FAKE_START"))
        self.max_model_len = int(os.environ.get("FAKE_MAX_MODEL_LEN", self.max_model_len))
        self.failing = {int(os.environ.get("FAKE_FAILING", "-1"))}
        self.on_step = lambda step: time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))

    def close(self) -> None:
        time.sleep(float(os.environ.get("FAKE_CLOSE_SECONDS", "0")))
        if closed := os.environ.get("FAKE_CLOSED"):
            Path(closed).write_text(f"{len(self.running)} running")


def start(trouble: str | None) -> None:
    if trouble == "memory":
        raise OutOfMemory("12 GiB of weights do not fit into 8 GiB.")
    if trouble == "defect":
        raise ZeroDivisionError("a defect")
    if trouble == "interrupted import":
        try:
            print("starting", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            raise ImportError("numpy could not be imported") from None
    if trouble == "swallowed in an import":
        import_module("support.import_that_swallows")


if __name__ == "__main__":
    install_fake_core(ObservedCore)
    from penstock.cli.main import main

    main()
