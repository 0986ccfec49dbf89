"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from penstock.errors import UnsupportedFeature
from penstock.parallel.state import ParallelState


def layers_of_stage(num_layers: int, parallel: ParallelState) -> range:
    """This rank's layers, by number: as many as were asked for, or else about equally many in each stage.

    Raises UnsupportedFeature for numbers of layers that do not add up, and for more stages than layers.
    """
    size, stage = parallel.pipeline.size, parallel.pipeline.rank
    counts = parallel.pipeline_layers or spread_layers(num_layers, size)
    if sum(counts) != num_layers or min(counts) < 1:
        raise UnsupportedFeature(
            f"pipeline_layers={','.join(map(str, counts))}: the model has {num_layers} layers to spread over {size} "
            f"stages, each at least one. Allowed, for instance: {','.join(map(str, spread_layers(num_layers, size)))}."
            if num_layers >= size
            else f"pipeline_parallel_size={size}: the model has only {num_layers} layers, so at most as many stages."
        )
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def spread_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers by stage. The last stages but one have one more where they do not divide: the last has the head."""
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages))
