"""What of a memory plan belongs to the model: weights, a step's tensors, and what each layer keeps.

Derived from `config.json` and the headers of the weight files; a model that runs through Transformers, and whose layers
these do not show, is built and run without memory instead. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.config import EngineConfig
from penstock.config.quantized_checkpoint import (
    read_quantized_checkpoint,
    refuse_quantization_on,
    refuse_quantized_checkpoint,
)
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.device.dtypes import DtypeChoice
from penstock.loader.headers import TensorHeader
from penstock.models.registry import runs_through_transformers
from penstock.models.shape import ModelShape, read_shape
from penstock.worker.estimate import (
    count_parameters,
    count_vector_parameters,
    estimate_step,
    estimate_weights,
    head_copy_bytes,
    layer_traits,
    logits_bytes,
    weights_of_shape,
)
from penstock.worker.memory_plan import StepMemory
from penstock.worker.quantized_estimate import PlainProducts, QuantizedPart, plain_products, quantized_part
from penstock.worker.transformers_estimate import (
    LayerKind,
    estimate_transformers_activations,
    estimate_transformers_weights,
    has_table,
    is_kept_as_computed,
    layers_of_class,
    specs_of_kinds,
    transformers_weights_of_shape,
    why_not_derived,
)
from penstock.worker.transformers_shape import read_transformers_shape
from penstock.worker.usual_decoder import read_usual_decoder
from penstock.worker.usual_matrices import NotUsual

LayerSpecs = Mapping[str, FullAttentionSpec | SlidingWindowSpec]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """headers: None for random weights. max_model_len: the longest context to plan for."""

    config: EngineConfig
    headers: Mapping[str, TensorHeader] | None
    dtype: DtypeChoice
    kv_cache_dtype: str
    device: str
    max_model_len: int

    def specs(self, shape: ModelShape) -> LayerSpecs:
        return shape.kv_cache_specs(self.config.cache.block_size, self.kv_cache_dtype)

    def integers(
        self,
        headers: Mapping[str, TensorHeader],
        shape: ModelShape,
        stays_in_float: Callable[[str], bool] = lambda _name: False,
    ) -> QuantizedPart:
        model = self.config.model
        checkpoint = read_quantized_checkpoint(model.hf_config, model.model)
        return quantized_part(headers, shape, model.quantization, checkpoint, stays_in_float)

    def products(self) -> PlainProducts | None:
        """Those of quantised weights, if they need memory of their own."""
        model = self.config.model
        checkpoint = read_quantized_checkpoint(model.hf_config, model.model)
        if checkpoint is not None and self.headers is None:  # random weights get as many bits
            return plain_products(f"int{checkpoint.bits}", None)
        return plain_products(model.quantization, checkpoint)

    def head_copy(self, integers: QuantizedPart, shape: ModelShape, *, reads_packed_rows: bool = True) -> int:
        """Bytes of the head beside the embedding that has the same weight; integers are counted already."""
        if integers.has_head:
            return 0
        return head_copy_bytes(shape, self.dtype, self.device, reads_packed_rows=reads_packed_rows)

    def with_logits(self, activations: int) -> StepMemory:
        scheduler, vocab_size = self.config.scheduler, self.config.model.vocab_size
        num_tokens, num_rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        return StepMemory(
            activations, logits_bytes(vocab_size, num_tokens, num_rows, self.config.sampling, self.device)
        )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """num_parameters: values. weights: bytes of them and of buffers. step: bytes of its tensors. specs: by layer.
    num_heads: of a layer's queries. remark: how else than from the configuration and the headers these were found,
    or "" where they were not.
    """

    num_parameters: int
    weights: int
    step: StepMemory
    specs: LayerSpecs
    num_heads: int
    remark: str = ""


def size_model(planned: PlannedModel) -> ModelSizes:
    """Raises UnsupportedFeature and ModelError for what `config.json` says, and for weights that cannot be loaded."""
    model = planned.config.model
    _refuse_quantization(planned)
    if not runs_through_transformers(model):
        return _size_native(planned)
    refuse_quantized_checkpoint(model.hf_config, model.model)
    if not has_table(model):
        return _size_usual(planned)
    why_not = why_not_derived(model)
    if why_not is not None:
        return _size_without_memory(planned, why_not)
    shape = read_transformers_shape(model)
    return _size_transformers(
        planned, [LayerKind(tuple(range(shape.decoder.num_layers)), shape, layers_of_class(model))]
    )


def _refuse_quantization(planned: PlannedModel) -> None:
    model = planned.config.model
    checkpoint = read_quantized_checkpoint(model.hf_config, model.model)
    quantization = model.quantization
    if checkpoint is not None:  # random weights get as many bits
        quantization = f"int{checkpoint.bits}" if planned.headers is None else checkpoint.method
    if quantization is not None:
        refuse_quantization_on(planned.device, quantization)


def _size_native(planned: PlannedModel) -> ModelSizes:
    model = planned.config.model
    shape, traits = read_shape(model), layer_traits(model.architecture)
    headers = planned.headers
    if headers is None:
        headers = weights_of_shape(shape, traits, model.longest_context)
    integers = planned.integers(headers, shape)
    num_parameters = count_parameters(integers.others, shape)
    num_vectors = count_vector_parameters(integers.others, shape)
    weights = estimate_weights(num_parameters, num_vectors, shape, planned.dtype, planned.max_model_len)
    return ModelSizes(
        num_parameters + integers.num_parameters,
        weights + integers.num_bytes + planned.head_copy(integers, shape),
        _step_of_shape(planned, shape),
        planned.specs(shape),
        shape.num_heads,
    )


def _size_usual(planned: PlannedModel) -> ModelSizes:
    model = planned.config.model
    unknown = f"the layers of {model.architecture} are not known beforehand"
    try:
        usual = read_usual_decoder(model, planned.headers)
    except NotUsual as reason:
        return _size_without_memory(planned, f"{unknown}, and {reason}")
    sizes = _size_transformers(
        replace(planned, headers=usual.headers), usual.kinds, usual.scaled_embeddings, usual.transposed
    )
    remark = f"estimated as a decoder of usual layers, since {unknown}"
    return replace(sizes, weights=sizes.weights + usual.buffer_bytes, remark=remark)


def _size_transformers(
    planned: PlannedModel,
    kinds: Sequence[LayerKind],
    scaled_embeddings: Collection[str] = (),
    transposed: Collection[str] = (),
) -> ModelSizes:
    model, headers = planned.config.model, planned.headers
    shape = kinds[0].shape
    if headers is None:
        headers = transformers_weights_of_shape(model, shape)
    as_computed_too = {*scaled_embeddings, *transposed}
    integers = planned.integers(
        headers, shape.decoder, lambda name: is_kept_as_computed(name) or name in as_computed_too
    )
    activations = max(
        estimate_transformers_activations(
            kind.moments,
            kind.shape,
            num_tokens=planned.config.scheduler.max_num_batched_tokens,
            dtype=planned.dtype.name,
            device=planned.device,
            products=planned.products(),
        )
        for kind in kinds
    )
    weights = estimate_transformers_weights(integers.others, shape, planned.dtype, as_computed_too)
    head_copy = planned.head_copy(integers, shape.decoder, reads_packed_rows=not scaled_embeddings)
    return ModelSizes(
        count_parameters(integers.others, shape.decoder) + integers.num_parameters,
        weights + integers.num_bytes + head_copy,
        planned.with_logits(activations),
        specs_of_kinds(kinds, planned.config.cache.block_size, planned.kv_cache_dtype),
        max(kind.shape.decoder.num_heads for kind in kinds),
    )


def _size_without_memory(planned: PlannedModel, why: str) -> ModelSizes:
    from penstock.worker.unloaded_model import try_without_memory

    config, dtype = planned.config, planned.dtype
    unloaded = try_without_memory(
        config.model,
        config.scheduler.max_num_batched_tokens,
        config.cache.block_size,
        dtype,
        planned.kv_cache_dtype,
        planned.device,
    )
    remark = f"built and run without memory, since {why}"
    if unloaded.activations is None:
        step = _step_of_shape(planned, read_shape(config.model))
        remark = f"built without memory, and its activations guessed, since {why}, and {unloaded.why_not}"
    else:
        step = planned.with_logits(unloaded.activations)
    return ModelSizes(unloaded.num_parameters, unloaded.weights, step, unloaded.specs, unloaded.num_heads, remark)


def _step_of_shape(planned: PlannedModel, shape: ModelShape) -> StepMemory:
    config = planned.config
    return estimate_step(
        shape,
        layer_traits(config.model.architecture),
        num_tokens=config.scheduler.max_num_batched_tokens,
        num_rows=config.scheduler.max_num_seqs,
        dtype=planned.dtype.name,
        device=planned.device,
        sampling=config.sampling,
        products=planned.products(),
    )
