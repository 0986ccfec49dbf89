"""Two servers, of which one computes prompts and the other one continues them, as one server alone would."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncEngine
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.features.kv_files.files import ABOUT
from penstock.server.options import ServerOptions
from penstock.server.start_checks import check_start
from support.servers import Served, serving

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 12
TEMPLATE = "{{ messages[0].content }}"
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "32MiB", "enable_multiprocessing": True}


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextmanager
def two_servers(folder: Path) -> Iterator[tuple[Served, Served]]:
    """Server of prompts, and that of answers."""
    (folder / "secret").write_text("a secret of some length")
    for name in ("prompts", "answers"):
        (folder / name).mkdir()
    options = {**OPTIONS, "kv_secret_file": str(folder / "secret")}
    address = free_address()
    prompts = AsyncEngine("demo", kv_offload_dir=str(folder / "prompts"), kv_listen=address, **options)
    answers = AsyncEngine("demo", kv_offload_dir=str(folder / "answers"), kv_peers=address, **options)
    with (
        serving(prompts, chat_template=TEMPLATE) as first,
        serving(answers, chat_template=TEMPLATE, prefill_url=first.url, prefill_min_bytes=300) as second,
    ):
        yield first, second


def num_blocks(folder: Path) -> int:
    return sum(path.is_file() and path.name != ABOUT for path in folder.rglob("*"))


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def text_of(served: Served, body: dict[str, Any]) -> str:
    reply = served.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["text"])


@pytest.mark.slow
def test_prompts_are_computed_by_the_one_and_continued_by_the_other(tmp_path: Path) -> None:
    with serving(AsyncEngine("demo", **OPTIONS), chat_template=TEMPLATE) as alone:
        expected = [text_of(alone, completion(PLAY + name)) for name in ("JULIET:", "ROMEO:")]
        chat = {"model": "demo", "messages": [{"role": "user", "content": PLAY}], "max_tokens": 8, "temperature": 0.8}
        of_chat = alone.post("/v1/chat/completions", {**chat, "n": 2, "seed": 1}).json["choices"]
    with two_servers(tmp_path) as (prompts, answers):
        reply = answers.post("/v1/completions", completion(PLAY + "JULIET:")).json
        assert reply["choices"][0]["text"] == expected[0]
        usage = reply["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 17 > 100
        found = answers.post("/v1/chat/completions", {**chat, "n": 2, "seed": 1}).json["choices"]
        assert [one["message"]["content"] for one in found] == [one["message"]["content"] for one in of_chat]
        # Short ones are computed at once, and bad ones refused with the reason.
        before = num_blocks(tmp_path / "prompts")
        assert before > 5
        assert answers.post("/v1/completions", completion("ROMEO:" * 20)).status == 200
        assert num_blocks(tmp_path / "prompts") == before
        assert answers.post("/v1/completions", completion(PLAY, temperature=-1)).status == 400
        assert answers.post("/v1/completions", "no json " * 100).status == 400
        # A server of prompts whose core is killed, and one that is gone.
        (core,) = prompts.engine._dispatcher.core.process_ids  # type: ignore[attr-defined]
        os.kill(core, signal.SIGKILL)
        assert text_of(answers, completion(PLAY + "ROMEO:")) == expected[1]


@pytest.mark.slow
def test_a_server_of_prompts_that_is_gone_is_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(AsyncEngine("demo", **OPTIONS)) as alone:
        expected = text_of(alone, completion(PLAY))
    (tmp_path / "blocks").mkdir()
    engine = AsyncEngine("demo", kv_offload_dir=str(tmp_path / "blocks"), **OPTIONS)
    with serving(engine, prefill_url=f"http://{free_address()}", prefill_min_bytes=300) as answers:
        for _ in range(3):
            assert text_of(answers, completion(PLAY)) == expected
    assert caplog.text.count("Prompts are computed here for 10 s") == 1


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="prefill_url='there' is not valid. Allowed: a URL"):
        ServerOptions(served_model_name=("demo",), prefill_url="there")
    options = ServerOptions(served_model_name=("demo",), prefill_url="http://there")
    with pytest.raises(ConfigError, match="prefill_url needs kv_offload_dir"):
        check_start(options, EngineConfig.create("demo"))
