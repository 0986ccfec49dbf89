"""Images in requests of all APIs: one prompt with the image's tokens, and named errors for what cannot be read."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import InvalidRequest
from support.multimodal_models import picture, save_multimodal, words
from support.servers import Served, serving

TEMPLATE = (
    "{% for m in messages %}w1 {% if m.content is string %}{{ m.content }} {% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<vision_start> <image> <vision_end> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "kv_cache_memory_bytes": "8MiB",
    "limit_mm_per_prompt": {"image": 2},
}
TEXT = words(7, 8)
IMAGES = [picture(40, 24, 1), picture(16, 48, 2)]


def png(number: int) -> bytes:
    file = io.BytesIO()
    IMAGES[number].save(file, "PNG")
    return file.getvalue()


DATA = [base64.b64encode(png(number)).decode() for number in range(2)]
URLS = [f"data:image/png;base64,{data}" for data in DATA]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_multimodal(folder, "qwen2.5-vl")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = EngineConfig.create(str(folder), allowed_local_media_path=str(folder), **OPTIONS)
    (folder / "picture.png").write_bytes(png(0))
    with serving(AsyncEngine.from_config(config), served_model_name=("seeing",)) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[str, int]:
    """Answer and number of the prompt's tokens of the two images and a text."""
    prompt: Any = {
        "prompt": f"w1 {' '.join(['<vision_start> <image> <vision_end>'] * 2)} {TEXT} w2",
        "multi_modal_data": {"image": IMAGES},
    }
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
    assert output.prompt_token_ids is not None
    assert len(output.prompt_token_ids) > 20
    return output.outputs[0].text, len(output.prompt_token_ids)


@pytest.fixture
def encoding(folder: Path, tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    """Server that encodes, and one that answers."""
    transfer = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": tmp_path}}
    with ExitStack() as stack:
        engines = [
            AsyncEngine(str(folder), ec_transfer_config={**transfer, "ec_role": role}, **OPTIONS)
            for role in ("ec_producer", "ec_consumer")
        ]
        first, second = (stack.enter_context(serving(one, served_model_name=("seeing",))) for one in engines)
        yield first, second


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": "seeing",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 5,
    } | fields


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


BOTH = [image(url) for url in URLS]


def test_chat_completions_count_the_tokens_of_images(client: OpenAI, expected: tuple[str, int]) -> None:
    for detail in ("auto", "low", "high"):
        content: Any = [*(image(url, detail=detail) for url in URLS), {"type": "text", "text": TEXT}]
        answer = client.chat.completions.create(
            model="seeing", messages=[{"role": "user", "content": content}], temperature=0, max_completion_tokens=5
        )
        assert answer.usage is not None
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected


