"""Checkpoints of old and new weights of one model, and what engines that start with them generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import tiny_checkpoint
from support.engines import make_core


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(made):
        tiny_checkpoint(folder, seed=seed)
    return made[0], made[1]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> list[list[list[int]]]:
    """By folder, tokens of a core by the test module's own `tokens`."""
    made = []
    for folder in folders:
        core = make_core(folder)
        made.append(request.module.tokens(core))
        core.close()
    return made
