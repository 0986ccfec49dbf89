"""Adapters that take long to load the first time, in every process."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.features.lora.request import LoRARequest
from penstock.features.lora.tables import PackedModelAdapter
from penstock.features.lora.worker import LoRAWorker

# File in an adapter's folder that says that a process has begun to load it.
LOADING = "loading"


_load = LoRAWorker._load


class SlowLoading:
    """Worker extension: the first process that loads a folder does not come to an end."""

    def __init_subclass__(cls) -> None:
        # In worker processes alone, whose class has this one as a base.
        LoRAWorker._load = _load_slowly  # type: ignore[method-assign]


def _load_slowly(manager: LoRAWorker, request: LoRARequest) -> PackedModelAdapter:
    begun = Path(request.lora_path, LOADING)
    if not begun.exists():
        begun.touch()
        time.sleep(300)
    return _load(manager, request)
