"""Of models as large as people run, headers say what a run without values counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from penstock.config import EngineConfig
from penstock.device.dtypes import DtypeChoice
from penstock.engine.model_sizes import PlannedModel, _size_without_memory, size_model
from penstock.loader.headers import TensorHeader
from penstock.worker.estimate import WORKSPACE_BYTES
from support.checkpoints import edit_config

pytestmark = pytest.mark.slow
# The most is missed in Apertus, whose activation has masks too.
TOLERANCE = {"float32": 0.04, "bfloat16": 0.08}
# Without arguments their configurations are those of the models that they were made for.
CLASSES = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GraniteMoeForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "Jais2ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Olmo3ForCausalLM",
    "PhimoeForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
)


def save_without_weights(class_name: str, folder: Path) -> dict[str, TensorHeader]:
    """`config.json`, and the headers that a checkpoint would have."""
    model_class: type[PreTrainedModel] = getattr(transformers, class_name)
    config = model_class.config_class()
    config.save_pretrained(folder)
    edit_config(folder, architectures=[class_name])
    with torch.device("meta"):
        model = model_class._from_config(config)
    headers = {name: TensorHeader("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        headers.pop("lm_head.weight")
    return headers


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("class_name", CLASSES)
def test_models_of_the_hub(tmp_path: Path, class_name: str, compute: str) -> None:
    headers = save_without_weights(class_name, tmp_path)
    config = EngineConfig.create(str(tmp_path), model_impl="transformers")
    dtype = DtypeChoice(compute, "", "bfloat16")
    planned = PlannedModel(config, headers, dtype, compute, "cuda", config.model.longest_context)
    derived, counted = size_model(planned), _size_without_memory(planned, "it is asked for")
    assert derived.remark.startswith("estimated as a decoder of usual layers")
    assert list(derived.specs.values()) == list(counted.specs.values())
    assert derived.num_heads == counted.num_heads
    assert derived.num_parameters == pytest.approx(counted.num_parameters, rel=0.001)
    assert derived.weights == pytest.approx(counted.weights, rel=0.001)
    tensors = derived.step.activations - WORKSPACE_BYTES["cuda"]
    assert tensors == pytest.approx(counted.step.activations, rel=TOLERANCE[compute])
