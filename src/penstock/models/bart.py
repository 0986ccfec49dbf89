"""BART (Lewis et al. 2019, https://arxiv.org/abs/1910.13461) and models of texts with its layers.

mBART (Liu et al. 2020, https://arxiv.org/abs/2001.08210), M2M-100 (Fan et al. 2020, https://arxiv.org/abs/2010.11125),
Pegasus (Zhang et al. 2019, https://arxiv.org/abs/1912.08777) and Blenderbot (Roller et al. 2020,
https://arxiv.org/abs/2004.13637) have norms before each part; Marian (Junczys-Dowmunt et al. 2018,
https://arxiv.org/abs/1804.00344), Pegasus and M2M-100 have sinusoidal positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS
from penstock.layers.embedding import VocabEmbedding
from penstock.models.config_fields import ConfigFields
from penstock.models.seq2seq import Seq2SeqConfig, Seq2SeqModel, SinusoidalPositions, StackConfig
from penstock.parallel import ParallelState


@dataclass(frozen=True, slots=True)
class _Family:
    """Features of a family of BART's kind. first_position: row of the first token among the positions."""

    is_pre_norm: bool
    norms_embeddings: bool
    has_final_norm: bool
    has_logits_bias: bool
    first_position: int = 0
    activation: str = "gelu"
    scales_embeddings: bool = False


def read_stack(fields: ConfigFields, side: str, hidden_size: int) -> StackConfig:
    """Sizes of the encoder or the decoder, whose fields begin with `side`."""
    num_heads = fields.integer(f"{side}_attention_heads")
    if hidden_size % num_heads != 0:
        raise fields.unsupported(f"{side}_attention_heads", num_heads, f"divisors of d_model={hidden_size}")
    return StackConfig(fields.integer(f"{side}_layers"), num_heads, fields.integer(f"{side}_ffn_dim"))


class _TextModel(Seq2SeqModel):
    """A model of this file. family: what it differs in."""

    family: _Family

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields, family = ConfigFields(model_config), self.family
        fields.refuse_unsupported()
        fields.refuse_others({"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True})
        size, num_positions = fields.integer("d_model"), fields.integer("max_position_embeddings")
        scales = fields.flag("scale_embedding", default=family.scales_embeddings)
        config = Seq2SeqConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=size,
            encoder=read_stack(fields, "encoder", size),
            decoder=read_stack(fields, "decoder", size),
            activation=fields.choice("activation_function", ACTIVATIONS, default=family.activation),
            is_pre_norm=family.is_pre_norm,
            norms_embeddings=family.norms_embeddings,
            has_final_norm=family.has_final_norm,
            embedding_scale=math.sqrt(size) if scales else 1.0,
            max_source_positions=num_positions,
            num_positions=num_positions,
            first_position=family.first_position,
            make_positions=partial(self._make_positions, size),
            has_logits_bias=family.has_logits_bias,
        )
        super().__init__(config, parallel)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `CausalLM`: the bias of the logits has two dimensions in checkpoints."""
        yield ("lm_head.bias", tensor.flatten()) if name == "final_logits_bias" else (name, tensor)

    def _make_positions(self, size: int, num_rows: int) -> VocabEmbedding | SinusoidalPositions:
        """A small table, which every rank has whole."""
        return VocabEmbedding(num_rows, size, parallel=ParallelState())


class BartForConditionalGeneration(_TextModel):
    family = _Family(
        is_pre_norm=False, norms_embeddings=True, has_final_norm=False, has_logits_bias=True, first_position=2
    )


class MBartForConditionalGeneration(_TextModel):
    family = _Family(
        is_pre_norm=True, norms_embeddings=True, has_final_norm=True, has_logits_bias=True, first_position=2
    )


class PLBartForConditionalGeneration(_TextModel):
    family = BartForConditionalGeneration.family


class BlenderbotForConditionalGeneration(_TextModel):
    family = _Family(is_pre_norm=True, norms_embeddings=False, has_final_norm=True, has_logits_bias=True)


class MarianMTModel(_TextModel):
    family = _Family(is_pre_norm=False, norms_embeddings=False, has_final_norm=False, has_logits_bias=True)

    def _make_positions(self, size: int, num_rows: int) -> SinusoidalPositions:
        pairs = torch.arange(size // 2, dtype=torch.float64, device="cpu")
        return SinusoidalPositions(num_rows, 10000.0 ** (-2 * pairs / size))


class PegasusForConditionalGeneration(MarianMTModel):
    family = _Family(is_pre_norm=True, norms_embeddings=False, has_final_norm=True, has_logits_bias=True)


class M2M100ForConditionalGeneration(_TextModel):
    """Rows of the position table begin behind that of padding, 1."""

    family = _Family(
        is_pre_norm=True,
        norms_embeddings=False,
        has_final_norm=True,
        has_logits_bias=False,
        first_position=2,
        activation="relu",
        scales_embeddings=True,
    )

    def _make_positions(self, size: int, num_rows: int) -> SinusoidalPositions:
        half = size // 2
        pairs = torch.arange(half, dtype=torch.float64, device="cpu")
        return SinusoidalPositions(num_rows, torch.exp(pairs * (-math.log(10000) / (half - 1))))
