"""Stored responses: chains of them, their routes, their limits, and front ends that share them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from penstock.server.options import ServerOptions
from penstock.server.responses.store import ResponseStore, StoredResponse
from support.chat_templates import TOOL_TEMPLATE
from support.servers import serving

TOOLS: Any = [
    {
        "type": "function",
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    }
]


def respond(client: OpenAI, input: Any, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": "demo", "input": input, "max_output_tokens": 60, "temperature": 0, **fields}
    )


def test_a_response_goes_on_with_an_earlier_one(client: OpenAI) -> None:
    first = respond(client, "Hello", instructions="Be loud.")
    second = respond(client, "Who are you?", instructions="Be brief.", previous_response_id=first.id)
    expected = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Who are you?"},
        ],
        temperature=0,
        max_tokens=60,
    )
    assert second.output_text == expected.choices[0].message.content
    assert second.usage.input_tokens == expected.usage.prompt_tokens
    assert second.previous_response_id == first.id


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_keeps_calls_and_their_results(client: OpenAI, stream: bool) -> None:
    fields: Any = {"tools": TOOLS, "extra_body": {"chat_template": TOOL_TEMPLATE}}
    first: Any = respond(client, "Count", tool_choice="required", parallel_tool_calls=False, stream=stream, **fields)
    if stream:
        first = list(first)[-1].response
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = respond(client, [result], previous_response_id=first.id, tool_choice="none", **fields)
    third = respond(client, "And now?", previous_response_id=second.id, tool_choice="none", **fields)
    function = {"name": "count", "arguments": call.arguments}
    messages: Any = [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    chat: Any = {"model": "demo", "temperature": 0, "max_tokens": 60, "extra_body": {"chat_template": TOOL_TEMPLATE}}
    expected = client.chat.completions.create(messages=messages, **chat)
    assert second.output_text == expected.choices[0].message.content
    messages += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "And now?"}]
    expected = client.chat.completions.create(messages=messages, **chat)
    assert third.output_text == expected.choices[0].message.content
    assert third.usage.input_tokens == expected.usage.prompt_tokens


def test_a_call_that_was_cut_off_is_left_out_of_the_chain(client: OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "extra_body": {"chat_template": TOOL_TEMPLATE}}
    first = respond(client, "Count", tool_choice="required", max_output_tokens=14, **fields)
    assert [item.status for item in first.output] == ["incomplete"]
    second = respond(client, "Go on", previous_response_id=first.id, tool_choice="none", **fields)
    expected = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count"}, {"role": "user", "content": "Go on"}],
        temperature=0,
        max_tokens=60,
        extra_body={"chat_template": TOOL_TEMPLATE},
    )
    assert second.output_text == expected.choices[0].message.content


def test_a_response_can_be_read_again(client: OpenAI) -> None:
    response = respond(client, "Hello")
    assert client.responses.retrieve(response.id) == response
    events = list(respond(client, "Hello", stream=True))
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response


def test_a_deleted_response_is_gone_and_its_successors_stay(client: OpenAI) -> None:
    first = respond(client, "Hello")
    second = respond(client, "And?", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(NotFoundError):
        client.responses.delete(first.id)
    assert respond(client, "So?", previous_response_id=second.id).status == "completed"


def test_input_items_have_the_conversation_in_pages(client: OpenAI) -> None:
    first = respond(client, "Hello")
    second = respond(client, [{"role": "user", "content": "And?"}], previous_response_id=first.id)
    items: Any = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    texts = [item.content[0].text for item in items]
    assert texts == ["Hello", first.output_text, "And?"]
    newest: Any = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in newest.data] == [items[2].id, items[1].id]
    assert newest.has_more
    with pytest.raises(BadRequestError, match="after"):
        client.responses.input_items.list(second.id, after="msg_none")


@pytest.mark.parametrize("id", ["resp_none", "resp_" + "0" * 32])
def test_an_unknown_response_is_not_found(client: OpenAI, id: str) -> None:
    with pytest.raises(NotFoundError):
        client.responses.retrieve(id)
    with pytest.raises(NotFoundError) as caught:
        respond(client, "x", previous_response_id=id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")


def test_a_response_that_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    response = respond(client, "Hello", store=False)
    with pytest.raises(NotFoundError, match="store=false"):
        client.responses.retrieve(response.id)


def test_a_response_that_has_ended_cannot_be_cancelled(client: OpenAI) -> None:
    response = respond(client, "Hello")
    with pytest.raises(BadRequestError, match="has ended"):
        client.responses.cancel(response.id)
    with pytest.raises(NotFoundError):
        client.responses.cancel("resp_" + "0" * 32)


def test_front_ends_with_one_folder_find_each_others_responses(client: OpenAI, tmp_path: Path) -> None:
    options: Any = {"response_store_dir": str(tmp_path / "new" / "folder")}
    engines = [AsyncEngine("demo", enable_multiprocessing=False, **DEMO) for _ in range(2)]
    with serving(engines[0], **options) as one, serving(engines[1], **options) as other:
        first = respond(one.client(), "Hello")
        second = respond(other.client(), "Who are you?", previous_response_id=first.id)
        assert one.client().responses.retrieve(second.id) == second
    own = respond(client, "Hello")
    assert respond(client, "Who are you?", previous_response_id=own.id).output_text == second.output_text


def test_a_stored_response_is_not_streamed(client: OpenAI) -> None:
    response = respond(client, "Hello")
    with pytest.raises(BadRequestError, match="stream"):
        client.responses.retrieve(response.id, stream=True)


def test_an_answer_that_cannot_be_stored_is_given_all_the_same(tmp_path: Path, caplog: Any) -> None:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    with serving(engine, response_store_dir=str(tmp_path / "folder")) as server:
        (tmp_path / "folder").rmdir()
        response = respond(server.client(), "Hello")
        assert (response.status, response.store) == ("completed", False)
        assert f"The response {response.id} is not stored" in caplog.text
        with pytest.raises(NotFoundError):
            server.client().responses.retrieve(response.id)


def stored_ids(store: ResponseStore, *numbers: int) -> list[int]:
    return [number for number in numbers if store.get(id_of(number)) is not None]


def store_in(folder: Path, **limits: int) -> ResponseStore:
    return ResponseStore(ServerOptions(served_model_name=("demo",), response_store_dir=str(folder), **limits))


def id_of(number: int) -> str:
    return f"resp_{number:032x}"


def put(store: ResponseStore, folder: Path, number: int, text: str = "") -> None:
    store.put(StoredResponse({"id": id_of(number), "output": []}, [{"text": text}]))
    if (path := folder / f"{id_of(number)}.json").exists():
        os.utime(path, ns=(number, number))


def test_the_responses_unused_for_longest_are_dropped(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_stored_responses=2)
    (tmp_path / "other.json").write_text("{}")
    for number in (1, 2):
        put(store, tmp_path, number)
    assert stored_ids(store, 1) == [1]
    put(store, tmp_path, 3)
    assert stored_ids(store, 1, 2, 3) == [1, 3]
    assert (tmp_path / "other.json").exists()


def test_the_bytes_of_responses_are_bounded(tmp_path: Path) -> None:
    limit = 1000
    store = store_in(tmp_path, max_stored_response_bytes=limit)
    for number in range(1, 9):
        put(store, tmp_path, number, "x" * 200)
    kept = stored_ids(store, *range(1, 9))
    assert kept == [6, 7, 8]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    put(store, tmp_path, 9, "x" * limit)
    assert stored_ids(store, *range(1, 10)) == kept


def test_stores_of_one_folder_keep_its_limit_at_once(tmp_path: Path) -> None:
    stores = [store_in(tmp_path, max_stored_responses=5) for _ in range(4)]

    def fill(number: int) -> None:
        store = stores[number % 4]
        store.put(StoredResponse({"id": id_of(number), "output": []}, []))
        store.get(id_of(number - 1))
        store.delete(id_of(number - 3))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fill, range(3, 200)))
    stores[0].put(StoredResponse({"id": id_of(200), "output": []}, []))
    assert 1 <= len(list(tmp_path.iterdir())) <= 5
    assert stores[1].get(id_of(200)) is not None


def test_files_of_a_killed_front_end_are_deleted_once_they_are_old(tmp_path: Path) -> None:
    old, new = tmp_path / "resp_a.part", tmp_path / "resp_b.part"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (1, 1))
    store_in(tmp_path).put(StoredResponse({"id": id_of(1), "output": []}, []))
    assert not old.exists()
    assert new.exists()


def test_a_store_of_no_responses_keeps_none(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_stored_responses=0)
    put(store, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("id", ["", "..", "../x", "resp_", "/etc/hostname", "resp_" + "0" * 31 + "/"])
def test_an_id_is_no_path(tmp_path: Path, id: str) -> None:
    store = store_in(tmp_path)
    assert store.get(id) is None
    assert not store.delete(id)


def test_a_stored_response_is_json_that_only_its_user_reads(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(StoredResponse({"id": id_of(1), "output": []}, []))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["body"]["id"] == id_of(1)
    assert path.stat().st_mode & 0o077 == 0


def test_a_response_ends_once_and_not_after_it_was_deleted(tmp_path: Path) -> None:
    stores = [store_in(tmp_path) for _ in range(2)]

    def response(number: int, status: str) -> StoredResponse:
        return StoredResponse({"id": id_of(number), "output": [], "status": status}, [])

    for store in stores:
        store.put(response(1, "in_progress"))
    ended = [store.end(response(1, status)) for store, status in zip(stores, ("cancelled", "completed"), strict=True)]
    assert [one.body["status"] for one in ended if one is not None] == ["cancelled", "cancelled"]

    def end(number: int) -> None:
        stores[number % 2].end(response(number // 2, "completed"))

    numbers = range(1, 101)
    for number in numbers:
        stores[0].put(response(number, "in_progress"))
    with ThreadPoolExecutor(8) as threads:
        ends = [threads.submit(end, number) for one in numbers for number in (2 * one, 2 * one + 1)]
        deleted = list(threads.map(stores[1].delete, [id_of(number) for number in numbers]))
        _ = [one.result() for one in ends]
    assert all(deleted)
    assert list(tmp_path.iterdir()) == []
