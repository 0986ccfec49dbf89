"""Second pass over a decoder's text, all of it at once, for what decoding does not keep: the probability of a token
after the text, or how much each token attends to each position of the source.

Suffixes: T tokens of the text, N tokens whose attention is wanted, S positions of a source, H query heads, K KV heads,
D head size, X concatenated heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention import NO_CONTEXT, AttentionRows, ForwardContext, Heads, LayerAttention
from penstock.config import ModelConfig
from penstock.contract import ArrayBytes, NewRequestData, part_of
from penstock.device import Device
from penstock.device.base import wait_until
from penstock.errors import InvalidRequest
from penstock.features.encoder_decoder.messages import (
    AlignmentPart,
    SourcePart,
    SpeechPart,
    SpeechResult,
    StepSpeech,
)
from penstock.layers.cross_attention import CrossAttention

FILTER_WIDTH = 7


@dataclass(slots=True)
class SecondPass:
    """Second pass of a request, run with its encoder.

    token_ids: the text. alignment: the attention that is wanted; None for the probability of the token `no_speech`.
    num_tokens: of the request, until the step that samples. filter_width: of the median filter.
    result: float32 [N, S], or [1].
    """

    token_ids: list[int]
    alignment: AlignmentPart | None
    no_speech: int
    num_tokens: int
    filter_width: int
    result: Tensor | None = None

    @classmethod
    def of(cls, request: NewRequestData, source: SourcePart, model: Any, config: ModelConfig) -> SecondPass | None:
        """The request's second pass; None without one. Raises InvalidRequest for one that cannot be run."""
        speech, alignment = part_of(request.parts, SpeechPart), part_of(request.parts, AlignmentPart)
        token_ids, no_speech = list[int](), 0
        if (alignment or speech) is not None and "num_mel_bins" not in config.hf_config:
            raise InvalidRequest(f"{config.architecture} is no model of speech. Leave the parts of speech out.")
        if alignment is not None:
            token_ids = alignment.token_ids
            _check(alignment, source, model)
        elif speech is not None and speech.no_speech is not None:
            token_ids, no_speech = request.prompt_token_ids[: speech.start + 1], speech.no_speech
        if not token_ids:
            return None
        if min(no_speech, *token_ids) < 0 or max(no_speech, *token_ids) >= config.vocab_size:
            raise InvalidRequest(f"A text has tokens beyond the vocabulary. Allowed: 0 to {config.vocab_size - 1}.")
        num_tokens = len(request.prefill_token_ids) - request.num_computed_tokens
        width = config.hf_config.get("median_filter_width", FILTER_WIDTH)
        return cls(token_ids, alignment, no_speech, num_tokens, width)

    def is_done_after(self, num_tokens: int) -> bool:
        """Count tokens of a step; whether it samples."""
        self.num_tokens -= num_tokens
        return self.num_tokens <= 0

    def run(
        self, model: Any, device: Device, keys_and_values: Callable[[CrossAttention], tuple[Tensor, Tensor]]
    ) -> None:
        """Run the decoder over the text.

        keys_and_values: of the source in a layer of cross attention, [S, K, D] each, which every layer asks for once.
        """
        attentions: dict[str, CrossAttention] = {one.layer.name: one for one in model.cross_attentions}
        asked = self.alignment
        context = _WholeText(
            keys_and_values=lambda layer: keys_and_values(attentions[layer.name]),
            wanted={} if asked is None else _heads_by_layer(list(attentions.values()), asked),
        )
        token_ids_T = device.upload(np.array(self.token_ids, dtype=np.int32))
        hidden_TD = model(token_ids_T, torch.arange(len(self.token_ids), device=token_ids_T.device), context)
        if asked is None:
            logits_V = model.compute_logits(hidden_TD[-1:], NO_CONTEXT)[0]
            self.result = logits_V.softmax(-1)[self.no_speech : self.no_speech + 1]
        else:
            sum_NS = self._attention(context.kept, asked, token_ids_T.device)
            self.result = model.cross_attentions[0].group.all_reduce(sum_NS) / len(asked.heads)

    def _attention(self, kept: list[Tensor], asked: AlignmentPart, device: torch.device) -> Tensor:
        """Sum of the heads' weights, [N, S], each normalised over the tokens and smoothed over the positions.

        As in `timing.py` of OpenAI's Whisper (https://github.com/openai/whisper).
        """
        sum_NS = torch.zeros(len(self.token_ids) - asked.begin, asked.positions, device=device)
        for weights_TS in kept:
            weights_NS = weights_TS[asked.begin :, : asked.positions]
            deviation_1S, centre_1S = torch.std_mean(weights_NS, dim=0, correction=0, keepdim=True)
            # A single token has no deviation.
            sum_NS += _smoothed(((weights_NS - centre_1S) / deviation_1S).nan_to_num(0.0, 0.0, 0.0), self.filter_width)
        return sum_NS


