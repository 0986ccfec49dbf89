"""Requests that no client library would send, on sockets and plain HTTP connections."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from support.fake_engine import FakeCore, write_model
from support.servers import Served, serving
from support.waiting import PATIENCE_S

LIMIT = 50_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))
    engine = AsyncEngine.from_config(config, load_core=lambda config: FakeCore())
    with serving(engine, max_request_bytes=LIMIT) as served:
        yield served


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the", "max_tokens": 2, **fields}


BROKEN: list[tuple[Any, str]] = [
    (b"{", "not valid JSON"),
    (b"", "empty"),
    (b"null", "empty"),
    (b"[]", "Allowed: a JSON object"),
    (b'"text"', "Allowed: a JSON object"),
    (b'{"prompt": "\xff"}', "cannot be read as JSON: 'utf-8' codec"),
    (b"[" * 20_000, "cannot be read as JSON: maximum recursion depth"),
    (b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}", "cannot be read as JSON: Exceeds the limit"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature=nan"),
    (b'{"prompt": "a", "seed": 99999999999999999999}', "seed=99999999999999999999"),
    (b'{"prompt": "\\ud800"}', "not a character"),
    (b'{"prompt": "a", "\\ud800": 1}', "not valid"),
    (b'{"prompt": "a", "model": "\\ud800"}', "not served here"),
    (b'{"prompt": "a", "stop": ["\\udfff"]}', "not a character"),
    (b'{"prompt": "a", "request_id": "\\udfff"}', "request_id="),
    (b'{"prompt": "a", "timeout": 1e999}', "timeout=inf"),
    (b'{"prompt": [[]]}', "empty"),
]


@pytest.mark.parametrize(("body", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_body_gets_a_readable_error(server: Served, body: bytes, message: str) -> None:
    reply = server.post("/v1/completions", body)
    assert reply.status in (400, 404)
    assert message in reply.error["message"]
    assert server.post("/v1/completions", completion()).status == 200


def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(server: Served) -> None:
    body = gzip.compress(json.dumps(completion()).encode())
    reply = server.request("POST", "/v1/completions", body, Content_Encoding="gzip")
    assert (reply.status, reply.error["message"]) == (
        415,
        "The body has the Content-Encoding 'gzip'. Allowed: identity. Send it uncompressed.",
    )


def test_a_path_with_a_slash_behind_it_is_no_route(server: Served) -> None:
    """A redirect would name this server, not the proxy before it, and drop its path prefix."""
    assert server.post("/v1/completions/", completion()).status == 404


def test_a_body_without_its_content_type_says_which(server: Served) -> None:
    reply = server.post("/v1/completions", b'{"prompt": "a"}', Content_Type="text/plain")
    assert reply.status == 400
    assert "Content-Type: application/json" in reply.error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_not_read(server: Served, chunked: bool) -> None:
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {10**9}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head.encode())
        if chunked:
            sock.sendall(b"%x\r\n" % (LIMIT + 1) + b" " * (LIMIT + 1) + b"\r\n")
        answer = b""
        while b"request_too_large" not in answer and (data := sock.recv(65536)):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(server: Served, chunked: bool) -> None:
    piece, num_pieces = b"x" * 1_000_000, 40
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {num_pieces * len(piece)}"
    kind = "Content-Type: application/json"
    with server.connect() as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\n{size}\r\n\r\n".encode())
        for _ in range(num_pieces):
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            sock.sendall(b"0\r\n\r\n")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Served]:
    """Server whose requests must arrive in less time than their answers take."""
    core = FakeCore()
    core.on_step = lambda step: time.sleep(0.2)
    engine = AsyncEngine.from_config(EngineConfig.create(str(write_model(tmp_path))), load_core=lambda config: core)
    with serving(engine, request_read_timeout_s=0.3) as served:
        yield served


def drip(server: Served, begin: bytes, piece: bytes) -> bytes:
    """Send a request that goes on in pieces for ever. Returns what came back until the server closed the connection.

    That may be nothing: a piece that arrives after the end resets the connection.
    """
    with server.connect() as sock:
        sock.settimeout(0.05)
        answer, deadline = b"", time.monotonic() + PATIENCE_S
        sock.sendall(begin)
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                try:
                    data = sock.recv(65536)
                except ConnectionResetError:
                    return answer
                answer += data
                if not data:
                    return answer
            if not answer:
                with suppress(ConnectionError):
                    sock.sendall(piece)
    raise AssertionError(f"The connection is still open after {answer!r}")


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "no byte": (b"", b""),
    "headers that stop": (POST, b""),
    "headers that go on": (POST, b"a: b\r\n"),
    "no byte of a body": (POST + b"Content-Length: 1000\r\n\r\n", b""),
    "a body that stops": (POST + b'Content-Length: 1000\r\n\r\n{"prompt": "', b""),
    "a body that goes on": (POST + b'Content-Length: 1000\r\n\r\n{"prompt": "', b"a"),
    "chunks that go on": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
}


@pytest.mark.parametrize(("begin", "piece"), ENDLESS.values(), ids=ENDLESS)
def test_a_request_that_does_not_arrive_gets_408_and_loses_its_connection(
    impatient: Served, begin: bytes, piece: bytes
) -> None:
    answer = drip(impatient, begin, piece)
    if piece and not answer:
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("timeout_error", "request_read_timeout")
    assert "0.3 s" in error["message"]


def test_a_body_that_does_not_arrive_gets_an_error_of_anthropics_shape(impatient: Served) -> None:
    begin = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    error = json.loads(drip(impatient, begin, b"").partition(b"\r\n\r\n")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")


def test_an_idle_connection_and_a_long_answer_are_no_late_requests(impatient: Served) -> None:
    connection = HTTPConnection("127.0.0.1", impatient.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json"}
    with closing(connection):
        connection.connect()
        sock = connection.sock
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps(completion()), headers)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, True)
            time.sleep(0.5)
        assert connection.sock is sock


def test_a_body_at_the_limit_is_read(server: Served) -> None:
    body = b'{"prompt": "the", "max_tokens": 2}'
    assert server.post("/v1/completions", body + b" " * (LIMIT - len(body))).status == 200


def test_a_body_that_is_cut_leaves_the_server_whole(server: Served) -> None:
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.post("/v1/completions", completion()).status == 200


def test_an_unknown_route_and_a_wrong_method_have_the_errors_shape(server: Served) -> None:
    unknown = server.request("GET", "/v2/nothing")
    assert unknown.status == 404
    assert unknown.error["type"] == "not_found_error"
    wrong = server.request("GET", "/v1/completions")
    assert wrong.status == 405
    assert wrong.headers["allow"] == "POST"
    assert "POST" in wrong.error["message"]


def test_a_model_that_is_not_served_is_not_found(server: Served) -> None:
    for reply in (server.post("/v1/completions", completion(model="gpt")), server.request("GET", "/v1/models/gpt")):
        assert reply.status == 404
        assert reply.error["code"] == "model_not_found"
        assert reply.error["param"] == "model"
        assert "'demo'" in reply.error["message"]


def test_the_models_have_their_longest_context(server: Served) -> None:
    (card,) = server.request("GET", "/v1/models").json["data"]
    assert card["id"] == "demo"
    assert card["max_model_len"] == 64
    assert card["tasks"] == ["generate"]
    assert server.request("GET", "/v1/models/demo").json == card


def test_a_valid_request_id_comes_back_and_others_are_replaced(server: Served) -> None:
    assert server.request("GET", "/version", X_Request_Id="mine-1").headers["x-request-id"] == "mine-1"
    for given in ("", "has space", "x" * 300):
        made = server.request("GET", "/version", X_Request_Id=given).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
    assert server.post("/v1/completions", b"{", X_Request_Id="mine-2").headers["x-request-id"] == "mine-2"


def test_two_requests_of_one_request_id_both_run(server: Served) -> None:
    ids = {server.post("/v1/completions", completion(), X_Request_Id="same").json["id"] for _ in range(2)}
    assert len(ids) == 2


def test_a_stream_ends_with_done_and_has_no_empty_events(server: Served) -> None:
    reply = server.post("/v1/completions", completion(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.body.decode().split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_text_and_token_ids_go_there_and_back(server: Served) -> None:
    text = "über 日本語 😀"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 64
    assert tokens["tokens"][0] == 0
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": f"<s>{text}"}
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert bare["tokens"] == tokens["tokens"][1:]
    assert bare["token_strs"] is None


def test_wrong_token_ids_are_named(server: Served) -> None:
    reply = server.post("/detokenize", {"tokens": [1, 100_000]})
    assert (reply.status, reply.error["param"]) == (400, "tokens[1]")
    assert server.post("/detokenize", {"tokens": [1, "x"]}).error["param"] == "tokens[1]"
    assert server.post("/tokenize", {}).error["message"] == "Give either prompt or messages."


def test_the_openapi_document_has_every_status_that_routes_return(server: Served) -> None:
    document = server.request("GET", "/openapi.json").json
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} == set(responses)
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "user", "metadata"} <= set(fields)


HUGE: list[tuple[str, Any, str]] = [
    ("/v1/completions", completion(prompt=["a"] * 20_000), "prompt has 20,000 items"),
    ("/v1/completions", completion(stop_token_ids=["x"] * 1_000), "stop_token_ids[0]"),
    ("/v1/completions", completion(n=100_000), "n=100000"),
    ("/v1/completions", completion(**{f"field{number}": 1 for number in range(9_000)}), "There is no field field0"),
    ("/v1/completions", completion(logit_bias={str(id): "x" for id in range(9_000)}), "logit_bias[0]='x'"),
    ("/v1/chat/completions", {"messages": [{}] * 15_000}, "messages[0].role is missing"),
    ("/detokenize", {"tokens": ["x"] * 10_000}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "message"), HUGE, ids=lambda value: str(value)[:40])
def test_a_long_list_of_mistakes_gets_the_first(tmp_path: Path, path: str, body: Any, message: str) -> None:
    engine = AsyncEngine.from_config(EngineConfig.create(str(write_model(tmp_path))), load_core=lambda _: FakeCore())
    with serving(engine) as server:
        reply = server.post(path, body)
        assert reply.status == 400
        assert message in reply.error["message"]
