"""Requests of TRL's clients, as recorded (tools/clients/trl_recordings.py), against the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.errors import LifecycleError, WeightTransferFailed
from penstock.server.http.guards import ADMIN_PATHS, RL_PATHS
from support.servers import Served, serving

RECORDED = json.loads((Path(__file__).parent / "data" / "trl_client.json").read_text())
OPTIONS = {"num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "logprobs_mode": "processed_logprobs"}


class WeightCalls:
    """Weight updates of an engine, noted."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def install(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):

            async def call(*args: Any, of: str = name, **kwargs: Any) -> None:
                self.made.append((of, (*args, *kwargs.values())))
                if self.error is not None:
                    raise self.error

            monkeypatch.setattr(engine, name, call, raising=False)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, max_logprobs=-1, **OPTIONS)
    with serving(engine, rl_routes_without_key=True) as server:
        yield server


@pytest.fixture
def calls(served: Served, monkeypatch: pytest.MonkeyPatch) -> WeightCalls:
    made = WeightCalls()
    made.install(served.engine, monkeypatch)
    return made


def replies_of(served: Served, call: str) -> list[Any]:
    """Answers to the recorded requests of a call, but for /health, which front ends have (test_health.py)."""
    asked = [one for one in RECORDED if one["call"] == call and one["path"] != "/health"]
    assert asked, call
    replies = [served.request(one["method"], one["path"], one["body"]) for one in asked]
    assert [reply.status for reply in replies] == [200] * len(asked), [reply.body for reply in replies]
    return [reply.json for reply in replies]


def test_the_client_finds_the_server_and_its_options(served: Served) -> None:
    assert replies_of(served, "check_server")[0]["data"][0]["id"] == "demo"
    info = replies_of(served, "async_get_dtype")[0]["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.bfloat16"
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert replies_of(served, "async_get_max_model_len")[0]["data"][0]["max_model_len"] > 0
    assert replies_of(served, "async_get_world_size") == [{"world_size": 1}]


def test_completions_have_tokens_and_their_log_probabilities(served: Served) -> None:
    of_ids, of_texts = replies_of(served, "generate")
    assert [choice["prompt_token_ids"] for choice in of_ids["choices"]] == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
    for choice in of_ids["choices"] + of_texts["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(choice["token_ids"])
    assert all(len(top) >= 2 for choice in of_texts["choices"] for top in choice["logprobs"]["top_logprobs"])
    assert all(set(choice["text"]) <= {"a", "b"} for choice in of_texts["choices"])


def test_chats_have_tokens_and_their_log_probabilities(served: Served) -> None:
    for answer in replies_of(served, "chat"):
        assert answer["prompt_token_ids"]
        (choice,) = answer["choices"]
        named = [one["token"] for one in choice["logprobs"]["content"]]
        assert named == [f"token_id:{one}" for one in choice["token_ids"]]


def test_sequences_are_scored(served: Served) -> None:
    (answer,) = replies_of(served, "get_sequence_logprobs")
    for choice, ids in zip(answer["choices"], ([1, 2, 3, 4], [5, 6, 7]), strict=True):
        assert choice["prompt_logprobs"][0] is None
        for token_id, position in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
            assert {"rank", "logprob"} <= set(position[str(token_id)])


def test_weights_are_announced_to_the_engine(served: Served, calls: WeightCalls) -> None:
    replies_of(served, "init_communicator")
    replies_of(served, "update_model_params")
    replies_of(served, "weight_update")
    init = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
    both = {"names": ["weight", "bias"], "dtype_names": ["float32"] * 2, "shapes": [[3, 2], [3]]}
    weight = {"names": ["weight"], "dtype_names": ["bfloat16"], "shapes": [[3, 2]]}
    bias = {"names": ["bias"], "dtype_names": ["bfloat16"], "shapes": [[3]]}
    assert calls.made == [
        ("init_weight_transfer_engine", ({"init_info": init},)),
        ("start_weight_update", (True,)),
        ("update_weights", ({"update_info": both},)),
        ("finish_weight_update", (None,)),
        ("start_weight_update", (True,)),
        ("update_weights", ({"update_info": weight},)),
        ("update_weights", ({"update_info": bias},)),
        ("finish_weight_update", (None,)),
    ]
    replies_of(served, "reset_prefix_cache")


def test_the_asynchronous_client_pauses_sends_weights_and_resumes(served: Served, calls: WeightCalls) -> None:
    replies_of(served, "async_pause")
    assert served.request("GET", "/is_paused").json == {"is_paused": True}
    for call in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        replies_of(served, f"async_{call}")
    replies_of(served, "async_resume")
    assert served.request("GET", "/is_paused").json == {"is_paused": False}
    assert [name for name, _ in calls.made] == [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]


@pytest.mark.parametrize("error", [LifecycleError("No update."), WeightTransferFailed("The trainer is gone.")])
def test_what_the_state_refuses_has_a_status_that_the_client_does_not_repeat(
    served: Served, calls: WeightCalls, error: Exception
) -> None:
    calls.error = error
    for path, body in (("/update_weights", {"update_info": {}}), ("/finish_weight_update", {})):
        reply = served.post(path, body)
        assert (reply.status, reply.error["message"]) == (409, str(error))


def test_bodies_are_checked(served: Served, calls: WeightCalls) -> None:
    for path, body in (
        ("/init_weight_transfer_engine", {}),
        ("/update_weights", {"update_info": []}),
        ("/start_weight_update", {"is_checkpoint_format": "maybe"}),
    ):
        assert served.post(path, body).status == 400
    assert not calls.made


# Who may call.


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://localhost"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "rebound.example.com:80"},
        {"X_Forwarded_For": "10.0.0.1"},
    ],
    ids=lambda header: next(iter(header)),
)
def test_pages_and_proxies_need_a_key(served: Served, header: dict[str, str]) -> None:
    assert served.request("GET", "/get_world_size", **header).status == 401


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "0.0.0.0:8000", "[::1]:8000"])
def test_names_of_this_machine_need_none(served: Served, host: str) -> None:
    assert served.request("GET", "/get_world_size", Host=host).status == 200


def test_other_routes_of_the_administration_stay_closed(served: Served) -> None:
    for path in ADMIN_PATHS - RL_PATHS:
        assert {served.request(method, path).status for method in ("GET", "POST")} <= {404, 405}


def test_clients_keys_do_not_open_the_routes_and_the_admins_does() -> None:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **OPTIONS)
    with serving(engine, enable_admin=True, admin_api_key="boss", api_keys=("one",)) as server:
        assert server.request("GET", "/get_world_size").status == 401
        assert server.request("GET", "/get_world_size", Authorization="Bearer one").status == 401
        assert server.request("GET", "/get_world_size", Authorization="Bearer boss").json == {"world_size": 1}
