"""A trainer sends weights to a server over HTTP and a group, as TRL does: it then answers as one of these weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.script_helpers import get_open_port
from penstock.weight_transfer import announced, packed_nccl_broadcast_producer, trainer_init
from support.servers import Served, serving
from support.trained_models import old_and_new

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 8 << 20, "enable_multiprocessing": False}
BODY = {"prompt": [[5, 6, 7, 8, 9]], "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return old_and_new(tmp_path_factory.mktemp("models"))


@pytest.fixture
def server(folders: tuple[Path, Path]) -> Iterator[Served]:
    engine = AsyncEngine(folders[0], weight_transfer_config={"backend": "gloo", "timeout_s": 60}, **OPTIONS)
    with serving(engine, rl_routes_without_key=True) as served:
        yield served


def answer(served: Served) -> Any:
    (choice,) = served.post("/v1/completions", BODY).json["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def versions(served: Served) -> tuple[Any, Any]:
    """Versions of the weights by the server's description of itself, and of an output."""
    (choice,) = served.post("/v1/completions", BODY).json["choices"]
    return served.request("GET", "/server_info").json["weight_version"], choice.get("weight_version")


def test_a_server_has_the_weights_that_a_trainer_sent(server: Served, folders: tuple[Path, Path]) -> None:
    with serving(AsyncEngine(folders[1], **OPTIONS)) as fresh:
        expected = answer(fresh)
    assert answer(server) != expected
    assert versions(server) == (0, None)
    info = server.request("GET", "/server_info?config_format=json").json["vllm_config"]
    assert info["weight_transfer_config"]["backend"] == "gloo"
    trained: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folders[1], trust_remote_code=False)
    parameters = [(name, parameter.data) for name, parameter in trained.named_parameters()]
    init = {"master_address": "127.0.0.1", "master_port": get_open_port(), "rank_offset": 1, "world_size": 2}
    init["packed"] = True
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(server.post, "/init_weight_transfer_engine", {"init_info": init})
        group = trainer_init(init)
        assert joined.result().status == 200
        for _ in range(2):
            assert server.post("/start_weight_update", {}).status == 200
            taken = threads.submit(server.post, "/update_weights", {"update_info": announced(parameters)})
            packed_nccl_broadcast_producer(iter(parameters), group, src=0, post_iter_func=lambda item: item[1])
            assert taken.result().status == 200
            assert server.post("/finish_weight_update", {}).status == 200
            server.post("/reset_prefix_cache", b"")
            assert answer(server) == expected
    assert versions(server) == (2, 2)
    group.close()


def test_an_update_out_of_turn_is_no_failure_of_the_server(server: Served) -> None:
    for path, body in (("/update_weights", {"update_info": {}}), ("/finish_weight_update", {})):
        assert server.post(path, body).status in (400, 409)
    assert answer(server)
    assert server.post("/start_weight_update", {}).status == 200
    # Tensors are missing.
    assert server.post("/finish_weight_update", {}).status == 409
