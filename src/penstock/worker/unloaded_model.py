"""What a model will need, whatever it is: it is built without memory, and its heaviest steps are run like that.

Its own code runs, and every operator, on tensors that have sizes and no values; the tensors that are alive are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.contract import KVCacheSpec
from penstock.device.dtypes import DtypeChoice, choose_kv_cache_dtype
from penstock.device.stand_in import standing_for
from penstock.device.without_memory import DeviceWithoutMemory
from penstock.errors import UnsupportedFeature
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer, weights_size_bytes
from penstock.loader.loader import load_without_memory
from penstock.models.attention_layers import cache_layers, most_query_heads
from penstock.parallel import ParallelState
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.speculative.create import create_speculator
from penstock.runner.stage import num_noted_before
from penstock.worker.drafter import (
    aux_layers_of_head,
    drafted_specs,
    layers_of_target,
    load_drafter_without_memory,
    place_for_drafter,
)
from penstock.worker.memory_plan import StepMemory
from penstock.worker.profile import measure_step_memory


class NeedsValues(UnsupportedFeature):
    """A model cannot be run without memory."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """num_parameters: values. weights: bytes of them, as they will be kept, and of buffers. lookups: of those, what a
    step only reads its tokens' rows of. step: bytes of tensors. specs: by layer. num_heads: of the queries in the layer
    that has the most. num_aux_received: hidden states of a token that a stage is given for a speculator, beside the
    usual one.
    """

    num_parameters: int
    weights: int
    lookups: int
    step: StepMemory
    specs: Mapping[str, KVCacheSpec]
    num_heads: int
    num_aux_received: int


def measure_unloaded(
    config: EngineConfig,
    parallel: ParallelState,
    kind: str,
    dtype: DtypeChoice,
    limits: RunnerLimits,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> UnloadedModel:
    """Build the model for this kind of device, load it and run it, all without memory.

    tensors: of the checkpoint by name, where its files are not here. Raises what loading raises, and NeedsValues.
    """
    parallel = place_for_drafter(config, parallel)
    model, num_parameters = load_without_memory(
        config.model, config.load, parallel, kind, dtype.torch_dtype, dtype.weights_torch_dtype, tensors
    )
    cache_dtype = choose_kv_cache_dtype(config.cache.kv_cache_dtype, dtype.name)
    drafter, num_drafter_parameters = load_drafter_without_memory(config, model, parallel, kind, dtype, tensors)
    layers, specs = cache_layers(model), drafted_specs(model, drafter, config.cache.block_size, cache_dtype)
    backend = config.device.attention_backend
    try:
        with standing_for(kind):
            device = DeviceWithoutMemory(kind)
            aux_layers = aux_layers_of_head(config, model, parallel)
            speculator = create_speculator(config.speculative, device, config.model.vocab_size, drafter, aux_layers)
            layers = {**layers, **speculator.cache_layers()}
            step = measure_step_memory(
                device,
                model,
                layers,
                specs,
                limits,
                backend,
                config.sampling,
                fast_paths=config.scheduler.fast_paths != "off",
                speculator=speculator,
            )
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # as operators refuse tensors
        raise NeedsValues(
            f"{config.model.architecture} does not run without the values of its weights, so what it takes shows only "
            f"when an engine starts: {type(error).__name__}: {error}"
        ) from error
    return UnloadedModel(
        num_parameters=num_parameters + num_drafter_parameters,
        weights=sum(weights_size_bytes(part) for part in (model, drafter) if part is not None),
        lookups=sum(_lookup_bytes(part) for part in (model, drafter) if part is not None),
        step=step,
        specs=specs,
        num_heads=most_query_heads(layers),
        num_aux_received=num_noted_before(speculator.aux_layers, layers_of_target(model, parallel)),
    )


def _lookup_bytes(model: nn.Module) -> int:
    """Of embeddings that share their weight with no product."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, LinearLayer)}
    embeddings = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
    return sum(module.weight.nbytes for module in embeddings if id(module.weight) not in multiplied)
