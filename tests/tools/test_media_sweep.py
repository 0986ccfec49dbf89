"""docs/media_sweep.md is what the tool finds of every model of images and text of Transformers."""

from __future__ import annotations

import pytest
import transformers

from support.media_sweep import class_names
from tools import media_sweep


def test_the_page_is_about_the_models_of_its_version() -> None:
    if transformers.__version__ == media_sweep.version_of_page():
        assert list(media_sweep.rows_of_page()) == sorted(class_names()), "run tools/media_sweep.py"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(class_names()))
def test_a_model_is_equal_or_refused_with_the_reason(model_type: str) -> None:
    row = media_sweep.row(model_type)
    if transformers.__version__ == media_sweep.version_of_page():
        assert row == media_sweep.rows_of_page()[model_type], "run tools/media_sweep.py"
