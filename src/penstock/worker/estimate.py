"""What a worker will need, from a model's shape and its checkpoint's headers. Needs no torch and no device.

Every figure is the one that the worker measures or counts later, derived from what the code keeps at its fullest
moment; `docs/memory.md` shows the derivation. All sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import SamplingConfig, env
from penstock.config.capped_attention import capped_queries
from penstock.config.program import PROGRAM_ROWS
from penstock.config.sampling import MAX_PROMPT_RESULTS, rows_at_once
from penstock.contract.kv_cache import DTYPE_BYTES
from penstock.device.dtypes import DtypeChoice, has_native_kernels
from penstock.errors import UnsupportedFeature
from penstock.loader.headers import TensorHeader
from penstock.models.shape import ModelShape
from penstock.worker.memory_plan import StepMemory
from penstock.worker.quantized_estimate import PlainProducts

FLOAT_BYTES = 4
_FLOAT_DTYPES = ("F32", "BF16", "F16", "FloatStorage", "BFloat16Storage", "HalfStorage")
# What checkpoints hold although it follows from the configuration: rotary frequencies and causal masks.
_NO_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias")
HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight", "decoder.weight")
# Where kernels.linear packs a float32 weight for oneDNN; a head that is tied to the embedding is then there twice. Our
# own kernels hold it once.
_MIN_PACKED_ELEMENTS = 256 * 1024
# Per logit, when the ranks of log-probabilities are counted: what is compared, as bool and as int64.
_RANK_BYTES = 1 + 8
# Per logit, at the fullest moment of the stages, raw and processed logits among it. Top-p has the sorted ones, their
# probabilities, two sums of those, and what is counted. The draw, where it is not in C++, has probabilities, and those
# and their running sum in float64.
_TOP_P_BYTES = 6 * 4 + 1
_DRAW_BYTES = 3 * 4 + 2 * 8
# Per log-probability: its token and logit as found, the same beside the sampled token, and the result.
_LOGPROB_BYTES = (8 + 4) + (8 + 4) + 4
# Of these, the token and the result are kept.
_KEPT_LOGPROB_BYTES = 8 + 4
# Of a process that has imported torch and what else an engine needs, before it loads a model.
PROCESS_BYTES = {"cpu": 230 << 20, "cuda": 0}
# Of a token: its id, its position, and where its key and value are written.
INPUT_BYTES = 4 + 8 + 8
# cuBLAS's, which torch allocates as it does tensors.
WORKSPACE_BYTES = {"cpu": 0, "cuda": 32 << 20}
# What the CPU's libraries take at their first product: code, tables and buffers.
LIBRARY_BYTES = 8 << 20
# What the C library holds back of the memory that tensors give back, at most, as measured: three places of the largest
# size, 32 MiB, that glibc's malloc does not ask the system for by itself. It ends its heap earlier only once twice as
# much is free at its end, and a place that an aligned tensor left is too small for the next one of its size.
_MAX_HELD_BACK_BYTES = 96 << 20


def count_parameters(headers: Mapping[str, TensorHeader], shape: ModelShape) -> int:
    """Values of a checkpoint's weights; what it holds beside them does not count.

    Raises UnsupportedFeature for a tensor of a dtype that cannot be loaded.
    """
    return sum(weights_of(headers, shape).values())


def count_vector_parameters(headers: Mapping[str, TensorHeader], shape: ModelShape) -> int:
    """Those of them that are in no matrix: norms and biases, which are kept in the compute dtype."""
    return sum(count for name, count in weights_of(headers, shape).items() if len(headers[name].shape) < 2)


def weights_of(headers: Mapping[str, TensorHeader], shape: ModelShape) -> dict[str, int]:
    """By name, the values of each weight. Raises UnsupportedFeature as `count_parameters` does."""
    counts = {}
    for name, header in headers.items():
        if is_no_weight(name) or (shape.ties_embeddings and name in HEADS):
            continue
        if header.dtype not in _FLOAT_DTYPES:
            raise UnsupportedFeature(
                f"The tensor {name} has the dtype {header.dtype}, which cannot be loaded. Take a checkpoint in "
                "float32, bfloat16 or float16."
            )
        counts[name] = header.num_elements
    return counts


def is_no_weight(name: str) -> bool:
    """Whether checkpoints hold this beside weights."""
    return _NO_WEIGHTS.fullmatch(name) is not None


def estimate_weights(
    num_parameters: int, num_vectors: int, shape: ModelShape, dtype: DtypeChoice, max_model_len: int
) -> int:
    """Parameters and buffers, whatever dtype the checkpoint has. num_vectors: `count_vector_parameters`."""
    rotary_table = max_model_len * shape.rotary_dim * FLOAT_BYTES
    matrices = (num_parameters - num_vectors) * DTYPE_BYTES[dtype.weights]
    return matrices + num_vectors * DTYPE_BYTES[dtype.name] + rotary_table


def head_copy_bytes(shape: ModelShape, dtype: DtypeChoice, device: str, *, reads_packed_rows: bool = True) -> int:
    """The head of a tied model once more, where oneDNN packs it and it is not kept as integers.

    reads_packed_rows: the embedding reads what our own kernels pack; else those pack a copy too, and in the compute
    dtype, in which the embedding wants it.
    """
    if not shape.ties_embeddings:
        return 0
    return packed_copy_bytes(shape.vocab_size * shape.hidden_size, dtype, device, reads_packed_rows=reads_packed_rows)


def packed_copy_bytes(num_values: int, dtype: DtypeChoice, device: str, *, reads_packed_rows: bool) -> int:
    """The second copy of a weight that an embedding and a head share, as `head_copy_bytes` says."""
    if device != "cpu" or dtype.name != "float32":
        return 0
    has_own_products = has_native_kernels() and not env.uses_torch_products()
    has_copy = not reads_packed_rows if has_own_products else num_values >= _MIN_PACKED_ELEMENTS
    kept = dtype.weights if reads_packed_rows else dtype.name
    return num_values * DTYPE_BYTES[kept] if has_copy else 0


def _is_native(dtype: str, device: str) -> bool:
    """Whether our C++ kernels compute."""
    return device == "cpu" and dtype == "float32" and has_native_kernels()


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """is_gated: the feed-forward network multiplies two projections. normalises_heads: queries and keys are copied
    when they are normalised, instead of being turned where they lie, but for fuses_head_norms: our own kernel
    normalises them as it attends. normalises_together: all queries at once, and then all keys, rather than head by
    head. widens: norms of lower precision make float32 copies.
    kept_in_attention, kept_in_mlp: tensors of the hidden size that are there meanwhile: the residual stream and the
    normalised input of this layer, and what the layer before it returned.
    embeds_positions: each position has a learned embedding. caps_scores: attention's are soft-capped.
    is_recorded: our own kernels run all layers as one program, in buffers that the layers share.
    """

    is_gated: bool = True
    normalises_heads: bool = False
    fuses_head_norms: bool = False
    normalises_together: bool = False
    widens: bool = True
    kept_in_attention: int = 3
    kept_in_mlp: int = 4
    embeds_positions: bool = False
    caps_scores: bool = False
    is_recorded: bool = True


# Of what is added to the residual stream in place, or normalised only afterwards, less is there.
_TRAITS = {
    "GPT2LMHeadModel": LayerTraits(
        is_gated=False,
        widens=False,
        kept_in_attention=2,
        kept_in_mlp=2,
        embeds_positions=True,
        is_recorded=False,
    ),
    "Gemma2ForCausalLM": LayerTraits(caps_scores=True),
    "Gemma3ForCausalLM": LayerTraits(normalises_heads=True, fuses_head_norms=True),
    "Olmo2ForCausalLM": LayerTraits(
        normalises_heads=True, normalises_together=True, kept_in_attention=2, kept_in_mlp=3, is_recorded=False
    ),
    "Qwen3ForCausalLM": LayerTraits(normalises_heads=True, fuses_head_norms=True),
}


def layer_traits(architecture: str) -> LayerTraits:
    """What the layers of a native family have of their own."""
    return _TRAITS.get(architecture, LayerTraits())


def weights_of_shape(shape: ModelShape, traits: LayerTraits, num_positions: int) -> dict[str, TensorHeader]:
    """The tensors of a native family, for random weights, which have no checkpoint. Biases are left out."""
    hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_layers
    sizes = {
        "embed_tokens": (shape.vocab_size, hidden),
        "positions": (num_positions if traits.embeds_positions else 0, hidden),
        "qkv_proj": (layers, shape.qkv_size, hidden),
        "o_proj": (layers, hidden, shape.num_heads * shape.head_size),
        "up_proj": (layers, 2 * inner if traits.is_gated else inner, hidden),
        "down_proj": (layers, hidden, inner),
        "norms": (2 * layers + 1, hidden),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    return {name: TensorHeader("F32", size) for name, size in sizes.items()}


def estimate_step(
    shape: ModelShape,
    traits: LayerTraits,
    *,
    num_tokens: int,
    num_rows: int,
    dtype: str,
    device: str,
    sampling: SamplingConfig,
    products: PlainProducts | None = None,
) -> StepMemory:
    """The tensors of the heaviest step: `num_tokens` through the layers, and `num_rows` requests to sample for.

    products: of quantised weights, where those need memory of their own.
    """
    value = DTYPE_BYTES[dtype]
    is_native = _is_native(dtype, device)
    hidden, rotation = shape.hidden_size * value, 0 if is_native else 2 * shape.rotary_dim * value
    heads, mixed = _head_bytes(shape, traits, value, is_native=is_native), shape.num_heads * shape.head_size * value
    # The backend's result, and its place in the step's, where our own kernel writes its result at once. It works in
    # float32, to which bfloat16 is widened beside it.
    results = mixed if is_native else 2 * mixed
    if dtype == "bfloat16" and device == "cpu" and has_native_kernels():
        results = (shape.qkv_size + shape.num_heads * shape.head_size) * FLOAT_BYTES
    if traits.caps_scores and device == "cpu" and not has_native_kernels():
        results += _capped_scores_bytes(shape.num_heads, num_tokens, dtype)
    kept = max(traits.kept_in_attention, traits.kept_in_mlp) * hidden
    inside = max(
        kept + (_norm_bytes(shape.hidden_size, value) if traits.widens and not is_native else 0),
        kept + (_head_norm_bytes(shape, traits, value) if traits.normalises_heads and not is_native else 0),
        traits.kept_in_attention * hidden + heads + results,
        traits.kept_in_attention * hidden + heads + mixed + hidden,
        traits.kept_in_mlp * hidden + _mlp_values(shape, traits) * value,
    )
    activations = num_tokens * (INPUT_BYTES + rotation + inside)
    if is_native and traits.is_recorded and not env.uses_torch_products():
        activations = num_tokens * (INPUT_BYTES + _program_values(shape) * value)
        activations += min(num_tokens, PROGRAM_ROWS) * _part_values(shape, traits) * value
    if products is not None:
        beside = num_tokens * (INPUT_BYTES + rotation)
        in_products = _product_moments(shape, traits, products, num_tokens, value)
        activations = max(activations, beside + max(in_products))
    return StepMemory(
        activations=WORKSPACE_BYTES[device] + activations,
        sampling=logits_bytes(shape.vocab_size, num_tokens, num_rows, sampling, device),
    )


def _product_moments(
    shape: ModelShape, traits: LayerTraits, products: PlainProducts, num_tokens: int, value: int
) -> list[int]:
    """What there is while a layer's four products are computed: inputs, results, and what the products work with."""
    hidden, mixed, inner = shape.hidden_size, shape.num_heads * shape.head_size, shape.intermediate_size
    widened = 2 * inner if traits.is_gated else inner
    moments = (
        (traits.kept_in_attention * hidden + shape.qkv_size, hidden, shape.qkv_size),
        (traits.kept_in_attention * hidden + shape.qkv_size + mixed + hidden, mixed, hidden),
        (traits.kept_in_mlp * hidden + widened, hidden, widened),
        (traits.kept_in_mlp * hidden + inner + hidden, inner, hidden),
    )
    return [
        num_tokens * values * value + products.working_bytes(num_tokens, num_inputs, num_outputs, value)
        for values, num_inputs, num_outputs in moments
    ]


