"""Measure a model's memory without its weights: run its largest steps on the meta device.

The model's own code runs; bytes of live tensors are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.contract import KVCacheSpec
from penstock.device.dtypes import DtypeChoice
from penstock.device.stand_in import standing_for
from penstock.device.without_memory import DeviceWithoutMemory
from penstock.errors import UnsupportedFeature
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer, describe_narrow_products, weights_size_bytes
from penstock.loader.loader import load_without_memory
from penstock.models.attention_layers import cache_layers, choose_state_dtypes, most_query_heads
from penstock.parallel import ParallelState
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.speculative.create import create_speculator
from penstock.worker.drafter import (
    aux_layers_of_head,
    drafted_specs,
    load_drafter_without_memory,
    place_for_drafter,
)
from penstock.worker.feature import WorkerServices
from penstock.worker.kv_cache_dtype import choose_kv_cache_dtype
from penstock.worker.memory_plan import MemoryTerm
from penstock.worker.profile import measure_step, terms_of_model


class NotOnMeta(UnsupportedFeature):
    """The model cannot run on meta tensors."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Sizes of a model.

    num_parameters: including the drafter. terms: memory of tensors; weights are parameters and buffers after packing.
    lookups: bytes of untied embeddings among them. specs: KV cache spec by layer. num_heads: maximum query heads of a
    layer. kv_cache_dtype: by name. products: `describe_narrow_products`.
    """

    num_parameters: int
    terms: tuple[MemoryTerm, ...]
    lookups: int
    specs: Mapping[str, KVCacheSpec]
    num_heads: int
    kv_cache_dtype: str
    products: str | None = None


def measure_unloaded(
    config: EngineConfig,
    parallel: ParallelState,
    kind: str,
    dtype: DtypeChoice,
    limits: RunnerLimits,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> UnloadedModel:
    """Build, load and run the model on the meta device.

    tensors: meta tensors of the checkpoint by name, if its files are not local. Raises what loading raises, and
    NotOnMeta.
    """
    parallel = place_for_drafter(config, parallel)
    model, num_parameters = load_without_memory(
        config.model, config.load, parallel, kind, dtype.torch_dtype, dtype.weights_torch_dtype, tensors
    )
    choose_state_dtypes(model, *config.cache.state_dtypes)
    backend = config.device.attention_backend
    cache_dtype = choose_kv_cache_dtype(config.cache.kv_cache_dtype, dtype.name, model, backend)
    drafter, num_drafter_parameters = load_drafter_without_memory(config, model, parallel, kind, dtype, tensors)
    layers, specs = cache_layers(model), drafted_specs(config, model, drafter, cache_dtype)
    try:
        with standing_for(kind):
            device = DeviceWithoutMemory(kind)
            aux_layers = aux_layers_of_head(config, model, parallel)
            speculator = create_speculator(config.speculative, device, config.model.vocab_size, drafter, aux_layers)
            layers = {**layers, **speculator.cache_layers()}
            services = WorkerServices(config, device, model, dtype.torch_dtype)
            step = measure_step(services, layers, specs, limits, speculator)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # from operators that need values
        raise NotOnMeta(
            f"{config.model.architecture} cannot run on meta tensors, so its memory is measured only "
            f"when an engine starts: {type(error).__name__}: {error}"
        ) from error
    return UnloadedModel(
        num_parameters=num_parameters + num_drafter_parameters,
        terms=terms_of_model(
            services,
            parallel,
            sum(weights_size_bytes(part) for part in (model, drafter) if part is not None),
            step,
            limits,
            speculator,
        ),
        lookups=sum(_lookup_bytes(part) for part in (model, drafter) if part is not None),
        specs=specs,
        num_heads=most_query_heads(layers),
        kv_cache_dtype=cache_dtype,
        products=describe_narrow_products(model),
    )


def _lookup_bytes(model: nn.Module) -> int:
    """Return the bytes of embeddings whose weight no linear layer shares."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, LinearLayer)}
    embeddings = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
    return sum(module.weight.nbytes for module in embeddings if id(module.weight) not in multiplied)
