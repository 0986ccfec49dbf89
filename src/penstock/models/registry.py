"""Registry of model architectures. A class is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from penstock.models.causal_lm import CausalLM
    from penstock.parallel import ParallelState

_MODELS = {
    "BambaForCausalLM": "penstock.models.bamba",
    "BartForConditionalGeneration": "penstock.models.bart",
    "BlenderbotForConditionalGeneration": "penstock.models.bart",
    "DeepseekV2ForCausalLM": "penstock.models.deepseek",
    "DeepseekV3ForCausalLM": "penstock.models.deepseek",
    "Dots1ForCausalLM": "penstock.models.dots1",
    "Ernie4_5ForCausalLM": "penstock.models.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "penstock.models.ernie4_5",
    "FalconH1ForCausalLM": "penstock.models.falcon_h1",
    "FalconMambaForCausalLM": "penstock.models.mamba",
    "GPT2LMHeadModel": "penstock.models.gpt2",
    "Gemma2ForCausalLM": "penstock.models.gemma",
    "Gemma3ForCausalLM": "penstock.models.gemma",
    "Glm4MoeForCausalLM": "penstock.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "penstock.models.deepseek",
    "GptOssForCausalLM": "penstock.models.gpt_oss",
    "GraniteForCausalLM": "penstock.models.granite",
    "GraniteMoeForCausalLM": "penstock.models.granite",
    "GraniteMoeHybridForCausalLM": "penstock.models.granite_hybrid",
    "HunYuanDenseV1ForCausalLM": "penstock.models.hunyuan",
    "HunYuanMoEV1ForCausalLM": "penstock.models.hunyuan",
    "JambaForCausalLM": "penstock.models.jamba",
    "KimiLinearForCausalLM": "penstock.models.kimi_linear",
    "Llama4ForCausalLM": "penstock.models.llama4",
    "Lfm2ForCausalLM": "penstock.models.lfm2",
    "Lfm2MoeForCausalLM": "penstock.models.lfm2",
    "LlamaForCausalLM": "penstock.models.llama",
    "M2M100ForConditionalGeneration": "penstock.models.bart",
    "MBartForConditionalGeneration": "penstock.models.bart",
    "MT5ForConditionalGeneration": "penstock.models.t5",
    "Mamba2ForCausalLM": "penstock.models.mamba2",
    "MambaForCausalLM": "penstock.models.mamba",
    "MarianMTModel": "penstock.models.bart",
    "MiMoForCausalLM": "penstock.models.mimo",
    "MiniMaxForCausalLM": "penstock.models.minimax",
    "MiniMaxM2ForCausalLM": "penstock.models.minimax_m2",
    "MiniMaxText01ForCausalLM": "penstock.models.minimax",
    "MistralForCausalLM": "penstock.models.llama",
    "MixtralForCausalLM": "penstock.models.mixtral",
    "NemotronHForCausalLM": "penstock.models.nemotron_h",
    "Olmo2ForCausalLM": "penstock.models.olmo2",
    "OlmoHybridForCausalLM": "penstock.models.olmo_hybrid",
    "OlmoeForCausalLM": "penstock.models.olmoe",
    "PLBartForConditionalGeneration": "penstock.models.bart",
    "PegasusForConditionalGeneration": "penstock.models.bart",
    "Phi3ForCausalLM": "penstock.models.phi3",
    "PhiMoEForCausalLM": "penstock.models.phimoe",
    "PhimoeForCausalLM": "penstock.models.phimoe",
    "Qwen2ForCausalLM": "penstock.models.qwen",
    "Qwen2MoeForCausalLM": "penstock.models.qwen_moe",
    "Qwen3ForCausalLM": "penstock.models.qwen",
    "Qwen3MoeForCausalLM": "penstock.models.qwen_moe",
    "Qwen3NextForCausalLM": "penstock.models.qwen3_next",
    "Qwen3_5ForCausalLM": "penstock.models.qwen3_next",
    "Qwen3_5MoeForCausalLM": "penstock.models.qwen3_next",
    "RecurrentGemmaForCausalLM": "penstock.models.recurrent_gemma",
    "T5ForConditionalGeneration": "penstock.models.t5",
    "UMT5ForConditionalGeneration": "penstock.models.t5",
    "WhisperForConditionalGeneration": "penstock.models.whisper",
    "Zamba2ForCausalLM": "penstock.models.zamba2",
}
# Those with latent attention (MLA).
LATENT_ATTENTION = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiLinearForCausalLM"}
)
# Those of recurrent layers alone.
WITHOUT_ATTENTION = frozenset({"FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"})
# Architectures of draft heads, by method and target, whatever their own `config.json` says.
_DRAFT_HEADS = {
    "EagleLlamaForCausalLM": "penstock.models.eagle",
    "Eagle3LlamaForCausalLM": "penstock.models.eagle3",
    "DeepSeekMTP": "penstock.models.deepseek_mtp",
    "MiMoMTP": "penstock.models.mimo",
    "Qwen3NextMTP": "penstock.models.qwen3_next_mtp",
}
_registered: dict[str, str | Callable[[ModelConfig, ParallelState], CausalLM]] = {}
_POOLING = ("penstock.models.pooling", "PoolingModel")
_MULTIMODAL = "penstock.models.multimodal.assemble"
_TRANSFORMERS = ("penstock.models.transformers_fallback", "TransformersForCausalLM")


def register_model(architecture: str, model_class: str | Callable[[ModelConfig, ParallelState], CausalLM]) -> None:
    """Register an implementation of an architecture, or replace it; called by plugins.

    model_class: the class, or "module:Class", which is imported when a model of this architecture is loaded.
    Raises ConfigError for a string of another form.
    """
    if isinstance(model_class, str) and model_class.count(":") != 1:
        raise ConfigError(f"model_class={model_class!r} is not valid. Allowed: a class, or 'module:Class'.")
    _registered[architecture] = model_class


def supported_architectures() -> list[str]:
    """Allowed values of `architectures[0]` in a model's `config.json`."""
    return sorted({*_MODELS, *_registered})


