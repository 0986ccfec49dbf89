"""A trainer that is killed or stops in the middle of an update over a group, and the one after it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.contract import RpcCall
from penstock.errors import PenstockError, WeightTransferFailed
from penstock.features.weight_transfer.state import RankStatus
from penstock.weight_transfer import GroupSender, announced
from support.checkpoints import tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

pytestmark = [pytest.mark.slow, pytest.mark.one_path(reason="both paths read the same memory")]
PROMPTS = random_prompts([5, 21], 97)
# Sends seven tensors, and is gone then.
TRAINER = """
import os, signal, sys
from safetensors.torch import load_file
from penstock.weight_transfer import send_weights, trainer_init

port, file, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
group = trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2}, "cpu")

def tensors():
    for index, item in enumerate(load_file(file).items()):
        if index == 7:
            os.kill(os.getpid(), number)
        yield item

send_weights(group, tensors(), packed=False)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_that_is_gone_in_an_update(tmp_path: Path, number: signal.Signals) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        folder.mkdir()
        tiny_checkpoint(folder, seed=seed)
    fresh = make_core(new)
    expected = [result.tokens for result in run(fresh, PROMPTS, greedy(10))]
    fresh.close()
    items = list(load_file(new / "model.safetensors").items())
    core = make_core(old, weight_transfer_config={"backend": "gloo", "timeout_s": 5})
    port = free_port()
    file = new / "model.safetensors"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port), str(file), str(int(number))])
    try:
        info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
        for _ in range(20):
            try:
                core.collective_rpc(RpcCall("init_weight_transfer_engine", (info,)))
                break
            except PenstockError:
                # The trainer is still importing; joining has the same timeout.
                time.sleep(0.5)
        core.collective_rpc(RpcCall("start_weight_update"))
        begin = time.monotonic()
        with pytest.raises(WeightTransferFailed):
            core.collective_rpc(RpcCall("update_weights", ({**announced(items), "packed": False},)))
        assert time.monotonic() - begin < 30
        results = {"r": Result()}
        add(core, "r", PROMPTS[0], greedy(10))
        for _ in range(10):
            assert core.step() == []
        status: RankStatus = core.collective_rpc(RpcCall("weight_update_status"))[0]
        assert "replaced" in str(status.why_undefined)

        info["master_port"] = free_port()
        found: list[GroupSender] = []
        joining = threading.Thread(target=lambda: found.append(GroupSender.join(info)))
        joining.start()
        core.collective_rpc(RpcCall("init_weight_transfer_engine", (info,)))
        joining.join(60)
        core.collective_rpc(RpcCall("start_weight_update"))
        sending = threading.Thread(target=found[0].send, args=(items,))
        sending.start()
        core.collective_rpc(RpcCall("update_weights", (found[0].update_info(items),)))
        sending.join(60)
        core.collective_rpc(RpcCall("finish_weight_update"))
        finish(core, results)
        assert results["r"].tokens == expected[0]
        found[0].close()
    finally:
        core.close()
        trainer.kill()
        trainer.wait()
