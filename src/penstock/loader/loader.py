"""A model, ready to run, from its configuration and its weight files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE
from penstock.errors import CheckpointError
from penstock.layers.linear import process_weights_after_loading
from penstock.loader.dummy import iterate_dummy_weights
from penstock.loader.pytorch_bin import iterate_pytorch_bins
from penstock.loader.safetensors import check_safetensors, iterate_safetensors
from penstock.loader.sharded_state import find_sharded_files, state_slots
from penstock.loader.weight_files import PYTORCH_BIN, SAFETENSORS, find_weight_files, what_is_there
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import describe_implementation, find_model_class
from penstock.parallel import ParallelContext

logger = logging.getLogger(__name__)


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel_context: ParallelContext,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalLM:
    """The model on `device` in `dtype`, whatever dtype the checkpoint has.

    Needs the model's memory once: it is built without any, and its weights are copied tensor by tensor from the mapped
    files. Raises UnsupportedModel, UnsupportedFeature or ModelError for what `config.json` says, CheckpointError for
    weights that are damaged or do not fit.
    """
    logger.info("Implementation: %s", describe_implementation(model_config))
    model = build_model(model_config, parallel_context)
    materialise(model, device, dtype)
    try:
        if load_config.load_format == SHARDED_STATE:
            files = find_sharded_files(model_config.folder, load_config.sharded_state_pattern, parallel_context)
            weights = _with_progress(iterate_safetensors(files), check_safetensors(files), load_config)
            model.load_weights(weights, state_slots(model))
        else:
            model.load_weights(open_weights(model, model_config.folder, load_config))
    except CheckpointError as error:
        raise CheckpointError(f"The weights in {model_config.folder} cannot be loaded. {error}") from error
    process_weights_after_loading(model)
    return model.eval()


def build_model(model_config: ModelConfig, parallel_context: ParallelContext) -> CausalLM:
    """The model without weights: its parameters are on the meta device and take no memory."""
    model_class = find_model_class(model_config)
    with torch.device("meta"):
        return model_class(model_config, parallel_context)


def open_weights(model: CausalLM, folder: Path, load_config: LoadConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder's checkpoint, in the format that `load_config` asks for.

    Raises CheckpointError when the folder holds none, or a file is damaged.
    """
    load_format = load_config.load_format
    if load_format == "dummy":
        return iterate_dummy_weights(model.checkpoint_slots())
    if load_format in ("auto", "safetensors"):
        files = find_weight_files(folder, SAFETENSORS)
        if files is not None:
            return _with_progress(iterate_safetensors(files), check_safetensors(files), load_config)
    if load_format in ("auto", "pt"):
        files = find_weight_files(folder, PYTORCH_BIN)
        if files is not None:
            return _with_progress(iterate_pytorch_bins(files), None, load_config)
    wanted = {"safetensors": SAFETENSORS.single, "pt": PYTORCH_BIN.single}
    names = wanted.get(load_format, " or ".join(wanted.values()))
    raise CheckpointError(
        f"There is no {names}, nor an index of shards (load_format={load_format!r}). {what_is_there(folder)}"
    )


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model that was built on the meta device uninitialised parameters, and move its buffers.

    Parameters that layers share stay shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            assert not buffer.is_meta, f"{type(module).__name__}.{name} has no value"
            setattr(module, name, buffer.to(device))


def _with_progress(
    weights: Iterator[tuple[str, Tensor]], num_tensors: int | None, load_config: LoadConfig
) -> Iterator[tuple[str, Tensor]]:
    # None disables the bar where standard error is no terminal.
    disable = None if load_config.use_tqdm_on_load else True
    return iter(tqdm(weights, total=num_tensors, desc="Loading weights", unit="tensor", disable=disable, leave=False))
