"""Names of model classes, and what the models are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

# Decoder families with a native class, by the names of their other classes: "LlamaModel" is "Llama".
_DECODERS = {
    **{
        family: f"{family}ForCausalLM"
        for family in (
            *["Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "KimiLinear", "Lfm2", "Lfm2Moe"],
            *["Mamba", "Mamba2", "MiniMax", "NemotronH", "OlmoHybrid", "Qwen3Next", "RecurrentGemma", "Zamba2"],
        )
    },
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Gemma2": "Gemma2ForCausalLM",
    "Gemma3": "Gemma3ForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
    "HunYuanDenseV1": "HunYuanDenseV1ForCausalLM",
    "Llama": "LlamaForCausalLM",
    "MiMo": "MiMoForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Olmo2": "Olmo2ForCausalLM",
    "Phi3": "Phi3ForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
}
# Prefix of ModernBERT's tensors.
MODERN_BERT = "model"
# Encoder families with a native class, by the prefix of their tensors in checkpoints with a head.
_ENCODERS = {
    "Bert": "bert",
    "Camembert": "roberta",
    "ModernBert": MODERN_BERT,
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
}


# Models of an encoder of images and one of texts, whose embeddings are compared.
DUAL_ENCODERS = ("CLIPModel", "SiglipModel")
# Models of images of pages and of queries, with an embedding per token of either (ColPali).
PAGE_ENCODERS = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")


class Use(Enum):
    """Purpose of a model class."""

    GENERATE = auto()
    EMBED = auto()
    CLASSIFY = auto()
    CLASSIFY_TOKENS = auto()
    REWARD = auto()


# Rewards of steps, by the probability that a step is right.
PROCESS_REWARD = "ForProcessRewardModel"
_SUFFIXES = {
    "ForCausalLM": Use.GENERATE,
    "LMHeadModel": Use.GENERATE,
    "ForConditionalGeneration": Use.GENERATE,
    "ForSequenceClassification": Use.CLASSIFY,
    "ForTokenClassification": Use.CLASSIFY_TOKENS,
    PROCESS_REWARD: Use.REWARD,
    "ForRewardModel": Use.REWARD,
    "ForRetrieval": Use.EMBED,
    "ForMaskedLM": Use.EMBED,
    "ForPreTraining": Use.EMBED,
    "ForQuestionAnswering": Use.GENERATE,
    "MTModel": Use.GENERATE,
    "Model": Use.EMBED,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Parts of a model class's name.

    name: the whole name. family: without the suffix. suffix: empty for an unknown one. use: what it is made for.
    decoder: native class of the family's language model; None without one.
    encoder: prefix of the family's tensors, for a native encoder; None for others.
    """

    name: str
    family: str
    suffix: str
    use: Use
    is_decoder_by_config: bool = False

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Architecture:
        """Architecture of a `config.json`; one that names none generates."""
        named = hf_config.get("architectures")
        name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
        for suffix, use in _SUFFIXES.items():
            if name.endswith(suffix) and name != suffix:
                return cls(name, name.removesuffix(suffix), suffix, use, bool(hf_config.get("is_decoder")))
        return cls(name, name, "", Use.GENERATE)

    @property
    def decoder(self) -> str | None:
        return _DECODERS.get(self.family)

    @property
    def encoder(self) -> str | None:
        return None if self.is_decoder_by_config else _ENCODERS.get(self.family)

    @property
    def is_decoder(self) -> bool:
        """Whether tokens usually see the tokens before them only."""
        return self.decoder is not None or self.has_lm_head or self.is_decoder_by_config

    @property
    def num_rewards(self) -> int:
        """Rewards per token where `config.json` has no number of them; 0 for other models."""
        return 0 if self.use is not Use.REWARD else 2 if self.suffix == PROCESS_REWARD else 1

    @property
    def has_lm_head(self) -> bool:
        return self.suffix in ("ForCausalLM", "LMHeadModel")

    @property
    def is_dual_encoder(self) -> bool:
        """Whether it embeds images beside texts, each by an encoder of its own."""
        return self.name in DUAL_ENCODERS

    @property
    def is_page_encoder(self) -> bool:
        """Whether it embeds images beside texts, with a vector per token."""
        return self.name in PAGE_ENCODERS

    @property
    def embeds_images(self) -> bool:
        """Whether a prompt is an image or a text."""
        return self.is_dual_encoder or self.is_page_encoder

    @property
    def has_prefix(self) -> bool:
        """Whether the checkpoint's tensors of the backbone have a prefix, as beside a head."""
        return self.suffix != "Model"
