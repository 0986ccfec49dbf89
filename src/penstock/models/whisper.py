"""Whisper (Radford et al. 2022, https://arxiv.org/abs/2212.04356): text of speech.

Suffixes: C channels, P frames of a spectrogram, S positions of the encoder's output, D hidden size.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS, gelu
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer
from penstock.layers.weights import WeightSlot
from penstock.models.bart import read_stack
from penstock.models.config_fields import ConfigFields
from penstock.models.seq2seq import ENCODER, Seq2SeqConfig, Seq2SeqModel, Stack
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_KERNEL = 3


class Convolution(LinearLayer):
    """Convolution of three frames, as a product with windows of the input: one frame is added on either side."""

    keeps_precision = True

    def __init__(self, num_channels: int, size: int, *, stride: int) -> None:
        super().__init__(num_channels * _KERNEL, size, bias=True)
        self.stride = stride

    def forward(self, frames_PC: Tensor, context: ForwardContext) -> Tensor:
        """[P / stride, D]."""
        padded_PC = F.pad(frames_PC, (0, 0, 1, 1))
        windows_PX = padded_PC.unfold(0, _KERNEL, self.stride).flatten(1)
        return super().forward(windows_PX.contiguous(), context)

    def slots(self) -> dict[str, WeightSlot]:
        weight = self.weight.view(self.output_size, -1, _KERNEL)
        assert self.bias is not None, "a convolution has a bias"
        return {"weight": WeightSlot(tuple(weight.shape), weight), "bias": WeightSlot((self.output_size,), self.bias)}


class SpeechStem(nn.Module):
    """Two convolutions of a spectrogram, of which the second halves the number of frames."""

    def __init__(self, num_bins: int, size: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Convolution(num_bins, size, stride=1), Convolution(size, size, stride=2)

    def forward(self, spectrogram_CP: Tensor, context: ForwardContext) -> Tensor:
        """[P / 2, D] from a spectrogram of any float dtype."""
        dtype = self.conv1.compute_dtype or self.conv1.weight.dtype
        frames = gelu(self.conv1(spectrogram_CP.to(dtype).t().contiguous(), context))
        return gelu(self.conv2(frames, context))


class WhisperEncoder(Stack):
    """Convolutions and layers."""

    def __init__(self, config: Seq2SeqConfig, parallel: ParallelState, num_bins: int) -> None:
        super().__init__(ENCODER, config, config.encoder, config.max_source_positions, parallel)
        self.stem = SpeechStem(num_bins, config.hidden_size)

    def table(self, table: WeightTable) -> WeightTable:
        return {**super().table(table), "conv1": Into("stem.conv1"), "conv2": Into("stem.conv2")}


class WhisperForConditionalGeneration(Seq2SeqModel):
    """Its source is a log-mel spectrogram, float32 [bins, frames], with two frames for each position."""

    ignorable: ClassVar[tuple[str, ...]] = (r"proj_out\.weight",)
    embedding_name = "model.decoder.embed_tokens.weight"
    head_name = "proj_out"

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.refuse_unsupported()
        fields.refuse_others({"tie_word_embeddings": True})
        size = fields.integer("d_model")
        self._num_bins = fields.integer("num_mel_bins", default=80)
        scales = fields.flag("scale_embedding", default=False)
        config = Seq2SeqConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=size,
            encoder=read_stack(fields, "encoder", size),
            decoder=read_stack(fields, "decoder", size),
            activation=fields.choice("activation_function", ACTIVATIONS, default="gelu"),
            is_pre_norm=True,
            norms_embeddings=False,
            has_final_norm=True,
            embedding_scale=math.sqrt(size) if scales else 1.0,
            max_source_positions=fields.integer("max_source_positions", default=1500),
            num_positions=fields.integer("max_target_positions", default=448),
            first_position=0,
            make_positions=lambda num_rows: VocabEmbedding(num_rows, size, parallel=ParallelState()),
            has_logits_bias=False,
            has_key_bias=False,
        )
        super().__init__(config, parallel)

    def encode(self, source: Tensor, context: ForwardContext) -> Tensor:
        encoder = self.encoder
        assert isinstance(encoder, WhisperEncoder), "made by `_make_encoder`"
        hidden_SD = encoder.stem(source, context)
        rows_S = torch.arange(len(hidden_SD), dtype=torch.int32, device=hidden_SD.device)
        return encoder(hidden_SD, rows_S, context)  # type: ignore[no-any-return]

    def _make_encoder(self, parallel: ParallelState) -> Stack:
        return WhisperEncoder(self.config, parallel, self._num_bins)
