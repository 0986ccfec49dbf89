"""Options that can change while an engine runs; all others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, ModelNotFound
from penstock.worker.update_config import updated_config
from support.checkpoints import tiny_checkpoint

CONFIG = EngineConfig.create("demo", device="cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cache_config": {"block_size": 8}}, "cannot change 'cache_config'. Allowed: load_config, model_config"),
        ({"load_config": {"load_formt": "pt"}}, r"cannot change load_config\.load_formt .*Allowed: load_format"),
        ({"load_config": {"load_format": "npcache"}}, "load_format='npcache' is not valid. Allowed: auto"),
        ({"load_config": {"use_tqdm_on_load": 1}}, "use_tqdm_on_load=1 is not valid"),
        ({"load_config": {"model_loader_extra_config": {"pattern": "x"}}}, "pattern, which load_format='auto'"),
        (
            {"load_config": {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "x"}}},
            "pattern='x' is not valid",
        ),
        ({"load_config": "auto"}, "load_config='auto' is not valid. Allowed: a dictionary"),
        ({"model_config": {"dtype": "float16"}}, r"cannot change model_config\.dtype .*Allowed: model"),
        ({"model_config": {"model": 3}}, r"model_config\.model=3 is not valid"),
        ([("load_config", {})], "takes a dictionary of sections"),
    ],
)
def test_what_may_not_change_is_refused_by_name(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        updated_config(CONFIG, overrides)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="/nowhere"):
        updated_config(CONFIG, {"model_config": {"model": "/nowhere"}})


def test_only_what_is_named_changes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    changed = updated_config(
        CONFIG, {"load_config": {"load_format": "dummy"}, "model_config": {"model": str(tmp_path)}}
    )
    assert (changed.load.load_format, changed.load.use_tqdm_on_load) == ("dummy", True)
    assert (changed.model.folder, changed.model.hf_config) == (tmp_path, CONFIG.model.hf_config)
    assert (changed.cache, changed.scheduler, changed.device) == (CONFIG.cache, CONFIG.scheduler, CONFIG.device)
    assert updated_config(CONFIG, {}) == CONFIG
