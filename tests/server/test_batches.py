"""Files and batches with OpenAI's client: their answers, their errors, their limits, and servers that are restarted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ConfigError
from penstock.server.batches import runner
from penstock.server.batches.runner import BatchRunner
from penstock.server.batches.store import FINAL, BatchStore
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from support.servers import Served, serving
from support.waiting import PATIENCE_S, wait_until

CHAT = "/v1/chat/completions"
KEYS = {"api_keys": ("secret",)}


def server_of(folder: Path, **options: Any) -> Any:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    return serving(engine, batch_dir=str(folder), **{**KEYS, **options})


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with server_of(tmp_path_factory.mktemp("batches") / "new" / "folder") as served:
        yield served


@pytest.fixture
def batch_client(batch_server: Served) -> OpenAI:
    return batch_server.client(api_key="secret")


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "demo", **body}}


def chat(name: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hello {name}"}]
    return line(name, **{"messages": messages, "max_tokens": 4, "temperature": 0, **body})


def upload(client: OpenAI, *lines: dict[str, Any] | str) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def begin(client: OpenAI, *lines: dict[str, Any] | str, endpoint: Any = CHAT) -> Any:
    return client.batches.create(input_file_id=upload(client, *lines), endpoint=endpoint, completion_window="24h")


def ended(client: OpenAI, id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(id).status in FINAL, "the batch ends")
    return client.batches.retrieve(id)


def answers(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = client.files.content(file_id).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


def test_answers_are_those_of_the_route_and_errors_have_a_file(batch_client: OpenAI) -> None:
    batch = begin(batch_client, *(chat(str(number)) for number in range(20)), "", chat("bad", temperature=-1))
    assert (batch.object, batch.status) == ("batch", "validating")
    assert batch.expires_at - batch.created_at == 86_400
    batch = ended(batch_client, batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 20, 1)
    found = answers(batch_client, batch.output_file_id)
    assert found.keys() == {str(number) for number in range(20)}
    direct = batch_client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello 7"}], max_tokens=4, temperature=0
    )
    body = found["7"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert (found["7"]["response"]["status_code"], found["7"]["error"]) == (200, None)
    (failed,) = answers(batch_client, batch.error_file_id).values()
    assert failed["response"]["status_code"] == 400
    assert failed["error"]["message"].startswith("temperature=-1")
    assert batch.id in [one.id for one in batch_client.batches.list()]
    with pytest.raises(BadRequestError, match="has ended: it is completed"):
        batch_client.batches.cancel(batch.id)


def test_broken_lines_fail_the_batch_by_their_numbers(batch_client: OpenAI) -> None:
    lines: list[Any] = [chat("a"), "{", chat("a"), line("b", "/v1/completions", prompt="a"), chat("c", stream=True)]
    batch = ended(batch_client, begin(batch_client, *lines).id)
    assert batch.status == "failed"
    found = {one.line: one.message for one in batch.errors.data}
    assert found.keys() == {2, 3, 4, 5}
    assert found[3] == "custom_id='a' is that of line 1 too. Give each request one of its own."
    assert found[4] == "url='/v1/completions' is not valid. Allowed: /v1/chat/completions."
    assert ended(batch_client, begin(batch_client, "").id).errors.data[0].message == "The file has no requests."


def test_requests_of_a_batch_may_call_tools(batch_client: OpenAI) -> None:
    fixed = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": fixed}}]
    batch = ended(batch_client, begin(batch_client, chat("a", tools=tools, tool_choice="required", max_tokens=60)).id)
    (choice,) = answers(batch_client, batch.output_file_id)["a"]["response"]["body"]["choices"]
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("f", {"a": 1})


def test_completions_and_responses_can_be_batches(batch_client: OpenAI) -> None:
    given: dict[str, Any] = {"/v1/completions": {"prompt": "Once", "max_tokens": 2}}
    given["/v1/responses"] = {"input": "Hi", "max_output_tokens": 2, "store": False}
    for endpoint, body in given.items():
        batch = ended(batch_client, begin(batch_client, line("a", endpoint, **body), endpoint=endpoint).id)
        assert answers(batch_client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_a_cancelled_batch_keeps_its_answers(batch_client: OpenAI, batch_server: Served) -> None:
    long = [chat(f"long{number}", max_tokens=900, ignore_eos=True) for number in range(200)]
    batch = begin(batch_client, chat("short"), *long)
    wait_until(lambda: batch_client.batches.retrieve(batch.id).request_counts.completed > 0, "one is answered")
    assert batch_client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(batch_client, batch.id)
    assert batch.status == "cancelled"
    assert "short" in answers(batch_client, batch.output_file_id)
    wait_until(lambda: batch_server.engine.get_num_unfinished_requests() == 0, "no request of it runs")


def test_a_batch_outlives_its_server(tmp_path: Path) -> None:
    lines = [chat(f"{number}", max_tokens=40, ignore_eos=True) for number in range(40)]
    with server_of(tmp_path) as served, served.client(api_key="secret") as client:
        batch = begin(client, *lines)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, "one is answered")
    partial = tmp_path / "batches" / f"{batch.id}.output"
    num_before = len(partial.read_bytes().splitlines()) if partial.exists() else len(lines)
    if partial.exists():
        with partial.open("ab") as file:
            file.write(b'{"custom_id": "cut{"custom_id": "off"}\n{"custom_id": "cut')
    with server_of(tmp_path) as served, served.client(api_key="secret") as client:
        found = answers(client, ended(client, batch.id).output_file_id)
    assert found.keys() == {str(number) for number in range(40)}
    assert num_before > 0


def test_files_are_listed_read_and_deleted(batch_client: OpenAI) -> None:
    id = upload(batch_client, chat("a"))
    described = batch_client.files.retrieve(id)
    assert (described.filename, described.purpose, described.object) == ("in.jsonl", "batch", "file")
    assert json.loads(batch_client.files.content(id).text)["custom_id"] == "a"
    assert described.bytes == len(batch_client.files.content(id).content)
    assert id in [one.id for one in batch_client.files.list(limit=1, purpose="batch")]
    assert batch_client.files.delete(id).deleted
    with pytest.raises(NotFoundError):
        batch_client.files.retrieve(id)
    with pytest.raises(NotFoundError) as caught:
        batch_client.batches.create(input_file_id=id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"


@pytest.mark.parametrize("path", ["/v1/files/..%2f..%2fetc", "/v1/files/file-0", "/v1/batches/batch_0"])
def test_names_of_files_lead_nowhere_else(batch_server: Served, path: str) -> None:
    assert batch_server.request("GET", path, x_api_key="secret").status == 404


def test_wrong_uploads_are_named(batch_server: Served, batch_client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="purpose='vision' is not available"):
        batch_client.files.create(file=b"a", purpose="vision")
    reply = batch_server.post("/v1/files", b"x", x_api_key="secret")
    assert reply.error["message"].startswith("The Content-Type is 'application/json'.")
    assert batch_server.request("GET", "/v1/files").status == 401


def test_without_a_folder_the_routes_say_so(server: Served, client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="Start the server with --batch-dir FOLDER"):
        client.files.list()
    assert server.request("GET", "/v1/batches").status == 400


def test_files_and_batches_have_limits(tmp_path: Path) -> None:
    limits = {"max_batch_dir_bytes": 600, "max_batch_requests": 2}
    with server_of(tmp_path, **limits) as served, served.client(api_key="secret") as client:
        batch = ended(client, begin(client, *(line(str(n), prompt="a") for n in range(3))).id)
        assert "more than 2 requests (max_batch_requests)" in batch.errors.data[0].message
        with pytest.raises(APIStatusError, match="max_batch_dir_bytes") as caught:
            upload(client, "x" * 1000)
        assert caught.value.status_code == 413


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="batch_dir="):
        BatchStore(ServerOptions(served_model_name=("demo",), batch_dir=str(tmp_path / "file")))


def test_one_front_end_runs_a_batch(tmp_path: Path) -> None:
    options = ServerOptions(served_model_name=("demo",), batch_dir=str(tmp_path))
    first, second = BatchStore(options), BatchStore(options)
    id = "batch_" + "0" * 32
    first.save({"id": id, "status": "validating", "created_at": 1})
    with first.claimed(id) as mine, second.claimed(id) as theirs:
        assert mine is not None
        assert theirs is None
    with second.claimed(id) as theirs:
        assert theirs is not None


Answer = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


async def run_alone(store: BatchStore, lines: list[dict[str, Any]], answer: Answer, expires_s: float = 60) -> Any:
    """Run a batch with an app of one function, and return its description at the end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, body = await answer(json.loads((await receive())["body"]))
        headers = [(b"x-request-id", b"1"), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    data = "\n".join(map(json.dumps, lines)).encode()
    file = store.add_file(BytesIO(data), len(data), "in.jsonl")
    id = "batch_" + "1" * 32
    batch = {"id": id, "status": "validating", "created_at": 1, "expires_at": time.time() + expires_s}
    counts = {"total": 0, "completed": 0, "failed": 0}
    more = {"endpoint": CHAT, "input_file_id": file["id"], "in_progress_at": None, "completion_window": "24h"}
    store.save({**batch, **more, "request_counts": counts})
    BatchRunner(store, app, api_key=None, num_at_once=2).ensure_started()
    async with asyncio.timeout(PATIENCE_S):
        while store.batch(id)["status"] not in FINAL:
            await asyncio.sleep(0.01)
    return store.batch(id)


@pytest.fixture
def quick_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchStore:
    """A store whose runner polls and pauses for milliseconds."""
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    monkeypatch.setattr(runner, "_PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(runner, "_LONGEST_WAIT_S", 0.01)
    return BatchStore(ServerOptions(served_model_name=("demo",), batch_dir=str(tmp_path)))


def test_requests_without_an_answer_expire_with_the_batch(quick_store: BatchStore) -> None:
    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["max_tokens"] > 4:
            await asyncio.get_running_loop().create_future()
        return 200, {"choices": []}

    lines = [chat("a"), chat("b", max_tokens=5), chat("c", max_tokens=5), chat("d")]
    batch = asyncio.run(run_alone(quick_store, lines, answer, expires_s=0.5))
    assert (batch["status"], batch["expired_at"] > 0) == ("expired", True)
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    (done,) = quick_store.content(batch["output_file_id"]).read_text().splitlines()
    assert json.loads(done)["custom_id"] == "a"
    expired = [json.loads(one) for one in quick_store.content(batch["error_file_id"]).read_text().splitlines()]
    assert [one["custom_id"] for one in expired] == ["b", "c", "d"]
    assert {one["error"]["code"] for one in expired} == {"batch_expired"}
    assert {one["response"] for one in expired} == {None}


def test_a_batch_that_always_stops_fails_with_the_reason(
    quick_store: BatchStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: BatchStore, *_: Any) -> None:
        raise OSError(28, "No space left on device", "/srv/batches/x.output")

    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {}

    monkeypatch.setattr(BatchStore, "add_answer", full)
    batch = asyncio.run(run_alone(quick_store, [chat("a")], answer))
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert "it stopped 3 times" in error["message"]
    assert "No space left on device" in error["message"]
    assert "/srv" not in error["message"]
    assert len([one for one in caplog.records if one.name == runner.__name__]) == 3


def test_a_request_is_sent_again_until_the_server_has_room(quick_store: BatchStore) -> None:
    num_sent = 0

    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal num_sent
        num_sent += 1
        return (429, {}) if num_sent < 4 else (200, {})

    batch = asyncio.run(run_alone(quick_store, [chat("a")], answer))
    assert (batch["status"], num_sent) == ("completed", 4)


def test_answers_count_as_bytes_of_the_folder(tmp_path: Path) -> None:
    store = BatchStore(ServerOptions(served_model_name=("demo",), batch_dir=str(tmp_path), max_batch_dir_bytes=400))
    store.add_answer("batch_" + "0" * 32, "output", {"custom_id": "a" * 380})
    with pytest.raises(ApiError, match="files and answers would have") as caught:
        store.add_file(BytesIO(b"x" * 20), 20, "in.jsonl")
    assert caught.value.status_code == 413


def test_a_batch_whose_file_was_deleted_says_so(quick_store: BatchStore) -> None:
    file = quick_store.add_file(BytesIO(b"{}"), 2, "in.jsonl")
    quick_store.delete_file(file["id"])
    requests, errors = quick_store.requests({"input_file_id": file["id"], "endpoint": CHAT})
    assert (requests, errors[0]["message"]) == ([], f"The file {file['id']!r} was deleted.")


@pytest.mark.parametrize("window", ["24", "0h", "1w", "", "99999d"])
def test_a_window_has_hours_or_days(batch_client: OpenAI, window: Any) -> None:
    with pytest.raises(BadRequestError, match="Allowed: hours or days, such as '24h' or '7d'.") as caught:
        batch_client.batches.create(input_file_id="file-0", endpoint=CHAT, completion_window=window)
    assert caught.value.param == "completion_window"


FORM = {"x_api_key": "secret", "Content_Type": "multipart/form-data; boundary=b"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa9.jsonl"\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "file is missing."),
        (FILE + b"cut off", "file is missing."),
        (FILE + b"x\r\n--b--\r\n", "purpose=None is not available."),
        (FILE + b"x\r\n" + PURPOSE + FILE + b"y\r\n--b--\r\n", "Too many files."),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "The Content-Disposition header field"),
        (b"no form", "Invalid multipart data."),
        (PURPOSE.replace(b"purpose", b"colour") + b"--b--\r\n", "There is no field colour."),
    ],
)
def test_a_body_that_is_no_form_is_refused(batch_server: Served, body: bytes, why: str) -> None:
    reply = batch_server.post("/v1/files", body, **FORM)
    assert reply.status == 400
    assert reply.error["message"].startswith(why)


def test_a_form_has_any_bytes(batch_server: Served, batch_client: OpenAI) -> None:
    data = b"\x00\r\n--bx\r\n\r\n--\n" * 100_000
    file = batch_server.post("/v1/files", FILE + data + b"\r\n" + PURPOSE + b"--b--\r\n", **FORM).json
    assert (file["filename"], file["bytes"]) == ("é.jsonl", len(data))
    assert batch_client.files.content(file["id"]).content == data


def test_the_oldest_ended_batches_are_forgotten(quick_store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.batches.store._MOST_ENDED", 2)
    ids = [f"batch_{number:032x}" for number in range(5)]
    for number, id in enumerate(ids):
        quick_store.save({"id": id, "created_at": number, "status": "in_progress"})
    for id in ids[1:]:
        quick_store.finish({"id": id, "created_at": ids.index(id), "status": "in_progress"}, "cancelled")
    assert [one["id"] for one in quick_store.batches()] == [ids[4], ids[3], ids[0]]
    assert quick_store.unfinished() == [ids[0]]