def resident_step(tensors: StepMemory, device: str, split_contexts: int = 0) -> StepMemory:
    """The memory that a step takes from the system. split_contexts: what attention keeps of them."""
    if device != "cpu":
        return tensors
    return StepMemory(
        activations=LIBRARY_BYTES + tensors.activations + _held_back(tensors.activations) + split_contexts,
        sampling=tensors.sampling + _held_back(tensors.sampling),
    )


def _held_back(tensor_bytes: int) -> int:
    return min(tensor_bytes, _MAX_HELD_BACK_BYTES)


def logits_bytes(vocab_size: int, num_tokens: int, num_rows: int, sampling: SamplingConfig, device: str) -> int:
    """What the logits of a step take, and what is made of them: sampling, or the log-probabilities of a prompt.

    A step computes its prompts' log-probabilities first, and gives that memory back before it samples.
    """
    return max(
        sampling_bytes(vocab_size, num_rows, rows_at_once(vocab_size, device), sampling, device),
        _prompt_logprobs_bytes(vocab_size, num_tokens, sampling, device),
    )


def sampling_bytes(vocab_size: int, num_rows: int, max_rows: int, sampling: SamplingConfig, device: str) -> int:
    """What sampling takes for all rows, of which `max_rows` are worked on at once."""
    at_once = min(num_rows, max_rows)
    row_bytes = max(
        vocab_size * (_TOP_P_BYTES if _is_native("float32", device) else _DRAW_BYTES),
        vocab_size * (2 * FLOAT_BYTES + _RANK_BYTES) + sampling.most_logprobs(vocab_size) * _LOGPROB_BYTES,
    )
    return at_once * row_bytes + (num_rows - at_once) * waiting_row_bytes(vocab_size, sampling)


