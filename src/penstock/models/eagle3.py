"""EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840): a draft head of one decoder layer on auxiliary hidden
states of three target layers, with a vocabulary of its own. Suffixes: T tokens of the step, L logits rows, D hidden
size, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT, ForwardContext
from penstock.config import ModelConfig
from penstock.errors import CheckpointError, ModelError
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import concatenate_rows, sum_rows
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNorm
from penstock.layers.weights import WeightSlot
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderLayer, SelfAttention
from penstock.models.draft_head import DraftHead, StoredNames
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_NUM_AUX_LAYERS = 3
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads [token, hidden], each with its own norm.

    norm_before_residual: the residual connection carries the normalised hidden state.
    """

    def __init__(
        self, config: DecoderConfig, self_attn: SelfAttention, parallel: ParallelState, *, norm_before_residual: bool
    ) -> None:
        super().__init__(config, self_attn, parallel)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        # Two norms compute the inputs.
        self_attn.qkv_proj.scalable_inputs = None
        self._norm_before_residual = norm_before_residual

    def forward(  # type: ignore[override]  # of two inputs, not of two summands of one
        self, embed_TD: Tensor, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        normed_TD = self.hidden_norm(hidden_TD)
        both_TX = concatenate_rows(self.input_layernorm(embed_TD), normed_TD)
        mixed_TD = self.self_attn(both_TX, rotation, context)
        residual_TD = context.narrowed(normed_TD if self._norm_before_residual else hidden_TD)
        mixed_TD, residual_TD = self.post_attention_layernorm.add_and_norm(mixed_TD, residual_TD)
        return self.mlp(mixed_TD, context), residual_TD


class Eagle3LlamaForCausalLM(DraftHead):
    """The first draft reads fc(auxiliary hidden states of three layers), the next ones the head's own output.

    target_ids: int64 [S], target token id of each draft vocabulary entry.
    """

    # Mask of the draft vocabulary, which follows from `d2t`.
    ignorable: ClassVar[tuple[str, ...]] = (*DraftHead.ignorable, r"t2d")

    target_ids: Tensor

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        stored = StoredNames(fields)
        config = DecoderConfig.read(fields)
        if config.num_layers != 1:
            raise fields.unsupported("num_hidden_layers", config.num_layers, "1")
        num_tokens = fields.integer("draft_vocab_size", default=config.vocab_size)
        if num_tokens > config.vocab_size:
            raise fields.unsupported("draft_vocab_size", num_tokens, f"up to vocab_size={config.vocab_size}")
        if num_tokens < config.vocab_size and not stored.has("d2t", by_default=True):
            raise CheckpointError(
                f"{model_config.model} has draft_vocab_size={num_tokens} of {config.vocab_size} tokens, but no tensor "
                "d2t that maps them. Download it again, or convert it anew."
            )
        has_head = num_tokens < config.vocab_size or stored.has("lm_head.weight", by_default=True)
        super().__init__(
            model_config,
            config,
            parallel,
            has_embedding=stored.has("embed_tokens.weight"),
            head_vocab_size=num_tokens if has_head else None,
        )
        self._named_layers = _read_aux_layers(fields)
        self._target_size = fields.integer("target_hidden_size", default=config.hidden_size)
        self.fc = LinearLayer(_NUM_AUX_LAYERS * self._target_size, config.hidden_size, bias=stored.has("fc.bias"))
        bias = stored.has("layers.0.self_attn.q_proj.bias")
        attention = SelfAttention(
            config, 0, parallel, qkv_bias=bias, output_bias=False, input_size=2 * config.hidden_size
        )
        norm_before_residual = fields.flag("norm_before_residual", default=False)
        layer = Eagle3Layer(config, attention, parallel, norm_before_residual=norm_before_residual)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.register_buffer("target_ids", torch.arange(num_tokens, device="cpu"), persistent=False)

    @property
    def target_size(self) -> int:
        return self._target_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return _each_once(self._fused_layers)

    @property
    def _fused_layers(self) -> tuple[int, ...]:
        """The layers in their order; a small target may have duplicates."""
        return self._named_layers or _usual_layers(self.target.config.num_layers)

    def attach(self, target: object) -> None:
        super().attach(target)
        num_layers = self.target.config.num_layers
        if max(self._fused_layers) > num_layers:
            raise ModelError(
                f"{self.name} reads the inputs of the layers {', '.join(map(str, self._fused_layers))}, but the target "
                f"model has {num_layers}. Name others as {_AUX_LAYERS} in its config.json, or use a drafter that was "
                "trained for this model."
            )

    def from_target(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        of_layer = dict(zip(self.aux_layers, aux, strict=True))
        aux_TX = torch.cat([of_layer[layer] for layer in self._fused_layers], dim=-1)
        return self.fc(aux_TX, NO_CONTEXT)  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        rotation = self.rotation(positions_T, hidden_TD.dtype)
        hidden_TD, residual_TD = self.layers[0](self.embed(input_ids_T, context), hidden_TD, rotation, context)
        return sum_rows(hidden_TD, residual_TD)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        """Logits of target tokens outside the draft vocabulary are minus infinity."""
        logits_LS = super().compute_logits(self.norm(hidden_LD), context)
        size = self.config.vocab_size
        if logits_LS.shape[-1] == size:
            return logits_LS
        logits_LV = logits_LS.new_full((logits_LS.shape[0], size), float("-inf"))
        return logits_LV.index_copy_(1, self.target_ids, logits_LS)

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        chosen = super().compute_greedy(self.norm(hidden_LD), context)
        if chosen is None or self.lm_head is None:
            return chosen
        return chosen._replace(token_ids_R=self.target_ids.index_select(0, chosen.token_ids_R))

    def weight_table(self) -> WeightTable:
        norms = {name: Into(name) for name in ("norm", "layers.*.input_layernorm", "layers.*.hidden_norm")}
        return {"fc": Into("fc"), **norms, **self.layer_weights}

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        super().load_weights(self._without_map(weights), slots)

    def _without_map(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name == "d2t":
                self._take_map(tensor)
            else:
                yield name, tensor

    def _take_map(self, offsets_S: Tensor) -> None:
        """Load d2t: offset from each draft vocabulary entry to its target token id."""
        if offsets_S.shape != self.target_ids.shape or offsets_S.is_floating_point():
            raise CheckpointError(
                f"d2t is {offsets_S.dtype} {list(offsets_S.shape)}, and must be [{len(self.target_ids)}] integers."
            )
        if offsets_S.is_meta or self.target_ids.is_meta:
            return
        ids_S = torch.arange(len(offsets_S)) + offsets_S
        if int(ids_S.min()) < 0 or int(ids_S.max()) >= self.config.vocab_size or len(ids_S.unique()) != len(ids_S):
            raise CheckpointError(f"d2t does not name {len(ids_S)} of the tokens 0 to {self.config.vocab_size - 1}.")
        self.target_ids.copy_(ids_S)


def aux_layers_of(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the `aux_layers` of a head with this configuration, for a target with `num_layers` layers."""
    return _each_once(_read_aux_layers(fields) or _usual_layers(num_layers))


def _usual_layers(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted((2, num_layers // 2, max(0, num_layers - 3))))


def _each_once(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(layers)))


def _read_aux_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Read the target layers that `config.json` names; () where it names none.

    In vLLM's format by the layers whose inputs they are; in SGLang's, a nested object, by those whose outputs they are.
    """
    nested = fields.hf_config.get("eagle_config")
    value, more = fields.hf_config.get(_AUX_LAYERS), 0
    if not value and isinstance(nested, Mapping):
        value, more = nested.get(_AUX_LAYERS), 1
    if not value:
        return ()
    is_list = isinstance(value, list) and len(value) == _NUM_AUX_LAYERS
    if not is_list or not all(isinstance(layer, int) and layer >= 0 for layer in value) or sorted(value) != value:
        raise fields.unsupported(_AUX_LAYERS, value, f"{_NUM_AUX_LAYERS} ascending layer numbers")
    return tuple(layer + more for layer in value)
