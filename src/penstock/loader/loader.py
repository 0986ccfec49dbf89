"""Model loading from the configuration and the weight files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.checkpoints.json_file import clipped
from penstock.checkpoints.size_limits import describe_sizes
from penstock.config import EngineConfig, LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE, STATES
from penstock.device.operator_sizes import META
from penstock.device.stand_in import standing_for
from penstock.errors import CheckpointError, ConfigError, ModelError, OutOfMemory, PenstockError, UnsupportedFeature
from penstock.layers.experts import Experts
from penstock.layers.linear import LinearLayer, has_bfloat16_products, process_weights_after_loading
from penstock.layers.weights import WidensWeight
from penstock.loader.arrangement import Arrangement
from penstock.loader.dummy import iterate_dummy_weights
from penstock.loader.gguf.tensors import find_gguf
from penstock.loader.kv_cache_scales import CheckpointScales
from penstock.loader.live_memory import LiveMemory
from penstock.loader.packed_state import Layouts, PackedLayers, PackedState, layouts_of
from penstock.loader.plausible_size import check_against_files, check_against_memory
from penstock.loader.pytorch_bin import check_pytorch_bins, iterate_pytorch_bins
from penstock.loader.quantized.assembly import OptionRounding, Rounding, assemble, linear_weights, stays_float
from penstock.loader.quantized.choose import choose_rounding, log_rounding
from penstock.loader.resharding import Resharding, SavedRanks
from penstock.loader.safetensors import check_safetensors, iterate_safetensors, peek_safetensors
from penstock.loader.sharded_state import RankFiles, find_packed_state, find_sharded_files, find_state, state_slots
from penstock.loader.tensor_parallel_sizes import UnjoinedGroup, naming_sizes
from penstock.loader.tied_weights import StoredTies, find_ties, find_ties_of_state, log_ties, untied
from penstock.loader.weight_files import (
    PYTORCH_BIN,
    SAFETENSORS,
    WeightFiles,
    find_weight_files,
    has_weight_files,
    what_is_there,
)
from penstock.loader.weight_source import WeightSource
from penstock.models.attention_layers import attention_layers, choose_attention_arithmetic
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import describe_implementation, find_model_class, runs_through_transformers
from penstock.observability.progress_bar import progress_bar
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState

logger = logging.getLogger(__name__)
_OF_STATES = (
    " A sharded state is of use to engines like the one that saved it: with a head that drafts, or another version of "
    "Penstock, load the checkpoint, and save its state anew (save_sharded_state)."
)


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel_context: ParallelState,
    device: torch.device,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    *,
    source: WeightSource | None = None,
    memory: LiveMemory | None = None,
) -> CausalLM:
    """Load the model on `device`, computing in `dtype`, whatever the checkpoint's dtype.

    weights_dtype: storage dtype of matrices, if narrower than `dtype`. source: weights in place of the files'. memory:
    of a live model, which gets the weights, so that the returned one cannot run; None allocates.

    Needs the model's memory once: it is built on the meta device, and its weights are copied tensor by tensor from the
    mapped files. Raises UnsupportedModel, UnsupportedFeature or ModelError for its `config.json`, CheckpointError for
    weights that are damaged or do not fit.
    """
    saved = None
    if source is None and load_config.load_format in STATES:
        with _naming(model_config.folder, load_config):
            saved = find_state(model_config.folder, load_config, parallel_context)
            if saved is not None and saved.header is not None:
                dtypes = dtype, weights_dtype
                return restore(saved.read(), model_config, parallel_context, device.type, device, *dtypes, memory)
    rounding = choose_rounding(model_config, load_config, device.type)
    if memory is None:
        if rounding is not None:
            log_rounding(rounding, device)
        logger.info("Implementation: %s", describe_implementation(model_config))

    def load_for(context: ParallelState) -> object:
        return load_without_memory(model_config, load_config, context, device.type, dtype, weights_dtype)

    with _naming(model_config.folder, load_config, source), naming_sizes(parallel_context, load_for):
        if source is None:
            model, ties = _build_as_stored(model_config, load_config, parallel_context)
            log_ties(ties)
        else:
            model = build_like(source.like, model_config, parallel_context)
        if memory is not None:
            memory.check(model)
        if source is not None:
            tensors = source.pieces(model, is_state=load_config.load_format == SHARDED_STATE)
        elif load_config.load_format == "dummy":
            check_against_memory(model, model_config, device)
            tensors = iterate_dummy_weights(model.checkpoint_slots(), device)
        else:
            if isinstance(saved, RankFiles):
                tensors = _reshard(saved.read(), model, model_config, parallel_context, device.type).parameters()
            else:
                tensors = open_weights(model_config.folder, load_config, parallel_context)
            check_against_files(model, model_config)
            if load_config.load_format != SHARDED_STATE:
                tensors = ties.apply(model, tensors)
        is_exact = model_config.dtype == "auto" and load_config.load_format not in ("dummy", SHARDED_STATE)
        if is_exact and rounding is None and weights_dtype is not None and weights_dtype != dtype:
            tensors = _warn_of_rounding(tensors, weights_dtype)
        _fill(model, tensors, model_config, load_config, rounding, device, dtype, weights_dtype, source, memory)
    # Without gradients, so that steps need no `no_grad`. One that has given its weights away runs no steps.
    return model if memory is not None else model.eval().requires_grad_(False)


def load_without_memory(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel_context: ParallelState,
    kind: str,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> tuple[CausalLM, int]:
    """Load the model for this kind of device on the meta device: every weight in its final form, without values.

    tensors: meta tensors of the checkpoint, if its files are not local. Raises what `load_model` raises. Returns the
    number of parameters too, which packed weights do not show.
    """
    saved = None
    if tensors is None and load_config.load_format in STATES:
        with _naming(model_config.folder, load_config):
            saved = find_state(model_config.folder, load_config, parallel_context)
            if saved is not None and saved.header is not None:
                model = restore(saved.peek(), model_config, parallel_context, kind, META, dtype, weights_dtype)
                return model, sum(
                    parameter.numel() for parameter in build_model(model_config, parallel_context).parameters()
                )
    rounding = choose_rounding(model_config, load_config, kind)
    if tensors is not None:
        tensors = list(tensors)

    def load_for(context: ParallelState) -> object:
        return load_without_memory(model_config, load_config, context, kind, dtype, weights_dtype, tensors)

    with _naming(model_config.folder, load_config), naming_sizes(parallel_context, load_for):
        model, ties = _build_as_stored(model_config, load_config, parallel_context, tensors)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if load_config.load_format == "dummy":
            slots = model.checkpoint_slots()
            tensors = [(name, torch.empty(slot.shape, device=META)) for name, slot in slots.items()]
        else:
            if tensors is None:
                if isinstance(saved, RankFiles):
                    tensors = _reshard(saved.peek(), model, model_config, parallel_context, kind).parameters()
                else:
                    tensors = peek_weights(model_config.folder, load_config, parallel_context)
                tensors = list(tensors)
                check_against_files(model, model_config)
            if load_config.load_format != SHARDED_STATE:
                tensors = ties.apply(model, tensors)
        with standing_for(kind):
            _fill(model, tensors, model_config, load_config, rounding, META, dtype, weights_dtype)
    return model.eval().requires_grad_(False), num_parameters


def _fill(
    model: CausalLM,
    tensors: Iterable[tuple[str, Tensor]],
    model_config: ModelConfig,
    load_config: LoadConfig,
    rounding: Rounding | None,
    device: torch.device,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
    source: WeightSource | None = None,
    memory: LiveMemory | None = None,
) -> None:
    """Allocate and load the weights, each in the final form of its layer."""
    # Quantised layers, and those of a live model, are assembled one at a time; others have memory now.
    is_late = (rounding is not None or memory is not None) and not runs_through_transformers(model_config)
    late = linear_weights(model) if is_late else {}
    materialise(model, device, dtype, weights_dtype, late, None if memory is None else memory.parameter)
    _set_options(model, model_config, has_float_products=rounding is None or rounding.keeps_floats)
    is_state = load_config.load_format == SHARDED_STATE
    slots = state_slots(model) if is_state else None
    scales = CheckpointScales(model, is_state=is_state)
    tensors = scales.take(tensors)
    if late:
        choose = stays_float if rounding is None else rounding.method
        by_layer = rounding is None or isinstance(rounding, OptionRounding)
        kept_dtype = weights_dtype or dtype
        slots = slots or model.checkpoint_slots()
        slots = assemble(slots, late, device, kept_dtype, choose, memory, by_layer=by_layer)
    if source is not None and rounding is not None and not isinstance(rounding, OptionRounding):
        tensors = source.kept(tensors)
    if rounding is not None:
        tensors = rounding.weights(tensors, (slots or {}).__contains__)
    if source is not None:
        tensors = source.noted(tensors, slots or model.checkpoint_slots())
    model.load_weights(tensors, slots)
    scales.apply()
    if not late:
        process_weights_after_loading(model, None if rounding is None else rounding.choose)
    if memory is not None:  # which has the layers' methods
        memory.finish()
        return
    choose_attention_arithmetic(model)
    model.check_loaded()
    _check_arithmetic(model, model_config)


def _set_options(model: CausalLM, model_config: ModelConfig, *, has_float_products: bool) -> None:
    """Set the options of layers. has_float_products: whether layers compute with the weights of the checkpoint."""
    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.are_grouped = model_config.moe_backend == "auto"
        if isinstance(layer, LinearLayer):
            layer.batch_invariant = model_config.batch_invariant
            if has_float_products:
                layer.cpu_arithmetic = model_config.cpu_arithmetic


def restore(
    state: PackedState | SavedRanks,
    model_config: ModelConfig,
    parallel_context: ParallelState,
    kind: str,
    device: torch.device,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    memory: LiveMemory | None = None,
) -> CausalLM:
    """Restore a model from a packed state: nothing is quantised, and packed only for other kernels than the state's.

    kind: of the device, which the meta device stands for. Otherwise as `load_model`. Raises CheckpointError for a state
    that cannot be read here, or of another model.
    """
    assert state.header is not None, "of packed weights"
    layouts = layouts_of(state.header, model_config, kind)
    model = build_model(model_config, parallel_context)
    if model.tied_weights() and not state.header.is_tied:
        model = build_model(untied(model_config), parallel_context)
    if memory is not None:
        memory.check(model)
    if isinstance(state, SavedRanks):
        state = _reshard(state, model, model_config, parallel_context, kind, layouts).packed_state()
    scales = CheckpointScales(model, is_state=True)
    tensors = dict(scales.take(state.tensors.items()))
    with standing_for(kind) if device == META else torch.no_grad():
        layers = PackedLayers(model, state, kind, layouts)
        given = state.place if memory is None else memory.parameter
        materialise(model, device, dtype, weights_dtype, layers.late, given)
        _set_options(model, model_config, has_float_products=False)
        layers.fill(tensors, device, None if memory is None else memory.take)
    if tensors:
        raise CheckpointError(
            f"The packed weights have {len(tensors)} tensors that the model does not, such as {min(tensors)}. They are "
            "damaged, or of another model. Save them again."
        )
    scales.apply()
    if memory is not None:
        memory.finish()
    else:
        choose_attention_arithmetic(model)
        model.check_loaded()
    return model.eval().requires_grad_(False)


def _reshard(
    saved: SavedRanks,
    model: CausalLM,
    model_config: ModelConfig,
    parallel_context: ParallelState,
    kind: str,
    layouts: Layouts | None = None,
) -> Resharding:
    """Let a rank's model, on the meta device, have its shares of the states of another arrangement."""
    build = partial(build_like, model, model_config)
    return Resharding(model, saved, Arrangement.of(parallel_context), build, kind, layouts)


