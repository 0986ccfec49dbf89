"""An unsupported kind of model is refused by its kind, with the same error from `plan` and from an engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.errors import UnsupportedModel

STATE = (
    "it keeps a recurrent state, as Mamba does, beside or instead of keys and values, which native recurrent and "
    "hybrid models have alone"
)
ENCODER = "it is an encoder-decoder model that is not implemented here"
OWN_ATTENTION = "its attention does not go through the attention interface of Transformers"

REASONS = {
    "ZambaForCausalLM": STATE,
    "RwkvForCausalLM": STATE,
    "xLSTMForCausalLM": STATE,
    "BigBirdPegasusForConditionalGeneration": ENCODER,
    "ViTForImageClassification": "it takes images in a way that is not implemented",
    "BigBirdForCausalLM": OWN_ATTENTION,
    "Qwen2_5OmniForConditionalGeneration": "it takes images and videos and audio in a way that is not implemented",
    "Qwen2_5OmniThinkerForConditionalGeneration": "it takes images and videos and audio in a way that is not impl",
    "GraniteSpeechForConditionalGeneration": "it takes audio in a way that is not implemented",
    "Phi4MultimodalForCausalLM": "it takes images and audio in a way that is not implemented",
    "Gemma3nForCausalLM": "its last layers read the keys and values of earlier ones (num_kv_shared_layers)",
}


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Silence Transformers' warnings about its default configurations."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("max_model_len", [None, 64])
@pytest.mark.parametrize("class_name", REASONS)
def test_the_plan_and_the_engine_give_the_true_reason(
    class_name: str, max_model_len: int | None, tmp_path: Path
) -> None:
    """The error is not about a field that the configuration of such a model lacks."""
    config = getattr(transformers, class_name).config_class()
    config.architectures = [class_name]
    config.save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": max_model_len}
    with pytest.raises(UnsupportedModel) as planned:
        plan_engine(str(tmp_path), **options)
    with pytest.raises(UnsupportedModel) as started:
        EngineCore(EngineConfig.create(str(tmp_path), **options))
    assert str(planned.value) == str(started.value)
    assert f"({class_name}) cannot run" in str(planned.value)
    assert REASONS[class_name] in str(planned.value)


_WITH_CODE = {
    "UltravoxModel": {
        "model_type": "ultravox",
        "auto_map": {"AutoModel": "ultravox_model.UltravoxModel"},
        "audio_config": {"model_type": "whisper"},
        "text_config": {"model_type": "llama"},
    },
    "RWKV7ForCausalLM": {"model_type": "rwkv7", "auto_map": {"AutoModelForCausalLM": "rwkv7.RWKV7ForCausalLM"}},
}


@pytest.mark.parametrize("class_name", _WITH_CODE)
def test_a_model_with_code_of_its_own_is_refused_with_the_reason(class_name: str, tmp_path: Path) -> None:
    """Models that Transformers has no class of."""
    fields = {**_WITH_CODE[class_name], "architectures": [class_name], "vocab_size": 32_000, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=rf"'{class_name}'.* nor in Transformers .*\(auto_map\) is not run"):
        plan_engine(str(tmp_path), device="cpu", load_format="dummy", max_model_len=64)