def waiting_row_bytes(vocab_size: int, sampling: SamplingConfig) -> int:
    """What a row keeps while others are worked on: its logits, and log-probabilities, twice when all are joined."""
    return vocab_size * FLOAT_BYTES + sampling.most_logprobs(vocab_size) * 2 * _KEPT_LOGPROB_BYTES


def prompt_results_bytes(vocab_size: int, num_tokens: int, sampling: SamplingConfig) -> int:
    """The log-probabilities of a step's prompts, which wait until all are made; those of whole vocabularies leave."""
    num_results = num_tokens * (1 + sampling.most_logprobs(vocab_size))
    return min(num_results, MAX_PROMPT_RESULTS) * _KEPT_LOGPROB_BYTES


def _prompt_logprobs_bytes(vocab_size: int, num_tokens: int, sampling: SamplingConfig, device: str) -> int:
    row_bytes = vocab_size * (FLOAT_BYTES + _RANK_BYTES) + sampling.most_logprobs(vocab_size) * _LOGPROB_BYTES
    num_rows = min(num_tokens, rows_at_once(vocab_size, device))
    return num_rows * row_bytes + prompt_results_bytes(vocab_size, num_tokens, sampling)


def _norm_bytes(num_values: int, value: int) -> int:
    """Norms compute in float32: of lower precision they hold the widened and the scaled values beside the result.

    Those of our own kernels hold nothing but the result.
    """
    return num_values * (FLOAT_BYTES if value == FLOAT_BYTES else 2 * FLOAT_BYTES + value)


