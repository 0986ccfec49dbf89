"""docs/models_sweep.md is what the tool finds of every causal language model of Transformers."""

from __future__ import annotations

import pytest

from support.model_sweep import class_names
from tools import models_sweep


def test_the_page_is_about_the_models_of_its_version() -> None:
    if models_sweep.PAGE.is_of_this_version():
        assert list(models_sweep.PAGE.rows()) == sorted(class_names()), "run python -m tools.models_sweep"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(class_names()))
def test_a_model_is_equal_or_refused_with_the_reason(model_type: str) -> None:
    row = models_sweep.row(model_type)
    if models_sweep.PAGE.is_of_this_version():
        assert row == models_sweep.PAGE.rows()[model_type], "run python -m tools.models_sweep"
