"""`penstock generate` and `penstock chat` with images, on a small model that sees."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.app import app
from support.multimodal_models import picture, save_multimodal, words

TEMPLATE = (
    "{% for m in messages %}w1 {% if m.content is string %}{{ m.content }} {% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}w2"
)
TEXT = words(7, 8)
COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
ENGINE = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": "8MiB"}
FLAGS = ["--temperature", "0", "--max-tokens", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_multimodal(folder, "llava")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for number in range(2):
        picture(40, 24, number).save(folder / f"{number}.png")
    return folder


def answers(folder: Path, *conversations: list[Any]) -> list[str]:
    """Answers of LLM.chat, which has images as objects; each next message follows the answer before."""
    texts = []
    with LLM(str(folder), **ENGINE) as llm:
        for turns in conversations:
            messages: list[Any] = []
            for content in turns:
                messages.append({"role": "user", "content": content})
                params = SamplingParams(temperature=0, max_tokens=5)
                (output,) = llm.chat(messages, params, use_tqdm=False)
                texts.append(output.outputs[0].text)
                messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def parts(*items: Any) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": item} if isinstance(item, str) else {"type": "image_pil", "image_pil": item}
        for item in items
    ]


def run(command: str, folder: Path, *arguments: str, stdin: str = "") -> Any:
    engine = [text for name, value in ENGINE.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return COMMAND_LINE.invoke(app, [command, "-m", str(folder), *engine, *FLAGS, *arguments], input=stdin)


def test_generate_answers_a_question_about_images(folder: Path) -> None:
    images = [picture(40, 24, number) for number in range(2)]
    (expected,) = answers(folder, [parts(*images, TEXT)])
    files = ["--image", str(folder / "0.png"), "--image", str(folder / "1.png")]
    result = run("generate", folder, *files, TEXT)
    assert (result.exit_code, result.stdout) == (0, expected + "\n"), result.stderr
    damaged = folder / "damaged.png"
    damaged.write_bytes(b"no image")
    result = run("generate", folder, "--image", str(damaged), TEXT)
    assert result.exit_code == 2
    assert "messages[0].content[0]: It is not an image that can be read" in result.stderr


def test_a_chat_remembers_its_images(folder: Path) -> None:
    image = picture(40, 24, 1)
    expected = answers(folder, [TEXT, parts(image, words(9)), words(10)])
    result = run("chat", folder, stdin=f"{TEXT}\n/image {folder / '1.png'}\n{words(9)}\n{words(10)}\n")
    assert (result.exit_code, result.stdout.splitlines()) == (0, expected), result.stderr
    again = run("chat", folder, "--image", str(folder / "1.png"), stdin=f"{TEXT}\n/retry\n/undo\n/history\n")
    first, second = again.stdout.splitlines()
    assert first == second
    assert f"(taken back: [image] {TEXT})" in again.stderr


def test_a_file_of_requests_names_images(folder: Path, tmp_path: Path) -> None:
    image = picture(40, 24, 1)
    (expected,) = answers(folder, [parts(image, TEXT)])
    (tmp_path / "here").mkdir()
    file = io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "here" / "a.png").write_bytes(file.getvalue())
    content = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": TEXT}]
    own = {"messages": [{"role": "user", "content": content}]}
    prompt = {"prompt": f"w1 <image> {TEXT} w2", "multi_modal_data": {"image": "a.png"}}
    batch = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": own}
    source = tmp_path / "in.jsonl"
    for line, text_of in (
        (own, lambda result: result["text"]),
        (prompt, lambda result: result["text"]),
        (batch, lambda result: result["response"]["body"]["choices"][0]["message"]["content"]),
    ):
        source.write_text(json.dumps(line))
        result = run("generate", folder, "--allowed-local-media-path", str(tmp_path / "here"), "--input", str(source))
        assert result.exit_code == 0, result.stderr
        assert text_of(json.loads(result.stdout)) == expected
    refused = json.loads(run("generate", folder, "--input", str(source)).stdout)
    assert "allowed_local_media_path" in json.dumps(refused)
