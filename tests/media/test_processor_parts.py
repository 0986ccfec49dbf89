"""A processor without a part for a modality refuses it by name, as an error of the request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import UnsupportedParameter
from penstock.media.processors.processor import MediaProcessor


def test_a_part_whose_package_is_not_installed_refuses_its_modality() -> None:
    checkpoint: Any = SimpleNamespace(hf_config={}, modalities=("image", "video"))
    processor = MediaProcessor(Path("model"), checkpoint, None, 0)
    processor._processor = SimpleNamespace(
        image_token="<image>", video_token="<video>", image_processor=object(), video_processor=None
    )
    assert processor.placeholder("image") == "<image>"
    with pytest.raises(UnsupportedParameter, match="reads no video here"):
        processor.placeholder("video")