def _head_norm_bytes(shape: ModelShape, traits: LayerTraits, value: int) -> int:
    num_heads = shape.num_heads + (0 if traits.normalises_together else shape.num_kv_heads)
    return shape.qkv_size * value + _norm_bytes(num_heads * shape.head_size, value)


def _head_bytes(shape: ModelShape, traits: LayerTraits, value: int, *, is_native: bool) -> int:
    """Queries, keys and values, and copies of the first two if any."""
    is_copied = traits.normalises_heads and not (traits.fuses_head_norms and is_native)
    copies = (shape.num_heads + shape.num_kv_heads) * shape.head_size if is_copied else 0
    return (shape.qkv_size + copies) * value


def _capped_scores_bytes(num_heads: int, num_tokens: int, dtype: str) -> int:
    """Per token of a prompt of so many: the scores that are in memory at once, and the weights made of them.

    Both are float32; of a narrower dtype there are the weights in that one, too.
    """
    num_queries = capped_queries(num_heads, num_tokens)
    return num_queries * num_heads * (2 * FLOAT_BYTES + (DTYPE_BYTES[dtype] if dtype != "float32" else 0))


def _program_values(shape: ModelShape) -> int:
    """The residual stream, which becomes the output, and attention's input and result."""
    return shape.hidden_size + shape.qkv_size + shape.num_heads * shape.head_size


def _part_values(shape: ModelShape, traits: LayerTraits) -> int:
    """What becomes the residual stream, and the widened token beside its activation or what it was widened from."""
    return shape.hidden_size + max(_mlp_values(shape, traits), shape.hidden_size + 2 * shape.intermediate_size)


def _mlp_values(shape: ModelShape, traits: LayerTraits) -> int:
    """The widened token (both projections where there are two), and its activation beside it."""
    return (3 if traits.is_gated else 2) * shape.intermediate_size
