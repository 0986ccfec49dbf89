"""Two requests of a proxy, as vLLM's send them: to a server for the prompt, and to another one for the answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncEngine
from support.servers import Served, events_of, serving

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 12
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": "32MiB", "num_threads": 1, "enable_multiprocessing": False}
GENERATE = "/inference/v1/generate"
# What vLLM's proxies send with a prompt.
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PLAY, "max_tokens": 12, "temperature": 0.7, "seed": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PLAY + "O"}],
        "max_completion_tokens": 12,
        "max_tokens": 12,
        "temperature": 0.7,
        "seed": 3,
    },
    GENERATE: {
        "token_ids": [5 + index * 7 % 50 for index in range(200)],
        "sampling_params": {"max_tokens": 12, "temperature": 0.7, "seed": 3},
    },
}


def remote(name: str) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "RemoteConnector",
            "kv_connector_module_path": "features.kv_connector.remote_connector",
            "kv_role": name,
        }
    }


@contextmanager
def two_servers(kind: str, folder: Path) -> Iterator[tuple[Served, Served]]:
    """Server of prompts, and that of answers."""
    if kind == "connector":
        options = remote("kv_producer"), remote("kv_consumer")
    else:
        (folder / "secret").write_text("a secret of some length")
        for name in ("prompts", "answers"):
            (folder / name).mkdir()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{one.getsockname()[1]}"
        options = (
            {"kv_offload_dir": folder / "prompts", "kv_listen": address, "kv_secret_file": folder / "secret"},
            {
                "kv_offload_dir": folder / "answers",
                "kv_load_policy": "always",
                "kv_peers": address,
                "kv_secret_file": folder / "secret",
            },
        )
    with ExitStack() as stack:
        engines = [AsyncEngine("demo", **OPTIONS, **one) for one in options]
        first, second = (
            stack.enter_context(serving(one, chat_template="{{ messages[0].content }}")) for one in engines
        )
        yield first, second


def limited(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prompt, as a proxy makes it."""
    if path == GENERATE:
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 1}}
    of_chat = {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
    return {**body, "max_tokens": 1, **of_chat}


def streamed(served: Served, path: str, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Pieces of a streamed answer, and its usage."""
    reply = served.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.status == 200, reply.body
    *chunks, usage, done = events_of(reply.body)
    assert done == "[DONE]"
    pieces: list[Any] = []
    for choice in (choice for chunk in chunks for choice in json.loads(chunk)["choices"]):
        name = "token_ids" if path == GENERATE else "text" if "text" in choice else "content"
        pieces += (choice if name in choice else choice["delta"]).get(name) or ""
    return pieces, json.loads(usage)["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["connector", "folder"])
def test_streams_of_two_requests_are_those_of_one(tmp_path: Path, kind: str) -> None:
    with two_servers(kind, tmp_path) as (prompts, answers):
        for path, body in BODIES.items():
            # Another salt has blocks of its own.
            expected, _ = streamed(answers, path, {**body, "cache_salt": "alone"})
            reply = prompts.post(path, {**limited(path, body), "kv_transfer_params": ASKED})
            assert reply.status == 200, reply.body
            given = reply.json["kv_transfer_params"]
            assert given["do_remote_prefill"] is True
            found, usage = streamed(answers, path, {**body, "kv_transfer_params": given})
            assert found == expected
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert num_cached > usage["prompt_tokens"] - 17 > 100
            # A streamed request for the prompt says the same.
            reply = prompts.post(path, {**limited(path, body), "kv_transfer_params": ASKED, "stream": True})
            chunks = [json.loads(one) for one in events_of(reply.body)[:-1]]
            (again,) = (one["kv_transfer_params"] for one in chunks if "kv_transfer_params" in one)
            assert {**again, "remote_request_id": "", "remote_block_ids": []} == {
                **given,
                "remote_request_id": "",
                "remote_block_ids": [],
            }
