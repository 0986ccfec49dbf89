"""KV connectors of engines beside each other, and of workers that are killed while blocks are loaded."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from features.kv_connector.page_connector import PageConnector
from penstock import LLM, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same
from support.checkpoints import tiny_checkpoint
from support.engines import make_core, run
from support.waiting import wait_until

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 6
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
NOTING = '''

class NotingConnector(FolderConnector):
    """Notes the engine of each object."""

    def __init__(self, *args):
        super().__init__(*args)
        (self.folder / f"{self._kv_transfer_config.engine_id}.{self.role.name}-{self.rank}").touch()
'''
SLOW = '''

class SlowConnector(FolderConnector):
    """Takes its time on rank 1, and says when."""

    def start_load_kv(self, forward_context, **kwargs):
        import time

        if self.rank == 1 and self._get_connector_metadata().loads:
            (self.folder / "loading").touch()
            time.sleep(0.3)
        super().start_load_kv(forward_context, **kwargs)
'''


@pytest.mark.slow
@pytest.mark.fresh_interpreters
def test_engines_beside_each_other_have_a_connector_each_with_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PageConnector(tmp_path, monkeypatch, NOTING, "NotingConnector")
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "8MiB", "data_parallel_size": 2}
    prompts = [f"{PLAY}{number}" for number in range(8)]
    with LLM("demo", **options) as llm:
        expected = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(prompts, GREEDY)]
    for turn in range(2):
        with LLM("demo", kv_transfer_config={**page.config, "engine_id": f"pair{turn}"}, **options) as llm:
            outputs = llm.generate(prompts, GREEDY)
        assert [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs] == expected
    assert all(output.num_cached_tokens for output in outputs)
    names = sorted(path.name for path in page.blocks.glob("pair0*"))
    assert names == [f"pair0_dp{number}.{role}-0" for number in (0, 1) for role in ("SCHEDULER", "WORKER")]


def _kill_once(marker: Path, core: EngineCore, victim: int) -> None:
    """Kill a worker while the other one, or itself, loads blocks."""
    wait_until(marker.exists, "blocks are loaded")
    os.kill(core._executor.process_ids[victim], signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.fresh_interpreters
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_while_blocks_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    page = PageConnector(tmp_path, monkeypatch, SLOW, "SlowConnector")
    tiny_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 128}
    core = make_core(tmp_path / "model", kv_transfer_config=page.config, **options)
    try:
        expected = run(core, PROMPTS, PARAMS)
        assert core.reset_prefix_cache()
        killer = threading.Thread(target=_kill_once, args=(page.blocks / "loading", core, victim))
        killer.start()
        assert_same(run(core, PROMPTS, PARAMS), expected)
        core.scheduler.kv_cache.check_integrity()
        killer.join()
        assert (page.blocks / "loading").exists()
    finally:
        core.close()
