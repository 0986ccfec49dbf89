"""Whatever a family's configuration says, the logits are Transformers'."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import LoadConfig
from penstock.loader.loader import load_model
from penstock.parallel import ParallelState
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.plain_attention import sequence_logits

_RANDOM = Random(0)
SEQUENCES = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (30, 1, 11)]
NUM_LAYERS = 3
CAPS = st.sampled_from([None, 1.5, 5.0])
WINDOWS = st.sampled_from([1, 2, 7, 29, 100])
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
THETAS = st.sampled_from([100.0, 10000.0, 1000000.0])
HEADS: dict[str, st.SearchStrategy[Any]] = {
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
}
GATED = st.sampled_from(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])


def plain_rope(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": THETAS, **more})


def linear_rope() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"rope_type": st.just("linear"), "rope_theta": THETAS, "factor": st.floats(1, 9)})


@st.composite
def phi3_ropes(draw: st.DrawFn) -> dict[str, Any]:
    partial = draw(st.sampled_from([0.25, 0.5, 1.0]))
    if draw(st.booleans()):
        return draw(plain_rope(partial_rotary_factor=st.just(partial)))
    factors = st.lists(st.floats(1.0, 20.0), min_size=int(8 * partial), max_size=int(8 * partial))
    options = {"factor": st.floats(1, 40), "attention_factor": st.floats(0.5, 2)}
    return draw(
        st.fixed_dictionaries(
            {
                "rope_type": st.just("longrope"),
                "rope_theta": THETAS,
                "partial_rotary_factor": st.just(partial),
                "short_factor": factors,
                "long_factor": factors,
            },
            optional=options,
        )
    )


GEMMA = {
    **HEADS,
    "head_dim": st.sampled_from([8, 16, 32]),
    "query_pre_attn_scalar": st.integers(1, 300),
    "sliding_window": WINDOWS,
    "layer_types": KINDS,
    "attention_bias": st.booleans(),
    "final_logit_softcapping": CAPS,
    "hidden_activation": GATED,
}
CONFIGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "phi3": st.fixed_dictionaries(
        {
            **HEADS,
            "hidden_act": GATED,
            "sliding_window": st.none() | WINDOWS,
            "rope_parameters": phi3_ropes(),
            "original_max_position_embeddings": st.just(128),
        }
    ),
    "gemma2": st.fixed_dictionaries({**GEMMA, "attn_logit_softcapping": CAPS, "rope_parameters": linear_rope()}),
    "gemma3": st.fixed_dictionaries(
        {
            **GEMMA,
            "rope_parameters": st.fixed_dictionaries(
                {"full_attention": linear_rope(), "sliding_attention": plain_rope()}
            ),
        }
    ),
    "olmo2": st.fixed_dictionaries(
        {**HEADS, "hidden_act": GATED, "attention_bias": st.booleans(), "rope_parameters": linear_rope()}
    ),
    "ernie4_5": st.fixed_dictionaries(
        {
            **HEADS,
            "hidden_act": GATED,
            "use_bias": st.booleans(),
            "head_dim": st.sampled_from([8, 16, 32]),
            "rope_parameters": linear_rope(),
        }
    ),
    "hunyuan_v1_dense": st.fixed_dictionaries(
        {
            **HEADS,
            "hidden_act": GATED,
            "attention_bias": st.booleans(),
            "head_dim": st.sampled_from([8, 16, 32]),
            "rope_parameters": st.fixed_dictionaries(
                {
                    "rope_type": st.just("dynamic"),
                    "rope_theta": THETAS,
                    "alpha": st.floats(1.5, 2000.0),
                    "factor": st.just(1.0),
                }
            ),
        }
    ),
    "gpt2": st.fixed_dictionaries(
        {
            "n_head": st.sampled_from([1, 2, 8]),
            "n_inner": st.none() | st.integers(1, 150),
            "activation_function": st.sampled_from(["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu"]),
            "layer_norm_epsilon": st.sampled_from([1e-6, 1e-2]),
            "scale_attn_weights": st.booleans(),
            "scale_attn_by_inverse_layer_idx": st.booleans(),
            "tie_word_embeddings": st.booleans(),
        }
    ),
}


# Families made of parts of others, whose own tests are quick enough for every change.
_SLOW = ("ernie4_5", "hunyuan_v1_dense")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow if family in _SLOW else ()) for family in CONFIGS]
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_configuration_gives_transformers_logits(family: str, data: st.DataObject) -> None:
    overrides = data.draw(CONFIGS[family])
    num_layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": NUM_LAYERS}
    oracle = tiny_model(family, **num_layers, **overrides)
    with TemporaryDirectory() as folder:
        config = save_checkpoint(oracle, Path(folder))
        model = load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, tokens), rtol=0, atol=1e-4)
