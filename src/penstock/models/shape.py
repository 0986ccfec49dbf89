"""The sizes of a model's layers, from `config.json` alone: what a memory plan needs, without building the model.

Needs no torch. Fields have the names that most families share, and some have others; where a family means something of
its own by a field that is absent, that is said here once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.errors import UnsupportedFeature
from penstock.models.config_fields import ConfigFields
from penstock.models.qwen_windows import read_qwen_windows

# Windows by layer, from the fields and the number of layers.
ReadWindows = Callable[[ConfigFields, int], list[int | None]]
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
# What an absent intermediate size means in families that may leave it out.
_DEFAULT_WIDENING = 4
# Head sizes that do not follow from the hidden size when `head_dim` is absent.
_DEFAULT_HEAD_SIZE = {
    "Qwen3ForCausalLM": 128,
    "GemmaForCausalLM": 256,
    "Gemma2ForCausalLM": 256,
    "Gemma3ForCausalLM": 256,
}
# Windows that a configuration without `sliding_window` means.
_DEFAULT_WINDOW = dict.fromkeys(
    ("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM"), 4096
)
# Every n-th layer sees everything, where `layer_types` is absent and `sliding_window_pattern` too.
_DEFAULT_PATTERN = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "Cohere2ForCausalLM": 4}
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Positions are added to the embedding, and nothing turns.
_WITHOUT_ROTARY = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OPTForCausalLM")
_TIED_BY_DEFAULT = (
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "OPTForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Cohere2ForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)
_KINDS_WITH_WINDOW = ("sliding_attention", "sliding")
_KINDS = ("full_attention", "global", *_KINDS_WITH_WINDOW)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder whose layers differ only in their windows.

    windows: by layer, the number of last positions that it sees, None for all.
    rotary_dim: dimensions of a head that turn, 0 without rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    rotary_dim: int
    ties_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_size(self) -> int:
        """Values that a token's queries, keys and values have in one layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, FullAttentionSpec | SlidingWindowSpec]:
        """What each layer stores, by a name of its own. dtype: of the cache, by name."""
        specs: dict[str, FullAttentionSpec | SlidingWindowSpec] = {}
        full = FullAttentionSpec(
            block_size=block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=dtype
        )
        for layer, window in enumerate(self.windows):
            specs[f"layer {layer}"] = (
                full
                if window is None
                else SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_size=self.head_size,
                    dtype=dtype,
                    sliding_window=window,
                )
            )
        return specs


def read_shape(model_config: ModelConfig, read_windows: ReadWindows | None = None) -> ModelShape:
    """The shape that `config.json` describes. read_windows: where a family has rules of its own for them.

    Raises ModelError for a field that is missing or damaged, UnsupportedFeature for kinds of layers that no decoder
    here has.
    """
    fields, architecture = ConfigFields(model_config), model_config.architecture
    hidden_size = _integer(fields, _HIDDEN)
    num_heads = _integer(fields, _HEADS)
    num_layers = _integer(fields, _LAYERS)
    usual_head_size = _DEFAULT_HEAD_SIZE.get(architecture, max(1, hidden_size // num_heads))
    head_size = fields.integer("head_dim", default=usual_head_size)
    return ModelShape(
        vocab_size=model_config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, _INTERMEDIATE, default=_DEFAULT_WIDENING * hidden_size),
        num_heads=num_heads,
        num_kv_heads=1 if fields.hf_config.get("multi_query") else _integer(fields, _KV_HEADS, default=num_heads),
        head_size=head_size,
        windows=tuple(
            _read_windows(fields, architecture, num_layers)
            if read_windows is None
            else read_windows(fields, num_layers)
        ),
        rotary_dim=0 if architecture in _WITHOUT_ROTARY else head_size,
        ties_embeddings=fields.flag("tie_word_embeddings", default=architecture in _TIED_BY_DEFAULT),
    )


def _integer(fields: ConfigFields, names: tuple[str, ...], default: int | None = None) -> int:
    """The first of these fields that is there."""
    for name in names:
        if fields.hf_config.get(name) is not None:
            return fields.integer(name)
    return fields.integer(names[0], default)


def _read_windows(fields: ConfigFields, architecture: str, num_layers: int) -> list[int | None]:
    if architecture in _QWEN:
        return read_qwen_windows(fields, num_layers)
    window = None
    if fields.flag("use_sliding_window", default=True):  # some write a window of 0 where it is not used
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW.get(architecture))
    kinds = fields.layer_types(num_layers)
    if kinds is not None:
        unknown = sorted({str(kind) for kind in kinds if kind not in _KINDS})
        if unknown:
            raise fields.unsupported("layer_types", unknown, ", ".join(_KINDS))
        if window is None and any(kind in _KINDS_WITH_WINDOW for kind in kinds):
            raise UnsupportedFeature(
                f"config.json of {fields.model_config.model} has layers with a sliding window, but no sliding_window."
            )
        return [window if kind in _KINDS_WITH_WINDOW else None for kind in kinds]
    pattern = fields.hf_config.get("sliding_window_pattern") or _DEFAULT_PATTERN.get(architecture)
    if pattern is None:
        return [window] * num_layers
    return [window if (layer + 1) % int(pattern) else None for layer in range(num_layers)]
