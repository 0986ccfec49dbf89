"""Adapter tables of a model's layers: which matrices of an adapter go where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.config import EngineConfig, LoRAConfig
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.features.lora.checkpoint import some_of
from penstock.features.lora.low_rank import LowRank
from penstock.features.lora.stacked import StackedParameters
from penstock.kernels.adapters import AdapterTable, PackedAdapter, Piece, TableShape, adapter_table, table_bytes
from penstock.layers.adapters import ADAPTER_SLOTS, HEAD_SLOTS, EmbeddingAdapters, LinearAdapters
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import AdapterPlace, LinearLayer
from penstock.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with adapters. names, places: of each piece; names are those of its modules in Transformers."""

    names: tuple[str, ...]
    places: tuple[AdapterPlace, ...]
    adapters: LinearAdapters | EmbeddingAdapters
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class PackedModelAdapter:
    """An adapter of a model, in the layout of its tables.

    pieces: by number of the layer. embedding_a: A^T of the embedding's adapter, [V, R]. has_head: it changes the LM
    head. digest: of its matrices, if it is wanted.
    """

    pieces: Mapping[int, Sequence[PackedAdapter | None]]
    embedding_a: Tensor | None
    has_head: bool
    digest: str = ""

    @property
    def has_embedding(self) -> bool:
        """Whether it changes the embedding."""
        return self.embedding_a is not None