def _check_arithmetic(model: CausalLM, model_config: ModelConfig) -> None:
    """Raise ConfigError if bfloat16 arithmetic is asked for and no layer can have it."""
    has_layers = any(isinstance(module, LinearLayer) for module in model.modules())
    if model_config.cpu_arithmetic == "bfloat16" and has_layers and not has_bfloat16_products(model):
        raise ConfigError(
            f"cpu_arithmetic='bfloat16' is not valid for {model_config.model} here: it needs unquantized weights in "
            "bfloat16 (dtype='bfloat16' converts them), on the CPU, with the C++ kernels. Use cpu_arithmetic='auto'."
        )


@contextmanager
def _naming(folder: Path, load_config: LoadConfig, source: WeightSource | None = None) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        if source is not None:
            raise CheckpointError(f"The weights of this update cannot be loaded. {error}") from error
        hint = _OF_STATES if load_config.load_format == SHARDED_STATE else ""
        raise CheckpointError(f"The weights in {folder} cannot be loaded. {error}{hint}") from error


def build_model(model_config: ModelConfig, parallel_context: ParallelState) -> CausalLM:
    """Build the model on the meta device, without memory.

    Raises ModelError for an invalid configuration, and what the model's own checks raise.
    """
    model_class = find_model_class(model_config)
    try:
        with torch.device("meta"):
            return model_class(model_config, parallel_context)
    except PenstockError:
        raise
    except Exception as error:  # PyTorch errors from unchecked sizes and types
        reason = clipped(str(error).strip().split("\n", 1)[0])
        raise ModelError(
            f"{model_config.folder / 'config.json'} describes a model ({describe_sizes(model_config.hf_config)}) that "
            f"cannot be built: {type(error).__name__}: {reason}. One of its fields is wrong."
        ) from error


