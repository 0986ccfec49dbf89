"""Encoders of audio on Whisper's (Radford et al. 2022, https://arxiv.org/abs/2212.04356): Qwen2-Audio (Chu et al. 2024,
https://arxiv.org/abs/2407.10759) and Voxtral (Liu et al. 2025, https://arxiv.org/abs/2507.13264).

Suffixes: N windows of a clip, C bins of a spectrogram, P its frames, S positions of a window, T of all, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.errors import ModelError
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import LayerNorm
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.vision_layers import (
    PROJECTOR,
    PROJECTOR_TABLE,
    Projector,
    Segments,
    TableEncoder,
    VisionLayerConfig,
    VisionLayers,
    encoder_fields,
    in_parts,
    vision_activation,
)
from penstock.models.weights import Into, WeightTable
from penstock.models.whisper import SpeechStem
from penstock.parallel import ParallelState

_TOWER = "model.audio_tower."
_LAYER = f"{_TOWER}layers.*"
_TABLE: WeightTable = {
    f"{_TOWER}conv1": Into("tower.stem.conv1"),
    f"{_TOWER}conv2": Into("tower.stem.conv2"),
    f"{_TOWER}embed_positions": Into("tower.positions"),
    f"{_LAYER}.self_attn_layer_norm": Into("tower.layers.*.attention_norm"),
    f"{_LAYER}.self_attn.q_proj": Into("tower.layers.*.attention.qkv_proj", shard="q"),
    f"{_LAYER}.self_attn.k_proj": Into("tower.layers.*.attention.qkv_proj", shard="k"),
    f"{_LAYER}.self_attn.v_proj": Into("tower.layers.*.attention.qkv_proj", shard="v"),
    f"{_LAYER}.self_attn.out_proj": Into("tower.layers.*.attention.o_proj"),
    f"{_LAYER}.final_layer_norm": Into("tower.layers.*.mlp_norm"),
    f"{_LAYER}.fc1": Into("tower.layers.*.mlp.up_proj"),
    f"{_LAYER}.fc2": Into("tower.layers.*.mlp.down_proj"),
    f"{_TOWER}layer_norm": Into("last_norm"),
}
_QWEN2_AUDIO: WeightTable = {**_TABLE, f"{PROJECTOR}linear": Into("projector")}
_VOXTRAL: WeightTable = {**_TABLE, **PROJECTOR_TABLE}
_NORM_EPS = 1e-5


class WhisperTower(nn.Module):
    """Convolutions, positions, and layers."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        # The names of Whisper, or the usual ones.
        has_own_names = "encoder_layers" in fields.hf_config
        size = fields.integer("d_model" if has_own_names else "hidden_size")
        self.config = VisionLayerConfig.read(
            fields,
            hidden_size=size,
            intermediate_size=fields.integer("encoder_ffn_dim" if has_own_names else "intermediate_size"),
            num_heads=fields.integer("encoder_attention_heads" if has_own_names else "num_attention_heads"),
            activation=vision_activation(fields, "activation_function"),
            norm_eps=_NORM_EPS,
            key_bias=False,
        )
        self.num_layers = fields.integer("encoder_layers" if has_own_names else "num_hidden_layers")
        self.num_positions = fields.integer("max_source_positions", 1500)
        self.num_bins = fields.integer("num_mel_bins", 128)
        self.stem = SpeechStem(self.num_bins, size)
        self.positions = VocabEmbedding(self.num_positions, size, parallel=ParallelState())
        self.layers = VisionLayers(self.config, self.num_layers)

    def forward(self, windows_NCP: Tensor, num_positions: int) -> Tensor:
        """Hidden states [T, D] of the first positions of each window, which attend to these of their window."""
        rows_S = torch.arange(num_positions, dtype=torch.int32, device=windows_NCP.device)
        positions_SD = self.positions(rows_S, NO_CONTEXT)
        hidden = [self.stem(window_CP, NO_CONTEXT)[:num_positions] + positions_SD for window_CP in windows_NCP]
        segments = Segments.equal(len(hidden), num_positions, windows_NCP.device)
        (hidden_TD,) = self.layers(torch.cat(hidden), None, segments, [self.num_layers])
        return hidden_TD  # type: ignore[no-any-return]


