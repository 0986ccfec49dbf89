"""Models of Transformers, a text at a time: encoders and other classes that have no native one.

Suffixes: T tokens of the step, D hidden size or number of classes.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.checkpoints.architectures import Use
from penstock.config import ModelConfig
from penstock.errors import UnsupportedModel
from penstock.layers.weights import WeightSlot, slots_of_modules
from penstock.models.bert import TOKEN_TYPE_IDS
from penstock.models.causal_lm import CausalLM
from penstock.models.transformers_fallback.interface import ContextSlot
from penstock.models.transformers_fallback.linears import replace_linears
from penstock.parallel import ParallelState

# Fields of the hidden size, by model type.
_SIZES = ("hidden_size", "dim", "d_model", "n_embd")


class TransformersTexts(CausalLM):
    """Wraps the Transformers class that `architectures` names. Its rows are hidden states, or the classes' logits.

    A text's logits are in the rows of all of its tokens. num_token_types: texts that a pair may have.
    """

    features = ("penstock.features.encoder_inputs",)
    # Its own code numbers the positions.
    first_position = 0

    def __init__(self, config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        assert config.pooling is not None, "a pooling model's configuration"
        self._is_classifier = config.pooling.has_classes
        self.model = _build(config)
        hf_config: Any = self.model.config
        size = next((value for name in _SIZES if (value := getattr(hf_config, name, None))), 0)
        self.hidden_size = len(config.pooling.labels) if self._is_classifier else size
        takes_types = "token_type_ids" in inspect.signature(self.model.forward).parameters
        self.num_token_types = getattr(hf_config, "type_vocab_size", 1) if takes_types else 1
        self._longest = config.longest_context
        self._slot = ContextSlot()
        replace_linears(self.model, self._slot, parallel)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        num_tokens, sequences = len(input_ids_T), context.sequences
        assert sequences is not None, "a step has its sequences"
        starts = sequences.query_start_loc_np[: sequences.num_actual_reqs + 1].tolist()
        if self._is_dummy(starts):
            starts = [0, min(num_tokens, self._longest)]
        of_all = context.of_all_tokens()
        types_T = of_all.input(TOKEN_TYPE_IDS) if self.num_token_types > 1 else None
        out_TD = torch.zeros(num_tokens, self.hidden_size, device=input_ids_T.device)
        for begin, end in itertools.pairwise(starts):
            text = {"input_ids": input_ids_T[begin:end].to(torch.int64).unsqueeze(0)}
            if types_T is not None:
                text["token_type_ids"] = types_T[begin:end].to(torch.int64).unsqueeze(0)
            with self._slot.holding(of_all.of_rows(itemgetter(slice(begin, end)))):
                output = self.model(**text)
            out_TD[begin:end] = output.logits[0] if self._is_classifier else output[0][0]
        return context.narrowed(out_TD)

    def _is_dummy(self, starts: list[int]) -> bool:
        """Whether a step has no request, or one that is longer than any text; one text is run in it then."""
        return len(starts) < 2 or max(end - begin for begin, end in itertools.pairwise(starts)) > self._longest

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        raise NotImplementedError("a pooling model has no language model head")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return slots_of_modules(self.model)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.checkpoint_slots())

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Checkpoints of other classes of the family have another prefix."""
        prefix = f"{self.model.base_model_prefix}."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self._names:
                return candidate
        return name


def _build(config: ModelConfig) -> nn.Module:
    import transformers

    pooling = config.pooling
    assert pooling is not None, "a pooling model's configuration"
    use = pooling.architecture.use
    name = pooling.architecture.name if pooling.has_classes else None
    kinds: dict[Use, Any] = {
        Use.CLASSIFY: transformers.AutoModelForSequenceClassification,
        Use.CLASSIFY_TOKENS: transformers.AutoModelForTokenClassification,
    }
    try:
        fields = dict(config.hf_config)
        hf_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        hf_config._attn_implementation = "eager"
        auto = kinds.get(use, transformers.AutoModel) if name else transformers.AutoModel
        with torch.device("meta"):
            model = auto.from_config(
                hf_config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:
        raise UnsupportedModel(
            f"{config.model} ({pooling.architecture.name}) cannot be built by Transformers: "
            f"{type(error).__name__}: {error}."
        ) from error
    from penstock.models.transformers_fallback.buffers import create_buffers

    model = model.eval().requires_grad_(False)
    create_buffers(model)
    return model  # type: ignore[no-any-return]
