"""Selection of the Transformers class of an architecture, and checks that it can run on paged attention."""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from penstock.checkpoints.json_file import decode_floats
from penstock.checkpoints.quantized_checkpoint import refuse_quantized_checkpoint
from penstock.config import ModelConfig
from penstock.errors import ModelError, UnsupportedModel
from penstock.models.registry import supported_architectures
from penstock.models.transformers_fallback import own_attention
from penstock.models.transformers_fallback.interface import CannotRun

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_STATE = (
    "it keeps a recurrent state, as Mamba does, beside or instead of keys and values, which native recurrent and "
    "hybrid models have alone"
)
_PLURALS = {"image": "images", "video": "videos"}
# Purposes of classes other than causal language models, by the Transformers table that lists them.
_OTHER_PURPOSES = {
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "it fills in masked tokens instead of going on with a text",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "it classifies texts, which is planned",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "it classifies tokens, which is planned",
    "MODEL_MAPPING_NAMES": "it has hidden states only, and no head that scores tokens; embeddings are planned",
}


def find_suitable(model_config: ModelConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class of `architectures` and its configuration, for a kind of model that paged attention can run.

    Checks the kind of model only, before any field of the configuration.

    Raises CannotRun with the reason; and as `_find_hf_class` and `_read_hf_config`.
    """
    model_class = _find_hf_class(model_config)
    config = _read_hf_config(model_config, model_class)
    _refuse_unsuitable(model_class, config)
    return model_class, config


def refuse_unsuitable_for_pooling(model_config: ModelConfig) -> None:
    """Check the kind of a model that pools. Raises as `find_suitable`."""
    model_class = _find_hf_class(model_config)
    _refuse_more_than_text(model_class, _read_hf_config(model_config, model_class))
    if not model_config.has_longest_context:
        raise CannotRun(
            "config.json limits no context (max_position_embeddings, n_positions), as with attention that knows "
            "distances only, and a length that fits all texts is needed"
        )


def _find_hf_class(model_config: ModelConfig) -> type[PreTrainedModel]:
    """Return the class of `architectures`.

    Raises UnsupportedModel for an architecture that Transformers does not have.
    """
    architecture = model_config.architecture
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        remote = " Its own code (auto_map) is not run." if "auto_map" in model_config.hf_config else ""
        raise UnsupportedModel(
            f"{model_config.model} has the architecture {architecture!r} "
            f"(model_type={model_config.hf_config.get('model_type')!r}), which is not implemented here, nor in "
            f"Transformers {transformers.__version__}.{remote} "
            f"Implemented here, with those of loaded plugins: {', '.join(supported_architectures())}."
        )
    return found


def _read_hf_config(model_config: ModelConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """Parse `config.json` into the class's configuration.

    Raises ModelError when Transformers rejects it, UnsupportedFeature for a quantized model.
    """
    refuse_quantized_checkpoint(model_config.hf_config, model_config.model)
    try:
        config = model_class.config_class.from_dict(decode_floats(model_config.hf_config))
    except Exception as error:
        raise ModelError(
            f"config.json of {model_config.model} is not one that Transformers {transformers.__version__} takes for "
            f"{model_class.__name__}: {error}"
        ) from error
    # The output format needed here, whatever the file says.
    config.return_dict, config.use_cache = True, False
    config.output_hidden_states, config.output_attentions = False, False
    return config


def _refuse_unsuitable(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise CannotRun for kinds of models that paged attention alone cannot run."""
    _refuse_more_than_text(model_class, config)
    if model_class.__name__ not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise CannotRun(_other_purpose(model_class.__name__))
    if getattr(config, "add_cross_attention", False):
        raise CannotRun("it has cross attention, which the native encoder-decoder models have alone")
    if getattr(config.get_text_config(), "num_kv_shared_layers", None):
        raise CannotRun("its last layers read the keys and values of earlier ones (num_kv_shared_layers)")
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(kinds) - _ATTENTION_KINDS)
    if "linear_attention" in others:
        raise CannotRun(_STATE)
    if others:
        raise CannotRun(f"it has layers of the kind {', '.join(others)} (layer_types)")
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    is_known = model_class.__name__ in own_attention.ARCHITECTURES
    if can_set is not None and not can_set() and not is_known:
        raise CannotRun("its attention does not go through the attention interface of Transformers")


def _refuse_more_than_text(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise CannotRun for a model that needs more than texts, or that keeps a state."""
    if getattr(config, "is_encoder_decoder", False):
        raise CannotRun("it is an encoder-decoder model that is not implemented here")
    media = _media(model_class, config)
    if media:
        raise CannotRun(f"it takes {media} in a way that is not implemented; nor does its language model run by itself")
    if getattr(model_class, "_is_stateful", False):
        raise CannotRun(_STATE)


def _media(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """Input media other than text, such as "images and audio"."""
    if not config.sub_configs and model_class.main_input_name == "input_ids":
        return ""  # the text part of a multimodal family, which inherits the family's list
    taken = getattr(model_class, "input_modalities", None) or ()
    others = [_PLURALS.get(medium, medium) for medium in ([taken] if isinstance(taken, str) else taken)]
    return " and ".join(medium for medium in others if medium != "text")


def _other_purpose(class_name: str) -> str:
    for table, purpose in _OTHER_PURPOSES.items():
        if class_name in getattr(modeling_auto, table).values():
            return f"it is not a causal language model: {purpose}"
    return "it is not a causal language model"
