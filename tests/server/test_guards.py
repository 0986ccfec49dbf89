"""API keys, CORS, admin routes and the log of requests."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.api_key import authorization
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ConfigError
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from support.fake_engine import FakeCore, write_model
from support.servers import Served, serving
from support.waiting import wait_until

ORIGIN = "https://example.org"


def engine_of(folder: Path) -> AsyncEngine:
    config = EngineConfig.create(str(write_model(folder)))
    return AsyncEngine.from_config(config, load_core=lambda config: FakeCore())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options: dict[str, Any] = {
        "api_keys": ("one", "two"),
        "enable_admin": True,
        "admin_api_key": "boss",
        "allowed_origins": (ORIGIN,),
        "enable_log_requests": True,
    }
    with serving(engine_of(tmp_path_factory.mktemp("model")), **options) as served:
        yield served


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_key_lets_in(server: Served, key: str) -> None:
    assert server.client(api_key=key).models.list().data[0].id == "demo"


@pytest.mark.parametrize("key", ["clé à", "ключ", "鍵"])
def test_keys_may_have_any_characters(tmp_path: Path, key: str) -> None:
    in_utf8 = key.encode().decode("latin-1")
    with serving(engine_of(tmp_path), api_keys=(key,)) as server:
        assert server.request("GET", "/v1/models", **authorization(key)).status == 200
        assert server.request("GET", "/v1/models", x_api_key=in_utf8).status == 200
        assert server.request("GET", "/v1/models", Authorization=f"Bearer {in_utf8}x").status == 401
        if max(key) < "\u0100":
            assert server.request("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer on", "Bearer one two", "Basic one", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/openapi.json", "/docs", "/info", "/load"])
def test_no_other_key_does(server: Served, path: str, header: str) -> None:
    reply = server.request("GET", path, Authorization=header)
    assert reply.status == 401
    assert reply.error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_faces_of_other_servers_need_a_key_and_say_so_in_their_shapes(server: Served) -> None:
    for path in ("/api/tags", "/embed"):
        reply = server.request("GET", path)
        assert reply.status == 401
        assert "needs an API key" in reply.json["error"]


def test_probes_need_no_key(server: Served) -> None:
    assert server.request("GET", "/version").status == 200
    assert server.request("GET", "/health").status != 401
    # The page's path takes requests of TEI's API too.
    assert server.request("GET", "/").status == 200
    assert server.post("/", {"inputs": "a"}).status == 401


def test_admin_routes_need_the_admins_key(server: Served) -> None:
    assert server.post("/reset_prefix_cache", b"", Authorization="Bearer one").status == 401
    assert server.post("/reset_prefix_cache", b"", Authorization="Bearer boss").json == {"reset": True}
    assert server.request("GET", "/v1/models", Authorization="Bearer boss").status == 401


def test_there_are_no_admin_routes_unless_enabled(tmp_path: Path) -> None:
    with serving(engine_of(tmp_path)) as server:
        assert server.post("/reset_prefix_cache", b"").status == 404


def test_a_browser_of_an_allowed_origin_may_ask_and_read_errors(server: Served) -> None:
    preflight = server.request("OPTIONS", "/v1/models", Origin=ORIGIN, Access_Control_Request_Method="GET")
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert server.request("GET", "/v1/models", Origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    other = server.request("GET", "/version", Origin="https://other.org")
    assert "access-control-allow-origin" not in other.headers


def test_the_log_has_the_request_and_not_its_prompt(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server.post("/v1/completions", {"prompt": "secret"}, Authorization="Bearer one", X_Request_Id="log-1")
        wait_until(lambda: "log-1 POST /v1/completions status 200" in caplog.text, "it is logged")
    assert "secret" not in caplog.text


def test_prompts_are_logged_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        serving(engine_of(tmp_path), enable_log_requests=True, log_prompts=True) as server,
    ):
        server.post("/v1/completions", {"prompt": "no secret"})
    assert "no secret" in caplog.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_outputs_are_logged_on_request(is_stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        serving(engine_of(tmp_path), enable_log_requests=True, enable_log_outputs=True) as server,
    ):
        body = {"prompt": "x", "n": 2, "max_tokens": 4, "stream": is_stream}
        answer = server.post("/v1/completions", body, X_Request_Id="log-1")
        lines = [line for line in caplog.messages if line.startswith("log-1 output[")]
    assert [line.partition(":")[0] for line in sorted(lines)] == [f"log-1 output[0][{i}], length" for i in (0, 1)]
    if not is_stream:
        assert [line.partition(": ")[2] for line in sorted(lines)] == [one["text"] for one in answer.json["choices"]]


def test_a_prefix_that_a_proxy_keeps_is_no_part_of_the_route(tmp_path: Path) -> None:
    with serving(engine_of(tmp_path), root_path="/llm", api_keys=("one",)) as server:
        assert server.request("GET", "/llm/version").status == 200
        assert server.request("GET", "/version").status == 200
        assert server.request("GET", "/openapi.json", Authorization="Bearer one").json["servers"] == [{"url": "/llm"}]


WRONG: list[dict[str, Any]] = [
    {"served_model_name": ()},
    {"api_keys": ("",)},
    {"enable_admin": True},
    {"max_request_bytes": 0},
    {"max_open_request_bytes": 0},
    {"request_read_timeout_s": 0},
    {"keep_alive_interval_s": -1},
    {"log_prompts": True},
    {"enable_log_outputs": True},
    {"metrics_prefix": "vllm:"},
    {"enable_auto_tool_choice": True},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerOptions(**{"served_model_name": ("demo",), **options})


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_parser": "none_such"}, "reasoning_parser='none_such'"),
    ({"tool_call_parser": "none_such"}, "tool_call_parser='none_such'"),
    ({"tool_parser_plugin": "none_such.py"}, "tool_parser_plugin='none_such.py'"),
    ({"chat_template": "none_such.jinja"}, "chat_template='none_such.jinja'"),
]


@pytest.mark.parametrize(("options", "message"), UNFIT, ids=str)
def test_an_option_that_does_not_fit_the_model_is_refused_at_start(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    engine = engine_of(tmp_path)
    try:
        with pytest.raises(ConfigError, match=re.escape(message)):
            create_app(engine, ServerOptions(served_model_name=("demo",), **options))
    finally:
        engine.shutdown()


def test_a_template_is_read_from_a_file_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages[0].role }}!")
    with serving(engine_of(tmp_path / "model"), chat_template=str(tmp_path / "template")) as server:
        tokens = server.post("/tokenize", {"messages": [{"role": "developer", "content": "a"}]}).json["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": "system!"}
