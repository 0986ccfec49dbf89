"""Sweep over the causal language models of Transformers: each made tiny, with random weights, and compared.

A model type either gives the greedy tokens and log-probabilities of Transformers in float32, the same bits alone and
in a batch, or is refused with a reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.models.registry import refuse_unsuitable, supported_architectures
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.transformers_models import TINY, randomise, small_fields

NATIVE, THROUGH_TRANSFORMERS, REFUSED = "native", "through Transformers", "refused"
_NUM_TOKENS = 8
_PROMPTS = random_prompts((1, 3, 40, 17, 33, 8), VOCAB_SIZE)
_MOST_PARAMETERS = 5_000_000
_OPTIONS = {"max_num_batched_tokens": 40, "block_size": 4, "dtype": "float32", "kv_cache_dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: one of the three above. reason: of a refusal."""

    kind: str
    reason: str = ""


def class_names() -> dict[str, str]:
    """Classes of causal language models by their model type."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcome_of(model_type: str, folder: Path, *, model_impl: str = "auto") -> Outcome:
    """Run a tiny model of this type. Raises AssertionError for a wrong answer."""
    class_name = class_names()[model_type]
    _write_config(CONFIG_MAPPING[model_type](), class_name, folder)
    try:
        refuse_unsuitable(EngineConfig.create(str(folder), model_impl=model_impl, device="cpu").model)
        oracle = _tiny_model(class_name, _tiny_config(model_type))
        save_checkpoint(oracle, folder)
        core = make_core(folder, model_impl=model_impl, **_OPTIONS)
    except PenstockError as error:
        return Outcome(REFUSED, _reason(error, folder))
    try:
        together = run(core, _PROMPTS, greedy(_NUM_TOKENS, logprobs=5))
        alone = [run(core, [prompt], greedy(_NUM_TOKENS, logprobs=5))[0] for prompt in _PROMPTS]
    finally:
        core.close()
    for prompt, one, other in zip(_PROMPTS, together, alone, strict=True):
        assert len(one.tokens) == _NUM_TOKENS, one.error
        assert_greedy_continuation(oracle, prompt, one)
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs), "other bits alone and in a batch"
    is_native = model_impl == "auto" and class_name in supported_architectures()
    return Outcome(NATIVE if is_native else THROUGH_TRANSFORMERS)


def _tiny_config(model_type: str) -> PretrainedConfig:
    class_name, config_class = class_names()[model_type], CONFIG_MAPPING[model_type]
    wanted = getattr(transformers, class_name).config_class
    if config_class.sub_configs and config_class is not wanted:
        config_class = wanted  # of the language model in a model of several media
    config = config_class(**{**TINY, **small_fields(class_name, config_class)})
    config._attn_implementation = "eager"
    return config


def _tiny_model(class_name: str, config: PretrainedConfig) -> transformers.PreTrainedModel:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    assert num_parameters < _MOST_PARAMETERS, f"{num_parameters:,} parameters: fields that make it tiny are missing"
    return randomise(model_class(config))


def _write_config(config: PretrainedConfig, class_name: str, folder: Path) -> None:
    content = {"vocab_size": VOCAB_SIZE, **config.to_dict(), "architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps(content, default=str))


def _reason(error: PenstockError, folder: Path) -> str:
    """The reason of a refusal, as short as a table needs it."""
    text = str(error).split("cannot run through Transformers on paged attention: ")[-1]
    return text.replace(f"{folder}", "MODEL").rstrip(".")
