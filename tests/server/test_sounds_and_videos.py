"""Audio and videos in requests: the answer is that of the samples and the frames themselves."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.media.audio import resampled
from support.multimodal_models import picture, save_multimodal, words
from support.servers import Served, serving

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": "8MiB"}
TEXT = words(7, 8)
MARKS = {"qwen2-audio": "<audio>", "qwen2.5-vl": "<vision_start> <video> <vision_end>"}


def template(name: str) -> str:
    mark = MARKS[name]
    return (
        "{% for m in messages %}w1 {% for part in m.content %}"
        f"{{% if part.type == 'text' %}}{{{{ part.text }}}} {{% else %}}{mark} {{% endif %}}"
        "{% endfor %}{% endfor %}w2"
    )


@contextmanager
def served(folder: Path, name: str) -> Iterator[Served]:
    save_multimodal(folder, name)
    (folder / "chat_template.jinja").write_text(template(name))
    config = EngineConfig.create(str(folder), **OPTIONS)
    with serving(AsyncEngine.from_config(config), served_model_name=("model",)) as server:
        yield server


def expected(folder: Path, name: str, data: dict[str, Any]) -> tuple[str, int]:
    prompt: Any = {"prompt": f"w1 {MARKS[name]} {TEXT} w2", "multi_modal_data": data}
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
    return output.outputs[0].text, len(output.prompt_token_ids or ())


def answers(server: Served, parts: list[Any]) -> list[tuple[str | None, int]]:
    """Answers to a text after each of these parts alone."""
    client, given = server.client(), []
    for part in parts:
        content: Any = [part, {"type": "text", "text": TEXT}]
        answer = client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": content}], temperature=0, max_completion_tokens=5
        )
        assert answer.usage is not None
        given.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    return given


@pytest.mark.slow
def test_input_audio_is_mixed_resampled_and_answered(tmp_path: Path) -> None:
    samples = (np.sin(np.arange(4000) / 9) * 12_000).astype(np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((2, 2, 8000, 0, "NONE", ""))
        sound.writeframes(np.stack([samples, samples], axis=1).tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    with served(tmp_path, "qwen2-audio") as server:
        found = answers(server, parts)
        refused = server.post(
            "/v1/chat/completions",
            {"model": "model", "messages": [{"role": "user", "content": [parts[0] | {"input_audio": {"data": data}}]}]},
        )
    floats = (samples / 32768).astype(np.float32)
    assert found == [expected(tmp_path, "qwen2-audio", {"audio": (floats, 8000)})] * 2
    assert found[0] == expected(tmp_path, "qwen2-audio", {"audio": (resampled(floats, 8000, 16_000), 16_000)})
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0]")


@pytest.mark.slow
def test_a_video_url_has_the_frames_of_its_file(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    frames = [np.asarray(picture(40, 24, number)) for number in range(4)]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=2)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    url = f"data:video/x-matroska;base64,{base64.b64encode(file.getvalue()).decode()}"
    with served(tmp_path, "qwen2.5-vl") as server:
        found = answers(server, [{"type": "video_url", "video_url": {"url": url}}])
    assert found == [expected(tmp_path, "qwen2.5-vl", {"video": (np.stack(frames), {"fps": 2.0})})]
