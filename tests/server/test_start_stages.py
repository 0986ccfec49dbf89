"""Stages of a server's start: their times add up to its start, and the log has them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from penstock.server.processes.start_stages import StartStages
from support.server_process import ServerProcess

STAGES = ["configuration", "processes", "device", "model", "memory", "KV cache", "warm-up", "HTTP"]
STAGE = re.compile(r"([\w -]+) ([\d.]+) s")


def test_stages_add_up_to_the_start() -> None:
    stages = StartStages(time.monotonic() - 10.0)
    stages.end("configuration")
    time.sleep(0.3)
    stages.end("processes", {"processes": 0.1, "model": 0.15})
    stages.end("HTTP")
    found = {name.strip(): float(seconds) for name, seconds in STAGE.findall(stages.described())}
    assert list(found) == ["configuration", "processes", "model", "HTTP"]
    assert found["configuration"] == pytest.approx(10.0, abs=0.1)
    assert sum(found.values()) == pytest.approx(stages.whole_s, abs=0.2)


def test_a_stage_whose_parts_took_longer_has_no_time_of_its_own() -> None:
    stages = StartStages(time.monotonic())
    stages.end("processes", {"model": 2.0})
    assert stages.described() == "processes 0.0 s, model 2.0 s"


@pytest.mark.slow
def test_the_log_of_a_server_has_the_stages_of_its_start(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", "--threads", "1", "--kv-cache-memory-bytes", "32MiB")
    try:
        server.wait_until_ready()
        (line,) = re.findall(r"Start: (.*)", server.text)
        (whole,) = re.findall(r"Ready after ([\d.]+) s", server.text)
    finally:
        server.close()
    found = {name.strip(): float(seconds) for name, seconds in STAGE.findall(line)}
    assert list(found) == STAGES
    assert sum(found.values()) == pytest.approx(float(whole), abs=0.5)
