"""Every layer is in one stage, and what cannot be spread is refused with what can."""

from __future__ import annotations

import pytest

from penstock.config.parallel import ParallelConfig
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.parallel import ParallelState, layers_of_stage, spread_layers
from support.ranks import SilentGroup


def stages(num_layers: int, size: int, counts: tuple[int, ...] | None = None) -> list[range]:
    groups = (SilentGroup(rank, size) for rank in range(size))
    return [layers_of_stage(num_layers, ParallelState(pipeline=group, pipeline_layers=counts)) for group in groups]


@pytest.mark.parametrize(
    ("num_layers", "counts"), [(12, (4, 4, 4)), (13, (4, 5, 4)), (14, (5, 5, 4)), (3, (1, 1, 1)), (7, (7,))]
)
def test_layers_are_spread_evenly_and_the_last_stage_has_no_more(num_layers: int, counts: tuple[int, ...]) -> None:
    assert spread_layers(num_layers, len(counts)) == counts
    assert [layer for stage in stages(num_layers, len(counts)) for layer in stage] == list(range(num_layers))


def test_as_many_layers_as_asked_for() -> None:
    assert stages(32, 3, (10, 12, 10)) == [range(10), range(10, 22), range(22, 32)]


def test_what_does_not_add_up_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match=r"pipeline_layers=2,3: the model has 6 layers .* instance: 3,3"):
        stages(6, 2, (2, 3))
    with pytest.raises(UnsupportedFeature, match="pipeline_parallel_size=3: the model has only 2 layers"):
        stages(2, 3)


def test_the_option_is_a_number_for_each_stage() -> None:
    assert ParallelConfig(pipeline_parallel_size=3, pipeline_layers="10,12,10").pipeline_layers == (10, 12, 10)  # type: ignore[arg-type]
    for wrong in ("10,12", "a,b,c", (1, 0, 1)):
        with pytest.raises(ConfigError, match="pipeline_layers=.*each of the pipeline_parallel_size=3 stages"):
            ParallelConfig(pipeline_parallel_size=3, pipeline_layers=wrong)  # type: ignore[arg-type]