class AdapterTables:
    """Tables of all layers of a model that adapters may change. Slots are the caller's to give; layers never change.

    compute_dtype: of the model's rows. Raises UnsupportedFeature for a model without such layers.
    """

    def __init__(self, model: nn.Module, config: LoRAConfig, device: torch.device, compute_dtype: torch.dtype) -> None:
        self._max_rank, self._num_slots = config.max_lora_rank, config.max_loras
        self._dtype = compute_dtype if config.lora_dtype == "auto" else getattr(torch, config.lora_dtype)
        self._device, self._compute_dtype = device, compute_dtype
        self._config = config
        modules, by_module = _modules(model, config), _by_module(model, config)
        found = [(modules[next(iter(names))][0], names) for names in by_module]
        self._layers = tuple(self._layer(model, module, names) for module, names in found if module is not None)
        self._places = _places_of(self._layers, by_module)
        of_embedding = (n for n, layer in enumerate(self._layers) if isinstance(layer.adapters, EmbeddingAdapters))
        self._embedding = next(of_embedding, None)
        self.attach(model)

    @property
    def vocab_size(self) -> int:
        """Rows of an adapter in the table of the embedding; 0 without an embedding on this rank."""
        return 0 if self._embedding is None else self._layers[self._embedding].places[0].shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of all tables."""
        return [tensor for layer in self._layers for tensor in layer.adapters.tensors]

    def attach(self, model: nn.Module) -> None:
        """Apply the tables in a model of the same shape, such as one that replaces the present one."""
        by_name = _modules(model, self._config)
        self._modules = tuple(_with_adapters(by_name[layer.names[0]][0]) for layer in self._layers)
        for module, layer in zip(self._modules, self._layers, strict=True):
            module.adapters = layer.adapters
        assert isinstance(model, CausalLM), "it has modules with adapters"
        self.stacked, self.named = StackedParameters(model.stacked_parameters()), model.module_name

    def pack(self, name: str, matrices: Mapping[str, LowRank]) -> PackedModelAdapter:
        """Convert this rank's part of an adapter. Raises CheckpointError, naming them, for matrices without a place."""
        unknown = [module for module in matrices if module not in self._places]
        if unknown:
            allowed = "linear layers and the token embedding"
            if self._config.lora_target_modules is not None:
                allowed = f"those of lora_target_modules={list(self._config.lora_target_modules)}"
            raise CheckpointError(
                f"The adapter {name!r} has weights of {len(unknown)} modules that adapters of this model cannot "
                f"change: {some_of(unknown)}. Allowed: {allowed}, such as {some_of(list(self._places)[-3:])}."
            )
        pieces: dict[int, list[PackedAdapter | None]] = {}
        embedding_a: Tensor | None = None
        for module, low_rank in matrices.items():
            self._check_finite(name, module, low_rank)
            where = self._places[module]
            if where is None:
                continue
            number, piece = where
            layer = self._layers[number]
            place = layer.places[piece]
            _check_shapes(name, module, low_rank, place, is_embedding=number == self._embedding)
            if low_rank.base is not None:
                _check_base(name, module, low_rank.base, self._modules[number], place)
            a_RI, b_OR = low_rank.a, low_rank.b
            if number == self._embedding:
                embedding_a = a_RI.to(self._dtype).t().contiguous()
                packed = layer.adapters.table.pack(None, b_OR, low_rank.scaling)
            else:
                a_RI = a_RI if place.input_part is None else place.input_part.of(a_RI)
                b_OR = b_OR if place.output_part is None else place.output_part.of(b_OR)
                packed = layer.adapters.table.pack(a_RI, b_OR, low_rank.scaling)
            pieces.setdefault(number, [None] * len(layer.places))[piece] = packed
        return PackedModelAdapter(pieces, embedding_a, any(self._layers[number].is_head for number in pieces))

    def _check_finite(self, name: str, module: str, low_rank: LowRank) -> None:
        """Raise CheckpointError for matrices or a scaling beyond the dtypes in which they are kept and multiplied."""
        kept, computed = torch.finfo(self._dtype).max, torch.finfo(self._compute_dtype).max
        a, b, scaling = _largest(low_rank.a), _largest(low_rank.b), low_rank.scaling
        if not (a <= kept and b <= kept and scaling <= computed and b * scaling <= computed):
            raise CheckpointError(
                f"The adapter {name!r} has matrices of {module} with values up to {a:g} and {b:g}, and a scaling of "
                f"{scaling:g}. Allowed: finite values, also when scaled, of {self._dtype} and {self._compute_dtype}. "
                "Check its tensors, and lora_alpha and r in its adapter_config.json."
            )

    def write(self, slot: int, adapter: PackedModelAdapter) -> None:
        """Put an adapter into a slot of every table."""
        for number, layer in enumerate(self._layers):
            if number in adapter.pieces:
                layer.adapters.table.write(slot, adapter.pieces[number])
            else:
                layer.adapters.table.clear(slot)
        if adapter.embedding_a is not None and self._embedding is not None:
            adapters = self._layers[self._embedding].adapters
            assert isinstance(adapters, EmbeddingAdapters), "it is the embedding's"
            rows_VR = adapters.rows_XR[slot * self.vocab_size : (slot + 1) * self.vocab_size]
            rows_VR[:, : adapter.embedding_a.shape[1]].copy_(adapter.embedding_a)

    def _layer(self, model: nn.Module, module: nn.Module, names: Mapping[str, str | None]) -> _Layer:
        """A layer with empty tables. names: of its module, each with its shard."""
        if isinstance(module, VocabEmbedding):
            shape = module.hidden_size, module.vocab_size
            place = AdapterPlace(0, module.hidden_size, shape)
            return _Layer(tuple(names), (place,), self._embedding_adapters(*shape))
        assert isinstance(module, LinearLayer), f"{next(iter(names))} is a {type(module).__name__}"
        places = tuple(module.adapter_place(shard) for shard in names.values())
        is_head = isinstance(model, CausalLM) and model.is_in_head(module)
        adapters = LinearAdapters(self._table(module.input_size, *places), HEAD_SLOTS if is_head else ADAPTER_SLOTS)
        return _Layer(tuple(names), places, adapters, is_head)

    def _table(self, in_features: int | None, *places: AdapterPlace) -> AdapterTable:
        pieces = tuple(Piece(place.first_output, place.num_outputs) for place in places)
        shape = TableShape(self._num_slots, self._max_rank, in_features, pieces)
        return adapter_table(shape, self._dtype, self._device, self._compute_dtype)

    def _embedding_adapters(self, hidden_size: int, vocab_size: int) -> EmbeddingAdapters:
        size = self._num_slots * vocab_size, self._max_rank
        rows_XR = torch.zeros(*size, dtype=self._dtype, device=self._device)
        table = self._table(None, AdapterPlace(0, hidden_size, (hidden_size, vocab_size)))
        return EmbeddingAdapters(rows_XR, table)