class PendingSpeech:
    """Results of a step's second passes in copy to the host. results: on the device, by request."""

    def __init__(self, step_id: int, results: Mapping[str, Tensor | None], device: Device) -> None:
        self._step_id = step_id
        self._req_ids = list(results)
        self._copy = device.download([one for one in results.values() if one is not None])

    def get(self, timeout_s: float) -> StepSpeech:
        """See `PendingPart`."""
        wait_until(self._copy.is_done, timeout_s, lambda: f"The runner waited for the speech of step {self._step_id}.")
        arrays = (tensor.numpy() for tensor in self._copy.tensors)
        return StepSpeech(
            results={
                req_id: SpeechResult(no_speech_prob=float(array[0]))
                if array.ndim == 1
                else SpeechResult(attention=ArrayBytes.of(array))
                for req_id, array in zip(self._req_ids, arrays, strict=True)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WholeText(ForwardContext):
    """Context of a decoder that runs over a whole text, without a KV cache.

    wanted: heads of this rank whose attention is kept, by layer. kept: their weights, float32 [T, S].
    """

    keys_and_values: Callable[[LayerAttention], tuple[Tensor, Tensor]]
    wanted: Mapping[str, list[int]]
    kept: list[Tensor] = field(default_factory=list)

    def attend(self, layer: LayerAttention, rows: AttentionRows) -> Tensor:
        heads = rows if isinstance(rows, Heads) else rows.heads(layer)
        mixed_THD = _attend(layer, *heads, is_causal=True)
        return mixed_THD if isinstance(rows, Heads) else mixed_THD.flatten(1)

    def read_cache(self, layer: LayerAttention, query_TX: Tensor) -> Tensor:
        keys_SKD, values_SKD = self.keys_and_values(layer)
        query_THD = query_TX.view(len(query_TX), layer.num_heads, layer.head_size)
        for head in self.wanted.get(layer.name, ()):
            scores_TS = query_THD[:, head] @ keys_SKD[:, head].t() * layer.scale
            self.kept.append(scores_TS.float().softmax(-1))
        return _attend(layer, query_THD, keys_SKD, values_SKD, is_causal=False).flatten(1)


def _check(asked: AlignmentPart, source: SourcePart, model: Any) -> None:
    attentions = model.cross_attentions
    if not (
        0 <= asked.begin < len(asked.token_ids) <= model.config.num_positions
        and 0 < asked.positions <= source.length
        and asked.heads
        and all(
            0 <= layer < len(attentions) and 0 <= head < attentions[layer].heads.whole for layer, head in asked.heads
        )
    ):
        raise InvalidRequest(
            f"The alignment of {len(asked.token_ids)} tokens from {asked.begin} on to {asked.positions} positions by "
            f"{len(asked.heads)} heads does not fit the model: {model.config.num_positions} tokens, {source.length} "
            f"positions, {len(attentions)} layers of {attentions[0].heads.whole} heads."
        )


def _heads_by_layer(attentions: list[CrossAttention], asked: AlignmentPart) -> dict[str, list[int]]:
    """The wanted heads that this rank has, by the name of the layer, counted from its own first."""
    found: dict[str, list[int]] = {}
    for number, head in asked.heads:
        attention = attentions[number]
        local = head - attention.heads.start
        if 0 <= local < attention.heads.size:
            found.setdefault(attention.layer.name, []).append(local)
    return found


def _attend(layer: LayerAttention, query_THD: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query_THD, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=layer.scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def _smoothed(weights_NS: Tensor, width: int) -> Tensor:
    """Median of `width` positions around each; the ends are reflected."""
    margin = width // 2
    if weights_NS.shape[1] <= margin:
        return weights_NS
    padded = F.pad(weights_NS.unsqueeze(0), (margin, margin), mode="reflect")[0]
    return padded.unfold(1, width, 1).median(-1).values