def find_model_class(model_config: ModelConfig) -> Callable[[ModelConfig, ParallelState], CausalLM]:
    """Return the native class of the model's architecture, or the Transformers fallback.

    Raises UnsupportedModel where `model_impl` excludes both, ModelError where `config.json` names no architecture.
    """
    architecture = model_config.architecture
    if model_config.pooling is not None:
        module, name = _POOLING
    elif runs_through_transformers(model_config):
        module, name = _TRANSFORMERS
    elif architecture in _registered:
        registered = _registered[architecture]
        if not isinstance(registered, str):
            return registered
        module, _, name = registered.partition(":")
    elif architecture in _MODELS or architecture in _DRAFT_HEADS:
        module, name = {**_MODELS, **_DRAFT_HEADS}[architecture], architecture
    else:
        raise UnsupportedModel(
            f"{model_config.model} has the architecture {architecture!r} "
            f"(model_type={model_config.hf_config.get('model_type')!r}), which is not implemented here "
            f"(model_impl={model_config.model_impl!r}). Supported: {', '.join(supported_architectures())}. "
            "With model_impl='auto' it may run through Transformers."
        )
    model_class: Callable[[ModelConfig, ParallelState], CausalLM] = getattr(import_module(module), name)
    if model_config.multimodal is not None and not _embeds_images(model_config):
        multimodal: Callable[[ModelConfig, ParallelState], CausalLM] = import_module(_MULTIMODAL).with_encoder(
            model_class
        )
        return multimodal
    return model_class


def native_module(architecture: str) -> str:
    """Module of a native class. Raises KeyError for another architecture."""
    return _MODELS[architecture]


def refuse_unsuitable(model_config: ModelConfig) -> None:
    """Raise UnsupportedModel, with the reason, for an unsupported kind of model.

    Checks the kind only, not fields of `config.json`, which may differ between kinds; so it is called before these are
    read.
    """
    find_model_class(model_config)
    if runs_through_transformers(model_config) and not _embeds_images(model_config):
        import_module(_TRANSFORMERS[0]).refuse_unsuitable(model_config)


def _embeds_images(model_config: ModelConfig) -> bool:
    return model_config.pooling is not None and model_config.pooling.architecture.embeds_images


def runs_through_transformers(model_config: ModelConfig) -> bool:
    """Whether the Transformers fallback is used: by option, or without a native class."""
    if model_config.pooling is not None and model_config.model_impl != "transformers":
        architecture = model_config.pooling.architecture
        is_native = architecture.decoder is not None or architecture.encoder is not None
        if not is_native and model_config.model_impl == "penstock":
            raise UnsupportedModel(
                f"{model_config.model} has the architecture {architecture.name!r}, which is not implemented here "
                "(model_impl='penstock'). With model_impl='auto' it runs through Transformers."
            )
        return not is_native
    if model_config.model_impl == "auto":
        return model_config.architecture not in supported_architectures()
    return model_config.model_impl == "transformers"


def describe_implementation(model_config: ModelConfig) -> str:
    """Describe the implementation and the reason for it."""
    architecture = model_config.architecture
    if not runs_through_transformers(model_config):
        return f"{architecture} of Penstock"
    why = "as model_impl asks" if model_config.model_impl == "transformers" else "since there is none here"
    where = "on paged attention" if model_config.pooling is None else "a text at a time"
    return f"{architecture} of Transformers {where}, {why}"
