"""docs/media_sweep.md is what the tool finds of every model of images and text of Transformers."""

from __future__ import annotations

import pytest

from support.media_sweep import class_names
from tools import media_sweep


def test_the_page_is_about_the_models_of_its_version() -> None:
    if media_sweep.PAGE.is_of_this_version():
        assert list(media_sweep.PAGE.rows()) == sorted(class_names()), "run python -m tools.media_sweep"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(class_names()))
def test_a_model_is_equal_or_refused_with_the_reason(model_type: str) -> None:
    row = media_sweep.row(model_type)
    if media_sweep.PAGE.is_of_this_version():
        assert row == media_sweep.PAGE.rows()[model_type], "run python -m tools.media_sweep"