def check_parallel_sizes(config: EngineConfig) -> None:
    """Raise UnsupportedFeature unless the model can be split by tensor_parallel_size, with the possible sizes, and its
    KV cache by decode_context_parallel_size.

    Models that run through Transformers are refused elsewhere.
    """
    size, num_shares = config.parallel.tensor_parallel_size, config.parallel.decode_context_parallel_size
    if size == 1 or runs_through_transformers(config.model):
        return
    context = ParallelState(tensor=UnjoinedGroup(size), context=UnjoinedGroup(num_shares))
    with naming_sizes(context, partial(build_model, config.model)):
        model = build_model(config.model, context)
    if num_shares > 1 and all(layer.context is None for layer in attention_layers(model).values()):
        raise UnsupportedFeature(
            f"decode_context_parallel_size={num_shares} with {config.model.architecture}: none of its layers has a KV "
            "cache that can be sharded by positions. Leave decode_context_parallel_size out."
        )


def build_like(live: CausalLM, model_config: ModelConfig, parallel_context: ParallelState) -> CausalLM:
    """Build the model on the meta device, with the ties of a live one."""
    model = build_model(model_config, parallel_context)
    if model.tied_weights() and not live.tied_weights():
        return build_model(untied(model_config), parallel_context)
    return model


def _build_as_stored(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel_context: ParallelState,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> tuple[CausalLM, StoredTies]:
    """Build the model with weights tied as in the checkpoint.

    tensors: meta tensors of the checkpoint, if its files are not local.
    """
    model = build_model(model_config, parallel_context)
    if load_config.load_format == "dummy" or not model.tied_weights():
        return model, StoredTies()
    if tensors is None or has_weight_files(model_config.folder):
        pairs = model.tied_weights()
        names = {*pairs, *pairs.values()}
        tensors = peek_weights(
            model_config.folder, load_config, parallel_context, lambda name: model.checkpoint_name(name) in names
        )
    is_state = load_config.load_format == SHARDED_STATE
    ties = find_ties_of_state(model, tensors) if is_state else find_ties(model, tensors)
    return (build_model(untied(model_config), parallel_context) if ties.separate else model), ties


def open_weights(
    folder: Path, load_config: LoadConfig, parallel_context: ParallelState
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the checkpoint's tensors, in the format of `load_config`, as views of mapped files.

    Raises CheckpointError for a folder without weights, or a damaged file.
    """
    load_format = load_config.load_format
    files = _safetensors_files(folder, load_config, parallel_context)
    if files is not None:
        return _with_progress(iterate_safetensors(files), check_safetensors(files), load_config)
    if load_format in ("auto", "pt"):
        found = find_weight_files(folder, PYTORCH_BIN)
        if found is not None:
            return _with_progress(iterate_pytorch_bins(found), check_pytorch_bins(found), load_config)
    model = find_gguf(folder, load_config)
    if model is not None:
        model.log_types()
        return _with_progress(model.iterate(), len(model.tensors), load_config)
    wanted = {"safetensors": SAFETENSORS.single, "pt": PYTORCH_BIN.single, "gguf": "GGUF file"}
    names = wanted.get(load_format, " or ".join(wanted.values()))
    raise CheckpointError(
        f"There is no {names}, nor an index of shards (load_format={load_format!r}). {what_is_there(folder)}"
    )


def peek_weights(
    folder: Path,
    load_config: LoadConfig,
    parallel_context: ParallelState,
    has_values: Callable[[str], bool] = lambda _: False,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over meta tensors of the checkpoint, from the headers of its files.

    has_values: whether a tensor of this name is a view of its mapped file instead, except in a GGUF file. So are
    scalars and vectors of integers, which may describe the format of others. Raises what `open_weights` raises.
    """
    model = find_gguf(folder, load_config)
    if model is not None:
        return model.iterate_without_memory()
    files = _safetensors_files(folder, load_config, parallel_context)
    if files is not None:
        check_safetensors(files)
        return peek_safetensors(files, has_values)
    tensors = open_weights(folder, replace(load_config, use_tqdm_on_load=False), parallel_context)
    return ((name, tensor if has_values(name) or tensor.dim() < 2 else tensor.to(META)) for name, tensor in tensors)


def _safetensors_files(folder: Path, load_config: LoadConfig, parallel_context: ParallelState) -> WeightFiles | None:
    """Safetensors files of the checkpoint, if its format is theirs or "auto"; None without any."""
    if load_config.load_format == SHARDED_STATE:
        return find_sharded_files(folder, load_config.sharded_state_pattern, parallel_context).of_names
    return find_weight_files(folder, SAFETENSORS) if load_config.load_format in ("auto", "safetensors") else None


def find_stored_dtype(folder: Path, load_config: LoadConfig, parallel_context: ParallelState) -> str | None:
    """Return `stored_dtype` of a folder's weights; None for missing or damaged ones, which loading reports."""
    if load_config.load_format == "dummy":
        load_config = replace(load_config, load_format="auto")
    try:
        packed = find_packed_state(folder, load_config, parallel_context)
        if packed is not None and packed.header is not None:
            return packed.header.weights_dtype
        return stored_dtype(peek_weights(folder, load_config, parallel_context))
    except CheckpointError:
        return None


def stored_dtype(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the dtype of a checkpoint's matrices: float32 if they differ, None without float matrices.

    Scales of quantised weights do not count.
    """
    dtypes = {
        str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors
        if tensor.dim() > 1
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not name.endswith(("weight_scale", "weight_scale_inv"))
    }
    return dtypes.pop() if len(dtypes) == 1 else "float32" if dtypes else None


def materialise(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    late: Container[int] = frozenset(),
    given: Callable[[str, torch.dtype], Tensor | None] | None = None,
) -> None:
    """Allocate uninitialised parameters of a model on the meta device, and move its buffers.

    Shared parameters stay shared. weights_dtype: storage dtype of the matrices of linear layers and embeddings, which
    compute in `dtype`. late: ids of parameters to skip. given: memory of a parameter or persistent buffer, by its name
    and dtype, in place of a new one; None lets it have a new one. Raises OutOfMemory.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        narrow = None
        if isinstance(module, WidensWeight):
            module.compute_dtype = dtype
            narrow = None if module.shares_weight else weights_dtype
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in late:
                continue
            if parameter not in made:
                kept = narrow if narrow is not None and name == "weight" else dtype
                memory = None if given is None else given(f"{prefix}{name}", kept)
                if memory is None or memory.shape != parameter.shape:
                    memory = _empty(parameter.shape, kept, device)
                made[parameter] = nn.Parameter(memory, requires_grad=False)
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            assert not buffer.is_meta, f"{type(module).__name__}.{name} has no value"
            is_stored = name not in module._non_persistent_buffers_set
            memory = given(f"{prefix}{name}", buffer.dtype) if given is not None and is_stored else None
            setattr(module, name, buffer.to(device) if memory is None else memory)


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # out of memory
        raise OutOfMemory(
            f"There is no memory left on {device} for a weight of the shape {list(shape)} "
            f"({format_bytes(shape.numel() * dtype.itemsize)}). Take a smaller model, or give quantization='int8'."
        ) from error


def _warn_of_rounding(weights: Iterable[tuple[str, Tensor]], narrow: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Warn if the checkpoint's matrices are rounded to a narrower dtype."""
    rounded = []
    for name, tensor in weights:
        if tensor.dim() > 1 and tensor.dtype != narrow:
            rounded.append(f"{name} ({tensor.dtype})")
        yield name, tensor
    if rounded:
        logger.warning(
            "Weights are kept in %s here, but %d matrices of the checkpoint are in another dtype, such as %s, and are "
            "rounded. A new engine would keep them exactly.",
            str(narrow).removeprefix("torch."),
            len(rounded),
            rounded[0],
        )


def _with_progress(
    weights: Iterator[tuple[str, Tensor]], num_tensors: int, load_config: LoadConfig
) -> Iterator[tuple[str, Tensor]]:
    shown = load_config.use_tqdm_on_load
    return iter(
        progress_bar(num_tensors, "Loading weights", is_wanted=shown, iterable=weights, unit="tensor", leave=False)
    )