def adapter_bytes(engine: EngineConfig, model: nn.Module, kind: str, compute_dtype: torch.dtype) -> int:
    """Bytes of a model's adapters on the device: those in slots, and on a CPU those in host memory too.

    The model may be on the meta device. kind: of the device. Raises UnsupportedFeature as `AdapterTables`.
    """
    config = engine.lora
    dtype = compute_dtype if config.lora_dtype == "auto" else getattr(torch, config.lora_dtype)
    num_bytes, modules = 0, _modules(model, config)
    for names in _by_module(model, config):
        module, _ = modules[next(iter(names))]
        if isinstance(module, VocabEmbedding):
            num_inputs, pieces = module.vocab_size, [Piece(0, module.hidden_size)]
        elif isinstance(module, LinearLayer):
            places = [module.adapter_place(shard) for shard in names.values()]
            num_inputs, pieces = module.input_size, [Piece(place.first_output, place.num_outputs) for place in places]
        else:
            continue
        num_bytes += table_bytes(TableShape(1, config.max_lora_rank, num_inputs, tuple(pieces)), dtype)
    return num_bytes * (config.max_loras + (config.num_on_host if kind == "cpu" else 0))


def _modules(model: nn.Module, config: LoRAConfig) -> Mapping[str, tuple[nn.Module | None, str | None]]:
    modules = model.modules_by_name() if isinstance(model, CausalLM) else {}
    if modules and config.lora_target_modules is not None:
        modules = {name: module for name, module in modules.items() if config.may_change(name)}
        if not modules:
            raise ConfigError(
                f"lora_target_modules={list(config.lora_target_modules)} names no module of this model. Give ends of "
                "names, such as 'q_proj', or leave it out."
            )
    if not modules:
        raise UnsupportedFeature(
            f"enable_lora: {type(model).__name__} has no layers that adapters may change. Merge the adapter into a "
            "checkpoint."
        )
    return modules


def _with_adapters(module: nn.Module | None) -> LinearLayer | VocabEmbedding:
    assert isinstance(module, (LinearLayer, VocabEmbedding)), "the model has the same shape"
    return module


def _places_of(
    layers: Sequence[_Layer], by_module: Sequence[Mapping[str, str | None]]
) -> Mapping[str, tuple[int, int] | None]:
    """Number of the layer, and of the piece, by module name; None on another pipeline stage."""
    here = {name: (number, piece) for number, one in enumerate(layers) for piece, name in enumerate(one.names)}
    return {name: here.get(name) for names in by_module for name in names}


def _by_module(model: nn.Module, config: LoRAConfig) -> list[dict[str, str | None]]:
    """Names of each module's shards; modules of other stages by themselves."""
    found: dict[object, dict[str, str | None]] = {}
    for name, (module, shard) in _modules(model, config).items():
        if module is None or isinstance(module, (LinearLayer, VocabEmbedding)):
            found.setdefault(name if module is None else id(module), {})[name] = shard
    return list(found.values())


def _largest(matrix: Tensor) -> float:
    """Largest magnitude in a matrix; NaN if it has one."""
    return float(matrix.abs().max()) if matrix.numel() else 0.0


def _check_base(name: str, module: str, base: Tensor, layer: LinearLayer | VocabEmbedding, place: AdapterPlace) -> None:
    """Raise CheckpointError for an adapter that comes with another weight of its module than the model's."""
    own = layer.loaded_weight()
    whole, part = place.shape, place.output_part or place.input_part
    if isinstance(layer, VocabEmbedding):
        whole, part = place.shape[::-1], layer.slots()["weight"].part
    is_same = tuple(base.shape) == tuple(whole)
    if is_same and own is not None:
        is_same = torch.equal(own, (base if part is None else part.of(base)).to(own))
    if not is_same:
        raise CheckpointError(
            f"The adapter {name!r} has another {module}.base_layer.weight than the model. Take the model that it was "
            "trained on, or save it with save_embedding_layers=False."
        )


def _check_shapes(name: str, module: str, low_rank: LowRank, place: AdapterPlace, *, is_embedding: bool) -> None:
    if low_rank.is_embedding is not is_embedding:
        kind = "an embedding" if is_embedding else "a linear layer"
        raise CheckpointError(f"The adapter {name!r} has other matrices for {module} than those of {kind}.")
    shape = low_rank.b.shape[0], low_rank.a.shape[1]
    if shape != place.shape:
        raise CheckpointError(
            f"The adapter {name!r} changes {module} as a weight of {list(shape)}, but it has {list(place.shape)}. Take "
            "an adapter of this model."
        )
