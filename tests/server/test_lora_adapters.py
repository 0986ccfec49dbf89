"""LoRA adapters over HTTP: `model` selects one, and administrators load and unload them."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import NotFoundError
from transformers import AutoModelForCausalLM

from penstock import LLM, AsyncEngine, LoRARequest, SamplingParams
from penstock.config import EngineConfig
from penstock.server.served_adapters import ServedAdapters
from support.adapted_models import in_memory
from support.adapters import make_adapters
from support.pooling_models import TINY_ENCODER, random_model, random_text, save
from support.server_process import ServerProcess
from support.servers import Served, serving
from support.waiting import wait_until

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
VARIANTS = [{"r": 4, "target_modules": ["q_proj", "v_proj"]}, {"r": 8, "target_modules": ["down_proj"]}]
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(EngineConfig.create("demo").model.folder, dtype="float32")
    return make_adapters(model, tmp_path_factory.mktemp("adapters"), VARIANTS)


@pytest.fixture(scope="module")
def texts(folders: list[Path]) -> list[str]:
    """Texts without an adapter and with each, by the offline engine."""
    adapters = [None, *(LoRARequest(f"a{number}", number + 1, str(path)) for number, path in enumerate(folders))]
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM("demo", **OPTIONS) as llm:
        outputs = llm.generate(["The king"] * 3, params, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Served]:
    engine = AsyncEngine("demo", **OPTIONS)
    with serving(engine, lora_modules=(f"first={folders[0]}",), enable_admin=True, admin_api_key="boss") as served:
        yield served
    engine.shutdown()


def text_of(server: Served, model: str) -> str:
    answer = server.client().completions.create(model=model, prompt="The king", temperature=0, max_tokens=12)
    assert answer.model == model
    return answer.choices[0].text


def test_the_model_of_a_request_selects_an_adapter(server: Served, texts: list[str]) -> None:
    assert len(set(texts)) == 3
    names = [model.id for model in server.client().models.list()]
    assert names[-1] == "first"
    assert [text_of(server, name) for name in names] == texts[:2]
    assert server.client().models.retrieve("first").model_extra["parent"] == names[0]


def test_an_adapter_is_not_loaded_into_an_engine_that_sleeps(
    server: Served, folders: list[Path], texts: list[str]
) -> None:
    body = {"lora_name": "second", "lora_path": str(folders[1])}
    assert server.post("/sleep", b"", **ADMIN).status == 200
    refused = server.post("/v1/load_lora_adapter", body, **ADMIN)
    assert (refused.status, refused.error["code"]) == (409, "engine_asleep")
    assert "add_lora needs weights in memory" in refused.error["message"]
    assert server.post("/wake_up", b"", **ADMIN).status == 200
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200
    assert text_of(server, "second") == texts[2]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}, **ADMIN).status == 200


def test_administrators_load_and_unload_adapters(server: Served, folders: list[Path], texts: list[str]) -> None:
    body = {"lora_name": "second", "lora_path": str(folders[1])}
    assert server.post("/v1/load_lora_adapter", body).status == 401
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).json == {"loaded": "second"}
    assert text_of(server, "second") == texts[2]
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 400
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}, **ADMIN).json == {"unloaded": "second"}
    with pytest.raises(NotFoundError, match="'second' is not served"):
        text_of(server, "second")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}, **ADMIN).status == 404


def test_an_adapter_is_replaced_by_another_of_its_name(server: Served, folders: list[Path], texts: list[str]) -> None:
    body = {"lora_name": "third", "lora_path": str(folders[0])}
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200
    assert text_of(server, "third") == texts[1]
    body = {"lora_name": "third", "lora_path": str(folders[1]), "load_inplace": True}  # type: ignore[dict-item]
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200
    assert text_of(server, "third") == texts[2]
    assert server.client().models.retrieve("third").model_extra["root"] == str(folders[1])
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "third"}, **ADMIN).status == 200


def test_streams_of_an_unloaded_adapter_go_on(server: Served, folders: list[Path]) -> None:
    body = {"lora_name": "brief", "lora_path": str(folders[1])}
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200
    asked: dict[str, Any] = {"model": "brief", "prompt": "The king", "temperature": 0, "max_tokens": 200}
    client = server.client()
    expected = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    streams = [client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) for _ in range(3)]
    found = [next(stream).choices[0].text for stream in streams]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "brief"}, **ADMIN).status == 200
    with pytest.raises(NotFoundError, match="'brief' is not served"):
        text_of(server, "brief")
    for index, stream in enumerate(streams):
        found[index] += "".join(chunk.choices[0].text for chunk in stream)
    assert found == [expected] * len(streams)


def test_an_adapter_that_the_engine_holds_in_memory_is_served(
    server: Served, folders: list[Path], texts: list[str]
) -> None:
    adapter = in_memory(7, folders[1])
    assert asyncio.run(server.engine.add_lora(adapter))
    assert not asyncio.run(server.engine.add_lora(adapter))
    assert asyncio.run(server.engine.pin_lora(7))
    assert text_of(server, "adapter7") == texts[2]
    assert asyncio.run(server.engine.remove_lora(7))
    assert 7 not in asyncio.run(server.engine.list_loras())
    with pytest.raises(NotFoundError, match="'adapter7' is not served"):
        text_of(server, "adapter7")


def test_a_request_whose_adapter_is_removed_before_the_engine_gets_it_finds_no_model(
    server: Served, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"lora_name": "late", "lora_path": str(folders[1])}
    assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200
    find = ServedAdapters.find

    async def find_and_lose(adapters: ServedAdapters, name: str) -> LoRARequest | None:
        """As where another front end unloads it between the two."""
        found = await find(adapters, name)
        if found is not None:
            await server.engine.remove_lora(found.lora_int_id)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ServedAdapters, "find", find_and_lose)
        for stream in (False, True):
            reply = server.post("/v1/completions", {"model": "late", "prompt": "The king", "stream": stream})
            assert reply.status == 404
            assert reply.error["code"] == "model_not_found"
            assert server.post("/v1/load_lora_adapter", body, **ADMIN).status == 200


@pytest.mark.parametrize("field", ["lora_alpha", "r"])
def test_weights_that_are_not_finite_are_refused_when_they_are_loaded(
    server: Served, folders: list[Path], tmp_path: Path, field: str
) -> None:
    folder = tmp_path / "absurd"
    shutil.copytree(folders[0], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, field: 1e300 if field == "lora_alpha" else 0}))
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "absurd", "lora_path": str(folder)}, **ADMIN)
    assert reply.status == 400
    assert field in reply.error["message"]
    assert "absurd" not in [model.id for model in server.client().models.list()]
    path = "x" * 4_000
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "absurd", "lora_path": path}, **ADMIN)
    assert reply.status == 400
    assert "lora_path=" in reply.error["message"]


def test_an_adapter_that_cannot_be_loaded_is_refused_with_the_reason(server: Served, tmp_path: Path) -> None:
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path)}, **ADMIN)
    assert reply.status == 400
    assert "adapter_config.json" in reply.error["message"]
    assert "bad" not in [model.id for model in server.client().models.list()]


def test_an_adapter_has_another_name_than_the_model(server: Served, folders: list[Path]) -> None:
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "demo", "lora_path": str(folders[0])}, **ADMIN)
    assert reply.status == 400
    assert "'demo' is the model's name" in reply.error["message"]


@pytest.mark.slow
def test_embeddings_have_the_adapter_that_the_model_of_a_request_names(tmp_path: Path) -> None:
    model = random_model("BertModel", "BertConfig", **TINY_ENCODER)
    (folder,) = make_adapters(
        model, tmp_path, [{"r": 4, "target_modules": ["query"], "task_type": "FEATURE_EXTRACTION"}]
    )
    save(model, tmp_path / "model")
    options: dict[str, Any] = {"runner": "pooling", "enable_lora": True, "kv_cache_memory_bytes": "4MiB"}
    text, adapter = random_text(9), LoRARequest("mine", 1, str(folder))
    with LLM(tmp_path / "model", **options) as llm:
        found = llm.embed([text, text], use_tqdm=False, lora_request=[None, adapter])
        expected = [output.outputs.embedding for output in found]
    assert expected[0] != expected[1]
    engine = AsyncEngine(tmp_path / "model", **options)
    with serving(engine, lora_modules=(f"mine={folder}",)) as served:
        for name, embedding in zip(("demo", "mine"), expected, strict=True):
            answer = served.client().embeddings.create(model=name, input=text, encoding_format="float")
            assert answer.data[0].embedding == pytest.approx(embedding)
        with pytest.raises(NotFoundError):
            served.client().embeddings.create(model="other", input=text)


@pytest.mark.slow
def test_all_front_ends_serve_the_same_adapters(tmp_path: Path, folders: list[Path], texts: list[str]) -> None:
    first = json.dumps({"name": "first", "path": str(folders[0]), "base_model_name": "a-base"})
    options = ["--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--enable-lora", "--max-loras", "2"]
    options += ["--max-cpu-loras", "3", "--lora-modules", first, "--enable-admin", "--admin-api-key", "boss"]
    server = ServerProcess(tmp_path / "log", *options, "--api-server-count", "2")
    try:
        server.wait_until_ready()
        # Each new connection may reach either front end.
        every = range(8)
        assert {answer_of(server, "first") for _ in every} == {texts[1]}
        post(server, "load", lora_name="second", lora_path=str(folders[1]))
        assert {answer_of(server, "second") for _ in every} == {texts[2]}
        server.processes("core")[0].kill()
        assert {answer_of(server, "second") for _ in every} == {texts[2]}
        with server.client() as client:
            parents = {model.id: model.model_extra["parent"] for model in client.models.list()}  # type: ignore[index]
        assert parents == {"demo": None, "first": "a-base", "second": "demo"}
        post(server, "unload", lora_name="first")
        post(server, "unload", lora_name="second")
        for name in ("first", "second") * 4:
            with pytest.raises(NotFoundError):
                answer_of(server, name)
        server.processes("front-end")[0].kill()
        wait_until(lambda: len(server.processes("front-end")) == 2)
        for _ in every:
            with pytest.raises(NotFoundError):
                answer_of(server, "first")
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_keep_their_adapter_when_front_ends_return_to_a_new_broker_in_any_order(
    tmp_path: Path, folders: list[Path]
) -> None:
    options = ["--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--enable-lora", "--max-loras", "2"]
    options += ["--max-cpu-loras", "3", "--enable-admin", "--admin-api-key", "boss", "--threads", "1"]
    server = ServerProcess(tmp_path / "log", *options, "--api-server-count", "2")
    body = {"prompt": "The king", "temperature": 0, "max_tokens": 400, "stream": True, "ignore_eos": True}
    number = 6
    try:
        server.wait_until_ready()
        first, second = server.processes("front-end")
        for returns_last in (first, second):
            with suspended(second):
                post(server, "load", lora_name="x", lora_path=str(folders[0]))
            with suspended(first):
                post(server, "unload", lora_name="x")
                post(server, "load", lora_name="k", lora_path=str(folders[1]))
                expected = "".join(chunks(server, {**body, "model": "k"}))
                streams = [chunks(server, {**body, "model": "k"}) for _ in range(number)]
                found = [next(stream) for stream in streams]
            with suspended(returns_last):
                server.processes("broker")[0].kill()
                wait_until(lambda: "k" in names(server))
            assert names(server) == ["demo", "k"]
            assert [text + "".join(rest) for text, rest in zip(found, streams, strict=True)] == [expected] * number
            for _ in range(8):
                with pytest.raises(NotFoundError):
                    answer_of(server, "x")
            post(server, "unload", lora_name="k")
    finally:
        server.close()


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Let other front ends serve new connections."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def chunks(server: ServerProcess, body: dict[str, Any]) -> Iterator[str]:
    """Texts of a stream's events, over a new connection."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def names(server: ServerProcess) -> list[str]:
    """Names of the served models that a new connection gets."""
    with server.client() as client:
        return [model.id for model in client.models.list()]


def answer_of(server: ServerProcess, model: str) -> str:
    """Text that a new connection gets."""
    with server.client() as client:
        answer = client.completions.create(model=model, prompt="The king", temperature=0, max_tokens=12)
    return answer.choices[0].text


def post(server: ServerProcess, what: str, **body: str) -> None:
    request = urllib.request.Request(
        f"{server.url}/v1/{what}_lora_adapter",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **ADMIN},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
