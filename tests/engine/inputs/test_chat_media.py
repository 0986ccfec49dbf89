"""Images, audio and video in conversations: templates get a part for each, and the prompt has the items in order."""

from __future__ import annotations

import asyncio
import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from penstock.engine.inputs import media_intake
from penstock.engine.inputs.conversation import render_prompt
from penstock.engine.inputs.media_intake import MediaIntake
from penstock.errors import ChatTemplateError, InvalidMedia, InvalidRequest, UnsupportedParameter
from penstock.media.loader import MediaLoader
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import write_model

MARKERS = {"image": "<image>", "audio": "<audio>", "video": "<video>"}
# Loops over parts, as templates of Qwen-VL, SmolVLM, Gemma 3 and LLaVA do.
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image_url' in part %}[image]"
    "{% elif part.type == 'audio' %}[audio]{% elif part.type == 'video' %}[video]"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
FIRST_IMAGES = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %};{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
PIXELS = np.zeros((4, 4, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_model(tmp_path_factory.mktemp("model"), longest_context=512)
    (folder / "chat_template.jinja").write_text(PARTS)
    return with_markers(load_tokenizer(folder))


def with_markers(tokenizer: Tokenizer, markers: dict[str, str] = MARKERS) -> Tokenizer:
    tokenizer.media_markers = {modality: partial(tuple, [marker]) for modality, marker in markers.items()}
    return tokenizer


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def url(place: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": place, **more}}


CHAT = [
    {"role": "system", "content": "Look."},
    user("What is ", url("a"), " and ", {"type": "video_url", "video_url": {"url": "v"}}, url("b", detail="low"), "?"),
    {"role": "assistant", "content": "A cat."},
    user({"type": "audio_url", "audio_url": {"url": "s"}}, url("c")),
]


@pytest.mark.parametrize("template", [PARTS, FIRST_IMAGES])
def test_the_prompt_is_what_transformers_renders_of_parts(tokenizer: Tokenizer, template: str) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(tokenizer.folder))
    kinds = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
    plain: list[dict[str, Any]] = json.loads(json.dumps(CHAT))
    for message in plain:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        message["content"] = [p if p["type"] == "text" else {"type": kinds[p["type"]]} for p in parts]
    prompt = render_prompt(tokenizer, CHAT, chat_template=template)
    assert prompt["prompt"] == oracle.apply_chat_template(plain, chat_template=template, tokenize=False)


def test_items_are_in_order_with_their_place_and_detail(tokenizer: Tokenizer) -> None:
    prompt: Any = render_prompt(tokenizer, CHAT)
    data = prompt["multi_modal_data"]
    images = [(item.given, item.name, item.detail) for item in data["image"]]
    assert images == [
        ("a", "messages[1].content[1]", None),
        ("b", "messages[1].content[4]", "low"),
        ("c", "messages[3].content[1]", None),
    ]
    assert [item.given for item in data["audio"] + data["video"]] == ["s", "v"]
    assert "multi_modal_uuids" not in prompt


def test_a_conversation_of_text_has_no_media(tokenizer: Tokenizer) -> None:
    assert render_prompt(tokenizer, [user("hi")]).keys() == {"prompt"}


def test_a_template_of_texts_gets_markers_in_their_place(tokenizer: Tokenizer) -> None:
    prompt = render_prompt(tokenizer, [user("See", url("a"), "now")], chat_template=TEXTS)
    assert prompt["prompt"] == "user: See\n<image>\nnow;"


class Part(BaseModel):
    type: str = "image_url"
    image_url: dict[str, str] = {"url": "a"}


class Message(BaseModel):
    role: str = "user"
    content: list[Part] = [Part()]


@pytest.mark.parametrize(
    ("part", "modality", "given"),
    [
        (url("https://a.example/b.png"), "image", "https://a.example/b.png"),
        ({"type": "image_url", "image_url": "a"}, "image", "a"),
        ({"type": "input_image", "image_url": "a", "detail": "high"}, "image", "a"),
        ({"type": "image", "image": "a"}, "image", "a"),
        ({"type": "image", "url": "a"}, "image", "a"),
        ({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}, "audio",
         "data:audio/wav;base64,aGk="),
        ({"type": "audio_url", "audio_url": {"url": "a"}}, "audio", "a"),
        ({"type": "audio", "audio": "a"}, "audio", "a"),
        ({"type": "video_url", "video_url": {"url": "a"}}, "video", "a"),
        ({"type": "video", "video": "a"}, "video", "a"),
    ],
)  # fmt: skip
def test_parts_of_all_usual_forms_are_read(tokenizer: Tokenizer, part: Any, modality: str, given: str) -> None:
    prompt: Any = render_prompt(tokenizer, [user(part)])
    assert prompt["prompt"] == f"user: [{modality}];"
    ((found, (item,)),) = prompt["multi_modal_data"].items()
    assert (found, item.given, item.name) == (modality, given, "messages[0].content[0]")


def test_objects_of_the_program_and_of_a_client_are_parts(tokenizer: Tokenizer) -> None:
    objects = [{"type": "image_pil", "image_pil": PICTURE}, {"type": "image", "image": PIXELS}]
    prompt: Any = render_prompt(tokenizer, [user(*objects), Message()])
    given = [item.given for item in prompt["multi_modal_data"]["image"]]
    assert given[0] is PICTURE
    assert given[1] is PIXELS
    assert given[2] == "a"


def test_uuids_name_items(tokenizer: Tokenizer) -> None:
    prompt: Any = render_prompt(tokenizer, [user({**url("a"), "uuid": "x"}, url("b"))])
    assert prompt["multi_modal_uuids"] == {"image": ["x", None]}
    with pytest.raises(InvalidRequest, match=r"content\[0\].uuid=7 is not valid"):
        render_prompt(tokenizer, [user({**url("a"), "uuid": 7})])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": 7},
        {"type": "image_url", "image_url": None}, {"type": "image"}, {"type": "image", "image": {}},
        {"type": "image", "marker": "<image>"}, {"type": "input_audio", "input_audio": {"data": "aGk="}},
        {"type": "input_audio", "input_audio": "aGk="}, {"type": "video_url", "video_url": []},
        {"type": "foo", "marker": "<image>"}, {"type": "image_embeds"}, 7, {"type": ["image"]},
    ],
)  # fmt: skip
def test_a_part_without_content_is_refused_with_its_place(tokenizer: Tokenizer, part: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content\[1\] "):
        render_prompt(tokenizer, [user("a", part)])


@pytest.mark.parametrize(("markers", "taken"), [({}, "text"), ({"audio": "x"}, "text, audio")])
def test_media_that_the_model_does_not_take_are_refused(
    tokenizer: Tokenizer, markers: dict[str, str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "media_markers", dict.fromkeys(markers, lambda: ("",)))
    said = rf"messages\[0\]\.content\[0\] of type 'image_url' is an image, .*Allowed: {taken}\.$"
    with pytest.raises(UnsupportedParameter, match=said):
        render_prompt(tokenizer, [user(url("a"))])


def test_a_message_that_ends_with_an_image_cannot_be_continued(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="last message"):
        render_prompt(tokenizer, [user(url("a"))], add_generation_prompt=False, continue_final_message=True)


def test_a_processors_template_in_its_own_file_is_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path, longest_context=512)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    prompt = render_prompt(with_markers(load_tokenizer(folder)), [user("a", url("b"))])
    assert prompt["prompt"] == "user: a[image];"


def intake(**limits: int) -> MediaIntake:
    return MediaIntake(MediaLoader(), limits or {"image": 3, "audio": 2, "video": 2})


def counts(prompt: Any) -> dict[str, int]:
    return {modality: len(items) for modality, items in prompt["multi_modal_data"].items()}


FRAMES = np.stack([PIXELS, PIXELS])
SAMPLES = np.zeros(100, np.float32)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"image": PICTURE}, {"image": 1}), ({"image": [PICTURE, PIXELS]}, {"image": 2}),
        ({"image": PIXELS}, {"image": 1}),
        ({"image": np.stack([PIXELS] * 3)}, {"image": 3}), ({"image": (PICTURE, PICTURE)}, {"image": 2}),
        ({"audio": (SAMPLES, 16_000)}, {"audio": 1}), ({"audio": SAMPLES}, {"audio": 1}),
        ({"audio": [(SAMPLES, 16_000), SAMPLES]}, {"audio": 2}), ({"audio": [0.0, 0.5]}, {"audio": 1}),
        ({"video": FRAMES}, {"video": 1}), ({"video": [FRAMES, FRAMES]}, {"video": 2}),
        ({"video": [PICTURE, PICTURE]}, {"video": 1}), ({"video": (FRAMES, {"fps": 2.0})}, {"video": 1}),
        ({"video": [[PICTURE], [PICTURE]]}, {"video": 2}), ({"image": PICTURE, "audio": None}, {"image": 1}),
    ],
)  # fmt: skip
def test_one_item_or_several_are_told_apart(data: Any, expected: dict[str, int]) -> None:
    prompt: Any = {"prompt": "x", "multi_modal_data": data}
    assert counts(intake().load(prompt)) == counts(asyncio.run(intake().load_async(prompt))) == expected