def test_streams_count_them_too(client: OpenAI, expected: tuple[str, int]) -> None:
    chunks = list(
        client.chat.completions.create(**chat(*BOTH, TEXT, stream=True, stream_options={"include_usage": True}))
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert (text, chunks[-1].usage.prompt_tokens) == expected


def test_responses_and_messages_and_ollama_have_the_same_prompt(
    server: Served, client: OpenAI, expected: tuple[str, int]
) -> None:
    text, num_tokens = expected
    parts = [*({"type": "input_image", "image_url": url} for url in URLS), {"type": "input_text", "text": TEXT}]
    response = client.responses.create(
        model="seeing",
        input=[{"role": "user", "content": parts}],
        temperature=0,
        max_output_tokens=5,  # type: ignore[arg-type, list-item, typeddict-item]
    )
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == expected
    sources = [{"type": "base64", "media_type": "image/png", "data": DATA[0]}, {"type": "url", "url": URLS[1]}]
    blocks = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": TEXT}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": blocks}]}
    reply = server.post("/v1/messages", {**body, "max_tokens": 5, "temperature": 0}).json
    assert reply["content"] == [{"type": "text", "text": text}]
    usage = reply["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    assert server.post("/v1/messages/count_tokens", body).json == {"input_tokens": num_tokens}
    options = {"temperature": 0, "num_predict": 5}
    of_ollama = {"model": "seeing", "messages": [{"role": "user", "content": TEXT, "images": DATA}], "options": options}
    reply = server.post("/api/chat", {**of_ollama, "stream": False}).json
    assert (reply["message"]["content"], reply["prompt_eval_count"]) == expected
    generate = {"model": "seeing", "prompt": TEXT, "images": DATA, "options": options, "stream": False}
    assert server.post("/api/generate", generate).json["response"] == text


def test_a_continued_response_keeps_its_images(client: OpenAI) -> None:
    parts: Any = [{"type": "input_image", "image_url": URLS[0]}, {"type": "input_text", "text": TEXT}]
    first = client.responses.create(model="seeing", input=[{"role": "user", "content": parts}], max_output_tokens=3)
    second = client.responses.create(model="seeing", input=TEXT, previous_response_id=first.id, max_output_tokens=3)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_tokenize_expands_images(server: Served, expected: tuple[str, int]) -> None:
    messages = chat(*BOTH, TEXT)["messages"]
    assert server.post("/tokenize", {"model": "seeing", "messages": messages}).json["count"] == expected[1]


def test_files_of_the_allowed_folder_are_read(server: Served, folder: Path) -> None:
    inline = server.post("/v1/chat/completions", chat(image(URLS[0]), TEXT)).json
    for url in (f"file://{folder}/picture.png", "picture.png"):
        reply = server.post("/v1/chat/completions", chat(image(url), TEXT)).json
        assert reply["choices"] == inline["choices"]


def test_a_text_beside_them_is_answered(client: OpenAI) -> None:
    assert client.chat.completions.create(**chat(TEXT)).usage.prompt_tokens == 4


def test_the_model_says_what_it_takes(server: Served) -> None:
    assert server.request("GET", "/v1/models").json["data"][0]["modalities"] == ["text", "image", "video"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([image("data:image/png;base64,aGk=")], "messages[0].content[0]: It is not an image that can be read."),
        ([TEXT, image("data:image/png;base64,a")], "messages[0].content[1]: 'data:image/png;base64' has data that"),
        ([image("file:///etc/passwd")], "is not in the folder that is allowed (allowed_local_media_path)"),
        ([image("http://127.0.0.1:1/a.png")], "has an address that is not public"),
        ([image("http://169.254.169.254/latest")], "has an address that is not public"),
        ([*BOTH, image(URLS[0])], "The prompt has 3 items of image. Allowed: 2 (limit_mm_per_prompt)"),
        ([image(URLS[0], detail="tiny")], "detail='tiny' is not valid. Allowed: auto, low, high"),
        ([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}], "is audio, which this"),
        ([{"type": "image_embeds", "image_embeds": "aGk="}], "image_embeds"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_an_error_of_its_request(server: Served, content: list[Any], said: str) -> None:
    reply = server.post("/v1/chat/completions", chat(*content))
    assert reply.status == 400, reply.body
    assert said in reply.error["message"]
    assert server.post("/v1/chat/completions", chat(image(URLS[0]), TEXT)).status == 200


def test_a_typed_placeholder_is_text(server: Served, client: OpenAI) -> None:
    typed = "<vision_start> <image> <vision_end>"
    plain = server.post("/v1/chat/completions", chat(image(URLS[0]), TEXT)).json["usage"]["prompt_tokens"]
    for content in ([image(URLS[0]), TEXT, typed], [typed, image(URLS[0]), TEXT]):
        reply = server.post("/v1/chat/completions", chat(*content))
        assert reply.status == 200, reply.body
        # The tokens of the words of the text, and no other image.
        assert reply.json["usage"]["prompt_tokens"] == plain + 3
    # Without an image the token is one like others.
    assert client.chat.completions.create(**chat(typed)).usage.prompt_tokens == 5


def test_processed_images_are_counted(server: Served) -> None:
    before = server.engine.request_totals()
    for _ in range(2):
        assert server.post("/v1/chat/completions", chat(*BOTH, words(11, 12))).status == 200
    after = server.engine.request_totals()
    assert after.num_media_queries - before.num_media_queries == 4
    assert after.num_media_hits - before.num_media_hits >= 2


def test_base64_may_have_line_breaks(server: Served, expected: tuple[str, int]) -> None:
    lines = "\r\n".join(re.findall(".{1,76}", DATA[0]))
    urls = [f"data:image/png;base64, {lines}\n", URLS[1]]
    reply = server.post("/v1/chat/completions", chat(*map(image, urls), TEXT)).json
    assert reply["choices"][0]["message"]["content"] == expected[0]


def test_errors_name_the_clients_field(server: Served) -> None:
    wrong = "data:image/png;base64,aGk="
    parts = [{"type": "input_text", "text": TEXT}, {"type": "input_image", "image_url": wrong}]
    reply = server.post("/v1/responses", {"model": "seeing", "input": [{"role": "user", "content": parts}]})
    assert (reply.status, reply.error["param"]) == (400, "input[0].content[1]")
    blocks = [{"type": "image", "source": {"type": "url", "url": wrong}}]
    body = {"model": "seeing", "max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    assert "messages[0].content[0]: It is not an image" in server.post("/v1/messages", body).json["error"]["message"]


def test_the_limit_of_a_texts_length_counts_no_tokens_of_images(folder: Path) -> None:
    prompt: Any = {"prompt": f"<vision_start> <image> <vision_end> {TEXT}", "multi_modal_data": {"image": IMAGES[0]}}
    params = SamplingParams(max_tokens=1, temperature=0)
    with LLM(str(folder), **OPTIONS, max_prompt_characters=60) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids is not None
        assert len(output.prompt_token_ids) * len("<image>") > 60
        with pytest.raises(InvalidRequest, match="max_prompt_characters"):
            llm.generate({**prompt, "prompt": prompt["prompt"] + TEXT * 5}, params, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is not for prompts with media"):
            llm.generate(prompt, params.with_fields(truncate_prompt_tokens=5), use_tqdm=False)


def test_an_image_of_low_detail_is_one_tile_of_models_that_cut_images(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "smolvlm")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("<vision_start> <image> <vision_end>", "<image>"))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        sizes = {}
        for detail in ("low", "high", "auto"):
            content = [image(URLS[0], detail=detail), {"type": "text", "text": TEXT}]
            messages: Any = [{"role": "user", "content": content}]
            (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
            sizes[detail] = len(output.prompt_token_ids or ())
    assert sizes["low"] < sizes["high"] == sizes["auto"]


def test_caches_of_media_are_reset(folder: Path) -> None:
    """What is asked again is processed and encoded again, and answered equally."""
    prompt: Any = {"prompt": f"<vision_start> <image> <vision_end> {TEXT}", "multi_modal_data": {"image": IMAGES[0]}}
    params = SamplingParams(max_tokens=5, temperature=0)
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as llm:
        outputs, encoded = [], []
        for reset in (lambda: None, lambda: None, llm.reset_mm_cache, llm.reset_encoder_cache):
            reset()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            outputs.append(output.outputs[0].token_ids)
            (stats,) = llm.collective_rpc("get_encoder_timing_stats")
            encoded.append(stats["num_items"])
    assert outputs == outputs[:1] * 4
    assert encoded == [1, 1, 1, 2]


@pytest.mark.slow
def test_one_server_encodes_for_another(
    encoding: tuple[Served, Served], expected: tuple[str, int], tmp_path: Path
) -> None:
    """The requests of vLLM's proxy: for one token to the server that encodes, then as it is to the other one."""
    producer, consumer = encoding
    for asked in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "temperature": 1}):
        reply = producer.post("/v1/chat/completions", chat(*BOTH, TEXT, max_tokens=1, stream=False, **asked))
        assert reply.status == 200, reply.body
        assert {(one["message"]["content"], one["finish_reason"]) for one in reply.json["choices"]} == {("", "length")}
        assert reply.json["usage"]["completion_tokens"] == 0
    answer = consumer.post("/v1/chat/completions", chat(*BOTH, TEXT))
    assert answer.json["choices"][0]["message"]["content"] == expected[0]
    streamed = producer.post("/v1/chat/completions", chat(*BOTH, TEXT, max_tokens=1, stream=True))
    assert b'"finish_reason":"length"' in streamed.body
    assert len([path for path in tmp_path.rglob("*-0") if path.is_file()]) == 2
