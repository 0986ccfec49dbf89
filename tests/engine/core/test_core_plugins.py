"""Plugins in the process of a core, loaded before its messages are decoded."""

from __future__ import annotations

import pytest

from penstock.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from support.fake_engine import write_model


def test_a_core_loads_plugins_before_it_starts_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    class Plugin:
        name, value = "mine", "test:mine"

        def load(self) -> object:
            return self._run

        def _run(self) -> None:
            raise RuntimeError("called")

    def start_engine(config: EngineConfig) -> None:
        raise AssertionError("workers were started before plugins were loaded")

    monkeypatch.setattr("penstock.worker.plugins.entry_points", lambda group: [Plugin()])
    monkeypatch.setattr("penstock.engine.core.engine_core.start_engine", start_engine)
    config = EngineConfig.create(write_model(tmp_path_factory.mktemp("model")))
    with pytest.raises(ConfigError, match="Plugin 'mine' .* failed: RuntimeError: called"):
        EngineCore(config)
