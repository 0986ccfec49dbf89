"""Transformers model with paged attention.

The model's own code runs on the flattened tokens of a step, with three replacements: attention uses the paged KV cache,
linear layers the library's products, and weights the library's loading. It keeps no state between steps.

Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.device.stand_in import is_on_cpu
from penstock.errors import UnsupportedModel
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer, restore_weights
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from penstock.models.transformers_fallback import own_attention
from penstock.models.transformers_fallback.buffers import (
    buffers_on_meta,
    create_buffers,
    fix_rotary_frequencies,
)
from penstock.models.transformers_fallback.checkpoint_names import CheckpointNames, checkpoint_tensors
from penstock.models.transformers_fallback.head import take_backbone
from penstock.models.transformers_fallback.hf_class import find_suitable, refuse_unsuitable_for_pooling
from penstock.models.transformers_fallback.interface import (
    PAGED,
    PAGED_WITH_MASK,
    TRIAL,
    CannotRun,
    ContextSlot,
    install_attention,
)
from penstock.models.transformers_fallback.invariance import OperatorWatch, RowInvariant
from penstock.models.transformers_fallback.linears import replace_linears
from penstock.models.transformers_fallback.locality import (
    are_rows_independent,
    check_locality,
    run_without_values,
)
from penstock.models.transformers_fallback.mixtures import is_of_experts, replace_experts
from penstock.models.transformers_fallback.trial import run_trial
from penstock.models.weights import load_into_slots
from penstock.parallel import ParallelState

logger = logging.getLogger(__name__)


class TransformersForCausalLM(CausalLM):
    """Wraps the Transformers class that `architectures` names. Its parameters are on the meta device at first.

    Raises UnsupportedModel with the reason for a model that paged attention cannot run: at construction from the
    configuration and a trial run, at loading from a run with weights.
    """

    notes_layers = True

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        self._model_config = model_config
        self._slot = ContextSlot()
        try:
            model = _build(model_config)
            self._names = CheckpointNames(model)
            self._tied = dict(model.all_tied_weights_keys)
            self._pad_token_id = getattr(model.config.get_text_config(), "pad_token_id", None)
            watch = OperatorWatch()
            with buffers_on_meta(model):
                with watch.watching(model):
                    trial = run_trial(model, model_config.longest_context)
                self._takes_positions = trial.takes_positions
                if type(model).__name__ in own_attention.ARCHITECTURES:
                    model.config._attn_implementation = PAGED_WITH_MASK
                else:
                    model.set_attn_implementation(PAGED)
                if trial.vocab_size != model_config.vocab_size:
                    raise CannotRun(f"its logits are {trial.vocab_size}, not vocab_size={model_config.vocab_size}")
                self._backbone_name = trial.backbone
                # The experts' names are those in the complete model.
                self._mixtures = replace_experts(model, self._slot, parallel)
                self.backbone, self.head = take_backbone(
                    model, trial.backbone, trial.output_type, trial.hidden_size, trial.vocab_size
                )
        except CannotRun as reason:
            raise _refusal(model_config, reason) from reason
        for module, layer in trial.layers:
            install_attention(module, layer, self._slot)
        replace_linears(self, self._slot, parallel)
        operators = RowInvariant()
        operators.install(self, watch.modules)
        self.packed_weights = operators.packed

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        # Its layers add attention's output to their input, and so need a row for every token.
        return context.narrowed(self._run(input_ids_T, positions_T, context.of_all_tokens()))

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        with self._slot.holding(context):
            return self.head(hidden_LD)  # type: ignore[no-any-return]

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return self._names.slots(self._tensors())

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        parts = (f"{self._backbone_name}.", self.backbone), ("", self.head.model)
        embedding = self.backbone.get_input_embeddings()  # type: ignore[operator]
        return {
            prefix + name: (module, None)
            for prefix, part in parts
            for name, module in part.named_modules()
            if (isinstance(module, LinearLayer) and not is_of_experts(name))
            or (isinstance(module, VocabEmbedding) and module is embedding)
        }

    def is_in_head(self, module: nn.Module) -> bool:
        return any(module is part for part in self.head.modules())

    def tied_weights(self) -> Mapping[str, str]:
        return self._tied

    def checkpoint_name(self, name: str) -> str:
        known = {*self._tied, *self._tied.values()}
        slot_name = self._names.slot_name(name, known.__contains__)
        return slot_name if slot_name in known else name

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        """See `CausalLM`; the loaded model is then checked by a run.

        Raises CheckpointError for weights that do not fit, UnsupportedModel for a model that paged attention cannot
        run.
        """
        restore_weights(self)
        self.packed_weights.clear()
        if slots is None:
            slots = self.checkpoint_slots()
            weights = self._names.renamed(weights, slots.__contains__)
        load_into_slots(slots, self._names.ignorable, weights)
        device = next(self.parameters()).device
        if device.type == "meta":  # no values to check with
            return
        try:
            check_locality(
                self._run,
                attention_layers(self),
                vocab_size=self._model_config.vocab_size,
                pad_token_id=self._pad_token_id,
                device=device,
            )
        except CannotRun as reason:
            raise _refusal(self._model_config, reason) from reason
        # Linear layers have no packed weights of their own yet.
        self.packed_weights.clear()

    def check_loaded(self) -> None:
        device = next(self.parameters()).device
        if not is_on_cpu(next(self.parameters())):  # elsewhere products are the device's own
            return

        def logits(input_ids_T: Tensor, positions_T: Tensor | None, context: ForwardContext) -> Tensor:
            return self.compute_logits(self._run(input_ids_T, positions_T, context), context)

        vocab_size, pad_token_id = self._model_config.vocab_size, self._pad_token_id
        if device.type == "meta":
            # Packs the weights of its operators, as the check of a model with values does.
            with suppress(RuntimeError, NotImplementedError, TypeError, ValueError):  # measuring its steps says why
                run_without_values(logits, device=device)
            return
        if not are_rows_independent(logits, vocab_size=vocab_size, pad_token_id=pad_token_id, device=device):
            logger.warning(
                "%s: the implementation of %s in Transformers computes a token with other bits alone and in a batch, "
                "so an answer may change with what else runs",
                self._model_config.model,
                self._model_config.architecture,
            )

    def _run(self, input_ids_T: Tensor, positions_T: Tensor | None, context: ForwardContext) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": input_ids_T.unsqueeze(0)}
        if self._takes_positions and positions_T is not None:
            arguments["position_ids"] = positions_T.unsqueeze(0)
        if context.aux is not None:
            arguments["output_hidden_states"] = True
        with self._slot.holding(context):
            output = self.backbone(**arguments, use_cache=False)
        if context.aux is not None:
            for layer, hidden_1TD in enumerate(output.hidden_states[:-1]):
                context.note_hidden(layer, hidden_1TD[0], None)
        return output[0][0]  # type: ignore[no-any-return]

    def _tensors(self) -> Iterator[tuple[str, Tensor | Sequence[Tensor]]]:
        """Yield checkpoint tensors by their names in the complete Transformers model; those of experts in pieces."""
        seen: set[int] = set()
        for prefix, part in ((f"{self._backbone_name}.", self.backbone), ("", self.head.model)):
            for name, tensor in checkpoint_tensors(part):
                if id(tensor) not in seen and not is_of_experts(name):
                    seen.add(id(tensor))
                    yield prefix + name, tensor
        for mixture in self._mixtures:
            yield from mixture.parameters()


def refuse_unsuitable(model_config: ModelConfig) -> None:
    """Raise UnsupportedModel with the reason for a kind of model that cannot run."""
    try:
        if model_config.pooling is not None:
            refuse_unsuitable_for_pooling(model_config)
        else:
            find_suitable(model_config)
    except CannotRun as reason:
        raise _refusal(model_config, reason) from reason


def _refusal(config: ModelConfig, reason: CannotRun) -> UnsupportedModel:
    where = "" if config.pooling is not None else " on paged attention"
    return UnsupportedModel(f"{config.model} ({config.architecture}) cannot run through Transformers{where}: {reason}.")


def _build(model_config: ModelConfig) -> PreTrainedModel:
    """Build the Transformers model: parameters on the meta device, buffers on the CPU with their values."""
    model_class, config = find_suitable(model_config)
    is_known = model_class.__name__ in own_attention.ARCHITECTURES
    built_for = "eager" if is_known else TRIAL
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=built_for, dtype=torch.float32)
        if is_known:
            own_attention.call_interface(model)
            model.config._attn_implementation = TRIAL
        model.eval().requires_grad_(False)
        create_buffers(model)
    except CannotRun:
        raise
    except Exception as error:
        raise CannotRun(f"Transformers cannot build it ({type(error).__name__}: {error})") from error
    asked = model_config.max_model_len
    fix_rotary_frequencies(model, asked if isinstance(asked, int) else model_config.longest_context)
    return model