def test_one_name_of_one_item_is_a_list_of_names() -> None:
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": {"image": "abc"}}
    loaded: Any = intake().load(prompt)
    assert loaded["multi_modal_uuids"] == {"image": ["abc"]}


def test_a_prompt_without_media_is_returned_as_it_is() -> None:
    for prompt in ("text", [1, 2], {"prompt": "x"}, {"prompt": "x", "multi_modal_data": None}):
        given: Any = prompt
        assert intake().load(given) is given


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_modal_data": {"image": [PICTURE] * 4}}, r"4 items of image. Allowed: 3 \(limit_mm_per_prompt\)"),
        ({"multi_modal_data": {"images": PICTURE}}, "'images', which this model does not take. Allowed: text, image"),
        ({"multi_modal_data": [PICTURE]}, "multi_modal_data=.* Allowed: a dictionary"),
        ({"multi_modal_data": {"image": [PICTURE, 7]}}, r"^multi_modal_data\.image\[1\]: It is 7"),
        ({"multi_modal_data": {"image": "/etc/hosts"}}, r"^multi_modal_data\.image\[0\]: '/etc/hosts' names a file"),
        ({"multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": {"image": ["a", "b"]}}, "multi_modal_uuids"),
        ({"multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": {"image": [7]}}, "multi_modal_uuids"),
        ({"multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": "a"}, "multi_modal_uuids"),
    ],
)  # fmt: skip
def test_wrong_media_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    prompt: Any = {"prompt": "x", **fields}
    with pytest.raises(InvalidRequest, match=said):
        intake().load(prompt)
    with pytest.raises(InvalidRequest, match=said):
        asyncio.run(intake().load_async(prompt))


