"""docs/models_sweep.md is what the tool finds of every causal language model of Transformers."""

from __future__ import annotations

import pytest
import transformers

from support.model_sweep import class_names
from tools import models_sweep


def test_the_page_is_about_the_models_of_its_version() -> None:
    if transformers.__version__ == models_sweep.version_of_page():
        assert list(models_sweep.rows_of_page()) == sorted(class_names()), "run tools/models_sweep.py"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(class_names()))
def test_a_model_is_equal_or_refused_with_the_reason(model_type: str) -> None:
    row = models_sweep.row(model_type)
    if transformers.__version__ == models_sweep.version_of_page():
        assert row == models_sweep.rows_of_page()[model_type], "run tools/models_sweep.py"
