"""A model's folder given as a Path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, EngineConfig
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.config.model import ModelConfig
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ModelNotFound
from support.fake_engine import install_fake_core, write_model


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    model, other = write_model(tmp_path / "model"), write_model(tmp_path / "other")
    config = EngineConfig.create(model, tokenizer=other)
    assert config == EngineConfig.create(str(model), tokenizer=str(other))
    assert (config.model.model, config.model.tokenizer_folder) == (str(model), other)
    with LLM(model, tokenizer=other) as llm:
        assert llm.generate("the fox", use_tqdm=False)[0].finished
    AsyncEngine(model, tokenizer=other, enable_multiprocessing=False).shutdown()


def test_a_plan_takes_a_path() -> None:
    demo = resolve_model_folder("demo")
    assert plan_engine(demo, device="cpu", kv_cache_memory_bytes=8 << 20).model == str(demo)


@pytest.mark.parametrize("start", [LLM, AsyncEngine, EngineConfig.create, plan_engine])
@pytest.mark.parametrize("name", ["nowhere", "looks-like/a-hub-id", "demo"])
def test_a_folder_that_is_not_there_is_named(start: Any, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=f"^model='{name}': there is no such folder"):
        start(Path(name))


def test_a_tokenizers_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^tokenizer='.*/nowhere': there is no such folder"):
        LLM(write_model(tmp_path / "model"), tokenizer=tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"^tokenizer='/nowhere': there is no such folder or file"):
        LLM(write_model(tmp_path / "model"), tokenizer="/nowhere")


def test_what_is_neither_text_nor_path_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="^model=7 is a int. Allowed: demo, a folder, or a hub id"):
        LLM(7)  # type: ignore[arg-type]


def test_a_folder_of_the_shipped_models_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    config = ModelConfig.load(Path("demo"))
    assert os.path.samefile(config.folder, tmp_path / "demo")
    assert os.path.samefile(resolve_model_folder(config.model), tmp_path / "demo")
