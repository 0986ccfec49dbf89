"""Images, audio, video and embeddings in prompts: features of an encoder, or given ones, replace token embeddings."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.contract.memory_tags import WEIGHTS
from penstock.features.multimodal.messages import ENCODE, RESET, MediaPart, StepMediaPart

_MEMORY = "penstock.features.multimodal.memory"


def _takes_media(config: EngineConfig) -> bool:
    return bool(config.model.media_limits) or config.model.enable_prompt_embeds


FEATURE = Feature(
    name="images, audio and video",
    is_on=_takes_media,
    how_to_turn_on="Serve a model that takes them, without language_model_only and with limit_mm_per_prompt above 0; "
    "start with enable_prompt_embeds=True for embeddings.",
    parts=(MediaPart, StepMediaPart),
    scheduler_side="penstock.features.encoder_transfer:make_scheduling",
    worker_side="penstock.features.multimodal.worker:MediaWorker",
    memory={"encoder cache": f"{_MEMORY}:cache_bytes", "inputs of media": f"{_MEMORY}:input_bytes"},
    runs={"encoder activations": f"{_MEMORY}:encode_dummy"},
    worker_methods=(RESET, ENCODE, "get_encoder_timing_stats"),
    memory_of_methods={ENCODE: (WEIGHTS,)},
)