def test_too_many_items_are_refused_before_any_is_loaded() -> None:
    class Forbidden(MediaLoader):
        def load(self, *args: Any, **kwargs: Any) -> Any:
            pytest.fail("loaded")

    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": ["data:,"] * 3}}
    with pytest.raises(InvalidRequest, match="Allowed: 2"):
        MediaIntake(Forbidden(), {"image": 2}).load(prompt)


def test_the_media_of_a_prompt_share_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image alone is allowed; a small file may be a large image."""
    monkeypatch.setattr(media_intake, "_MAX_BYTES", 10_000)
    monkeypatch.setattr(media_intake, "_NUM_THREADS", 1)
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": [Image.new("RGB", (50, 50))] * 3}}
    with pytest.raises(InvalidMedia, match=r"^multi_modal_data.image\[2\]: the media before it have more than 10,000"):
        intake().load(prompt)


def test_items_load_at_the_same_time_without_the_event_loop() -> None:
    """Two that wait for each other are loaded, while the event loop runs."""
    import threading

    barrier, ticks = threading.Barrier(2, timeout=10), []

    class Meeting(MediaLoader):
        def load(self, modality: str, given: Any, *args: Any, **kwargs: Any) -> Any:
            barrier.wait()
            return super().load(modality, given, *args, **kwargs)

    async def run() -> Any:
        task = asyncio.create_task(MediaIntake(Meeting(), {"image": 2}).load_async(prompt))
        while not task.done():
            ticks.append(None)
            await asyncio.sleep(0)
        return await task

    content = base64.b64encode(png(PICTURE)).decode()
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": [f"data:image/png;base64,{content}", PICTURE]}}
    assert counts(asyncio.run(run())) == {"image": 2}
    assert ticks


def png(image: Image.Image) -> bytes:
    import io

    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