class AudioEncoder(TableEncoder):
    """Base of the encoders: the tower, its last norm, and the features' size."""

    modalities: ClassVar[tuple[str, ...]] = ("audio",)
    renames: ClassVar[Mapping[str, str]] = {"audio_tower.": _TOWER, "multi_modal_projector.": PROJECTOR}
    own: ClassVar[tuple[str, ...]] = (_TOWER, PROJECTOR)

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.tower = WhisperTower(fields.section("audio_config"))
        self.num_layers = self.tower.num_layers
        self.last_norm = LayerNorm(self.tower.config.hidden_size, _NORM_EPS)
        self.feature_size = fields.section("text_config").integer("hidden_size")

    def windows(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The windows of a clip, [N, C, P]. Raises ModelError for those of another size than the model's."""
        windows_NCP = inputs["input_features"]
        wanted = [self.tower.num_bins, 2 * self.tower.num_positions]
        if list(windows_NCP.shape[1:]) != wanted:
            raise ModelError(
                f"The feature extractor returned spectrograms of {list(windows_NCP.shape[1:])} bins and frames, and "
                f"the encoder takes {wanted}. preprocessor_config.json does not fit config.json."
            )
        return windows_NCP

    def zeros(self, num_windows: int) -> np.ndarray:
        """At least one window of a `DummyItem`."""
        tower = self.tower
        return np.zeros((max(1, num_windows), tower.num_bins, 2 * tower.num_positions), dtype=np.float32)


class Qwen2Audio(AudioEncoder):
    """The encoder of Qwen2-Audio: means of two positions, of one window without what is behind the clip's end."""

    table = _QWEN2_AUDIO

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__(encoder_fields(hf_config))
        self.projector = LinearLayer(self.tower.config.hidden_size, self.feature_size, bias=True)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: input_features [1, C, P] and feature_attention_mask [1, P]."""
        num_frames = int(inputs["feature_attention_mask"].numpy().sum())
        hidden_SD = self.tower(self.windows(inputs), (num_frames + 1) // 2)
        pairs = hidden_SD[: len(hidden_SD) // 2 * 2].unflatten(0, (-1, 2))
        return self.projector(self.last_norm(pairs.mean(1)), NO_CONTEXT)  # type: ignore[no-any-return]

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: a window."""
        windows = self.zeros(1)
        mask = np.ones((1, windows.shape[2]), dtype=np.int64)
        return DummyItem("audio", {"input_features": windows, "feature_attention_mask": mask})


class Voxtral(AudioEncoder):
    """The encoder of Voxtral: windows of a clip of any length, of which several positions are merged and projected."""

    table = _VOXTRAL

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        fields = encoder_fields(hf_config)
        super().__init__(fields)
        config = self.tower.config
        self._width = config.intermediate_size
        if self.tower.num_positions * config.hidden_size % self._width != 0:
            allowed = f"divisors of {self.tower.num_positions} positions of {config.hidden_size}"
            raise fields.section("audio_config").unsupported("intermediate_size", self._width, allowed)
        activation = vision_activation(fields, "projector_hidden_act")
        size = self.feature_size
        self.projector = Projector(self._width, size, size, activation=activation, bias=False)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: input_features [N, C, P]."""
        num_positions = self.tower.num_positions

        def encode(windows_NCP: Tensor) -> Tensor:
            hidden_TD = self.last_norm(self.tower(windows_NCP, num_positions))
            return self.projector(hidden_TD.reshape(-1, self._width))  # type: ignore[no-any-return]

        return in_parts(self.windows(inputs), 1, num_positions, encode)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: a clip of windows."""
        per_window = self.tower.num_positions * self.tower.config.hidden_size // self._width
        return DummyItem("audio", {"input_features": self.zeros(most_rows // per_window)})
