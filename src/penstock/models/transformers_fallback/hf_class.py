"""Which class of Transformers implements an architecture, and whether its kind of model can run on paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import ModelConfig
from penstock.config.quantized_checkpoint import refuse_quantized_checkpoint
from penstock.errors import ModelError, UnsupportedModel
from penstock.models.registry import supported_architectures
from penstock.models.transformers_fallback.refusal import CannotRun

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def find_hf_class(model_config: ModelConfig) -> type[PreTrainedModel]:
    """The class that `architectures` names.

    Raises UnsupportedModel when Transformers has none, CannotRun when it is no causal language model.
    """
    architecture = model_config.architecture
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        remote = " Its own code (auto_map) is not run." if "auto_map" in model_config.hf_config else ""
        raise UnsupportedModel(
            f"{model_config.model} has the architecture {architecture!r} "
            f"(model_type={model_config.hf_config.get('model_type')!r}), which is not implemented here, nor in "
            f"Transformers {transformers.__version__}.{remote} "
            f"Implemented here: {', '.join(supported_architectures())}."
        )
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise CannotRun("it is no causal language model")
    return found


def read_hf_config(model_config: ModelConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """`config.json` as the class wants it.

    Raises ModelError when Transformers does not take it, UnsupportedFeature for a quantized model.
    """
    refuse_quantized_checkpoint(model_config.hf_config, model_config.model)
    try:
        config = model_class.config_class.from_dict(_decode_floats(model_config.hf_config))
    except Exception as error:
        raise ModelError(
            f"config.json of {model_config.model} is not one that Transformers {transformers.__version__} takes for "
            f"{model_class.__name__}: {error}"
        ) from error
    # What it returns, whatever the file says.
    config.return_dict, config.use_cache = True, False
    config.output_hidden_states, config.output_attentions = False, False
    return config


def _decode_floats(value: Any) -> Any:
    """Numbers that JSON lacks, such as infinity, which Transformers writes as an object with one field."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _decode_floats(one) for name, one in value.items()}
    return [_decode_floats(one) for one in value] if isinstance(value, list) else value


def refuse_unsuitable(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raises CannotRun for kinds of models that say themselves why paged attention alone cannot run them."""
    if getattr(config, "is_encoder_decoder", False):
        raise CannotRun("it is an encoder-decoder model")
    if getattr(config, "add_cross_attention", False):
        raise CannotRun("it has cross attention")
    if getattr(model_class, "_is_stateful", False):
        raise CannotRun("it keeps a recurrent state, as Mamba does, beside or instead of keys and values")
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(kinds) - _ATTENTION_KINDS)
    if others:
        raise CannotRun(f"it has layers of the kind {', '.join(others)} (layer_types)")
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise CannotRun("its attention does not go through the attention interface of Transformers")
