"""Combinations of features and arrangements of workers: the results of one worker, or a refusal."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import AsyncEngine
from penstock.checkpoints.quantized_checkpoint import QUANTIZED_CHECKPOINTS, quantization_of_checkpoint
from penstock.config import EngineConfig
from penstock.config.speculative import METHODS
from penstock.contract import RpcCall
from penstock.engine.dispatcher import start_core
from penstock.errors import UnsupportedArgument
from penstock.features.lora.request import LoRARequest
from penstock.worker.capabilities import ASYNC_REFUSALS, REFUSALS, Refusal, check_options
from support.adapters import VARIANTS, make_adapters
from support.arrangements import PROMPTS
from support.checkpoints import edit_config, tiny_checkpoint, tiny_model
from support.draft_heads import eagle3_weights, eagle_weights, write_head, write_mimo
from support.encoder_decoders import write_encoder_decoder
from support.engines import greedy
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.gguf_files import write_gguf
from support.mxfp4_checkpoints import write_mxfp4
from support.quantized_checkpoints import (
    awq_layer,
    gptq_layer,
    packed_layer,
    torchao_config,
    torchao_int8_layer,
    w4a16,
    write_quantized,
)
from support.torchrun import torchrun
from support.transformers_models import FAMILIES, save_for_fallback, tiny_transformers_model
from support.tried_features import (
    LAYERS,
    TRIED_TOGETHER,
    VOCAB_SIZE,
    Engine,
    arranged,
    drafts_of,
    options_of_all,
    plain,
    sampled,
    started,
    write_hybrid,
    write_model,
)

STAGES = {"pipeline_parallel_size": 2, "pipeline_layers": (2, 4)}
TENSOR = {"tensor_parallel_size": 2}
TURNS = {**TENSOR, "decode_context_parallel_size": 2}
SCATTERED = {**TENSOR, "enable_sp": True, "sp_min_token_num": 6}
ALL_AT_ONCE = {**STAGES, **TURNS, **SCATTERED}
CORE = {"enable_multiprocessing": True}
ENGINES = {"data_parallel_size": 2}
RAY = {"distributed_executor_backend": "ray"}
LAUNCHED = {"distributed_executor_backend": "external_launcher", "step_timeout_s": 60.0}
# Options of each arrangement.
ARRANGED: dict[str, dict[str, Any]] = {
    "uni": {},
    "TP": TENSOR,
    "PP": STAGES,
    "TP x PP": {**TENSOR, **STAGES},
    "DCP": TURNS,
    "SP": SCATTERED,
    "PP x DCP x SP": ALL_AT_ONCE,
    "mp": {"distributed_executor_backend": "mp"},
    "core": CORE,
    "DP": ENGINES,
    "Ray": RAY,
    "torchrun": LAUNCHED,
    "torchrun x PP": {**LAUNCHED, **STAGES},
    "torchrun x core": {**LAUNCHED, **CORE},
}
# Those that this process can start, and are not tried as a part of others: TP has workers in processes of their own,
# and several engines have cores in processes of their own.
STARTED_HERE = [name for name in ARRANGED if name not in ("uni", "mp", "core") and not name.startswith("torchrun")]
# What the features are tried in that need no engine of their own.
TOGETHER: dict[str, dict[str, Any]] = {
    **{name: ARRANGED[name] for name in STARTED_HERE if name not in ("DP", "Ray")},
    "DP x TP": {**ENGINES, **TENSOR},
    "Ray x PP": {**RAY, **STAGES},
}
SIZES = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": LAYERS, "head_dim": 16, "num_key_value_heads": 1}
# How options of refusals are asked for that are not in `ARRANGED` or `WAYS`.
OTHERS = {
    "core process": "core",
    "output heads that pool": "pooling",
    "speculative decoding": "n-gram drafts",
}


def continuations(engine: Engine, adapters: Sequence[LoRARequest | None] = (None,) * 4) -> Any:
    """Tokens of requests of each kind, twice, for prefix-cache hits; and log-probabilities of prompts."""
    params = [greedy(12), sampled(1, presence_penalty=0.5), greedy(12, logprobs=1), sampled(2, top_k=9)]
    tokens = [engine.tokens(PROMPTS[:4], params, lora_request=adapters) for _ in range(2)]
    outputs = engine.generate(PROMPTS[1:4], greedy(1, prompt_logprobs=0), lora_request=adapters[1:])
    return tokens, [logprob_of(entry) for out in outputs for entry in (out.prompt_logprobs or [])[1:]]


def with_adapters(engine: Engine) -> Any:
    """As `continuations`, of adapters that take turns and of the model itself."""
    folders = sorted(engine.folder.glob("adapter*"))
    if engine.folder.is_relative_to(Path.cwd()):
        # Ranks of torchrun, each with a folder of its own, name adapters alike.
        folders = [folder.relative_to(Path.cwd()) for folder in folders]
    adapters = [None, *(LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))]
    found = continuations(engine, adapters)
    assert len(set(map(tuple, engine.tokens([PROMPTS[0]] * 4, greedy(12), lora_request=adapters)))) > 1
    return found


def pooled(engine: Engine) -> Any:
    """Embeddings, twice."""
    given: Any = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    first, again = ([out.outputs.embedding for out in engine.llm.embed(given, use_tqdm=False)] for _ in range(2))
    assert first == again
    return ((), ()), [float(value) for embedding in first for value in embedding]


@dataclass(frozen=True)
class Way:
    """Options and model of a feature that needs an engine of its own.

    attempt: returns results twice, and numbers. of: other features that the model has.
    off_by: how far log-probabilities with TP may be from those of one worker, in the mean, since each worker rounds its
    own share of weights or inputs, or sums that were added in another order; tokens may differ then. One worker is as
    far from unrounded ones; those of another text are off by 2. On any number of workers a request has the same tokens
    again, and from cached prefixes.
    """

    options: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})
    model: Callable[[Path], Path] = write_model
    off_by: float = 0.0
    attempt: Callable[[Engine], Any] = continuations
    of: tuple[str, ...] = ()


def always(**options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: options


def drafting(method: str, **fields: Any) -> Callable[[Path], dict[str, Any]]:
    return always(speculative_config={"method": method, "num_speculative_tokens": 2, "adaptive": False, **fields})


def for_texts(folder: Path) -> dict[str, Any]:
    path = folder / "texts.jsonl"
    path.write_text('{"text": "the cat sat on the mat, and the hat was a rat"}\n' * 8)
    return {"quantization": "int4", "quantization_calibration": str(path)}


def with_draft_model(folder: Path) -> dict[str, Any]:
    model = folder / "draft_model"
    tiny_checkpoint(model, vocab_size=VOCAB_SIZE, head_dim=16, num_key_value_heads=1, seed=7)
    return drafting("draft_model", model=str(model))(folder)


def with_head(folder: Path, method: str = "eagle", weights: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    weights = {
        name: tensor[:16] if ".k_proj." in name or ".v_proj." in name else tensor
        for name, tensor in (weights or eagle_weights()).items()
    }
    sizes = {"max_position_embeddings": 128, "num_key_value_heads": 1, "draft_vocab_size": 40}
    write_head(folder / method, weights, **sizes)
    return drafting(method, model=str(folder / method))(folder)


def with_head_on_layers(folder: Path) -> dict[str, Any]:
    return with_head(folder, "eagle3", eagle3_weights())


def of_vocabulary_of_heads(folder: Path) -> Path:
    return tiny_checkpoint(folder, num_hidden_layers=LAYERS, head_dim=16, num_key_value_heads=1).folder


def gpt2(folder: Path) -> Path:
    return tiny_checkpoint(folder, "gpt2", vocab_size=VOCAB_SIZE, n_layer=LAYERS).folder


def bart(folder: Path) -> Path:
    return write_encoder_decoder(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=128)


def with_latents(folder: Path) -> Path:
    return tiny_checkpoint(folder, "deepseek_v3", vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS).folder


def without_attention(folder: Path) -> Path:
    return tiny_checkpoint(folder, "mamba2", vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS).folder


def with_mtp_layer(folder: Path) -> Path:
    return write_mimo(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS, num_key_value_heads=1)


def for_adapters(folder: Path) -> dict[str, Any]:
    """Adapters of some modules, of all, and of the embedding."""
    if not (folder / "adapter0").exists():
        make_adapters(tiny_model("llama", **SIZES), folder, [VARIANTS[0], VARIANTS[1], VARIANTS[4]])
    return {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}


def of_whole_texts(folder: Path) -> Path:
    write_model(folder)
    return edit_config(folder, is_causal=False).folder


def gguf_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model("llama", **{**SIZES, "hidden_size": 64, "intermediate_size": 128})
    return write_gguf(model, "llama", folder / "model.gguf", Type.Q8_0)


def mxfp4(folder: Path) -> Path:
    return write_mxfp4(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS)[0].folder


def float8(folder: Path) -> Path:
    """A checkpoint whose projections have FP8 weights with one scale each."""
    tiny_checkpoint(folder, **SIZES, tie_word_embeddings=False)
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = stored[f"{name}_scale"] = weight.abs().amax() / 448
            weight = (weight / scale).to(torch.float8_e4m3fn)
        stored[name] = weight
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return edit_config(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}).folder


def gpt_oss(folder: Path) -> Path:
    return tiny_checkpoint(folder, "gpt_oss", vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS).folder


def of_transformers(folder: Path) -> Path:
    class_name, changes = FAMILIES["starcoder2"]
    return save_for_fallback(tiny_transformers_model(class_name, **changes), folder).folder


def quantized(quantize: Any, config: dict[str, Any]) -> Way:
    sizes = {**SIZES, "intermediate_size": 128}
    return Way(model=lambda folder: write_quantized(folder, quantize, config, **sizes).config.folder, off_by=0.1)


POOLING = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT8_OF_TORCHAO = torchao_config("Int8WeightOnlyConfig", group_size=None)
WAYS = {
    "GPT-2": Way(model=gpt2),
    "encoder-decoder models": Way(model=bart),
    "attention sinks": Way(model=gpt_oss),
    "Transformers models": Way(model=of_transformers),
    "latent attention": Way(model=with_latents),
    "recurrent and hybrid models": Way(model=write_hybrid),
    "models without attention": Way(model=without_attention),
    "bfloat16 weights": Way(always(dtype="bfloat16", cpu_arithmetic="float32")),
    "bfloat16 arithmetic": Way(always(dtype="bfloat16", cpu_arithmetic="bfloat16"), off_by=0.05),
    # Stages round to nearest, since none of them can calibrate.
    "int8 weights": Way(always(quantization="int8", quantization_calibration="none"), off_by=0.15),
    "int4 weights": Way(always(quantization="int4", quantization_calibration="none"), off_by=0.7),
    "int4 with GPTQ calibration": Way(for_texts, off_by=1.0),
    "GPTQ checkpoints": quantized(gptq_layer(32, desc_act=False), GPTQ),
    "AWQ checkpoints": quantized(awq_layer(32), AWQ),
    "compressed-tensors checkpoints": quantized(packed_layer(32, symmetric=True), w4a16()),
    "torchao checkpoints": quantized(torchao_int8_layer, INT8_OF_TORCHAO),
    "GGUF checkpoints": Way(model=gguf_file, off_by=0.1),
    "MXFP4 checkpoints": Way(model=mxfp4, of=("attention sinks",), off_by=0.1),
    "FP8 checkpoints": Way(model=float8),
    "int8 KV cache": Way(always(kv_cache_dtype="int8"), off_by=0.01),
    "KV cache of another dtype than the model's": Way(always(kv_cache_dtype="bfloat16"), off_by=0.01),
    "FP8 KV cache": Way(always(kv_cache_dtype="fp8"), off_by=0.1),
    "torch's products of experts": Way(always(moe_backend="torch")),
    "batch invariance": Way(always(batch_invariant=True)),
    "n-gram drafts": Way(drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=2)),
    "suffix decoding": Way(drafting("suffix")),
    "draft model": Way(with_draft_model),
    "MTP": Way(drafting("mtp"), with_mtp_layer),
    "EAGLE": Way(with_head, of_vocabulary_of_heads),
    "EAGLE-3": Way(with_head_on_layers, of_vocabulary_of_heads),
    "adaptive draft lengths": Way(drafting("ngram", prompt_lookup_max=2, adaptive=True)),
    "weights in files": Way(lambda folder: {"weight_cache_dir": str(folder / "weights"), "cpu_offload_gb": 1}),
    "LoRA adapters": Way(for_adapters, attempt=with_adapters),
    "pooling": Way(always(**POOLING), attempt=pooled),
    "pooling of whole texts": Way(
        always(**POOLING, enable_chunked_prefill=False, max_num_batched_tokens=256),
        of_whole_texts,
        attempt=pooled,
        of=("pooling",),
    ),
}
# Options of those that no CPU has.
WAYS_ON_GPUS: dict[str, dict[str, Any]] = {
    "FP8 KV cache": {"kv_cache_dtype": "fp8"},
    "torch's products of experts": {"moe_backend": "torch"},
}
# Those that are tried in one engine, where none of them is refused.
SETS = (
    ("int8 weights", "int8 KV cache", "adaptive draft lengths"),
    ("int4 weights", "KV cache of another dtype than the model's"),
    ("int4 with GPTQ calibration", "suffix decoding"),
    ("bfloat16 weights", "draft model"),
    ("bfloat16 arithmetic",),
    *((name,) for name in WAYS if name.endswith("checkpoints")),
    ("GPT-2", "n-gram drafts", "batch invariance"),
    ("attention sinks",),
    ("encoder-decoder models",),
    ("Transformers models",),
    ("latent attention",),
    ("recurrent and hybrid models",),
    ("models without attention",),
    ("MTP",),
    ("EAGLE",),
    ("EAGLE-3",),
    ("weights in files",),
    ("LoRA adapters",),
    ("pooling",),
    ("pooling of whole texts",),
)


def refused_on_cpus(name: str, options: dict[str, Any]) -> bool:
    """Whether a refusal names the feature, or one that its model has, beside options that are given."""
    config = EngineConfig.create("demo", device="cpu", **options)
    names = {name, *(WAYS[name].of if name in WAYS else ())}
    return any(
        not names.isdisjoint(option.name for option in refusal.options)
        and all(option.name in names or option.given(config) for option in refusal.options)
        for refusal in (*ASYNC_REFUSALS, *REFUSALS)
        if refusal.device != "cuda"
    )


def allowed(names: Iterable[str], options: dict[str, Any]) -> tuple[str, ...]:
    """Return the features that are not refused with these options."""
    return tuple(name for name in names if not refused_on_cpus(name, options))


# Each set as far as an arrangement allows it, and the models that TP does not allow.
ALONE = [(allowed(names, ARRANGED[arrangement]), arrangement) for names in SETS for arrangement in STARTED_HERE]
ALONE += [(names, "mp") for names in SETS if not allowed(names, TENSOR)]


def logprob_of(entry: Any) -> float:
    (found,) = entry.values()
    return float(found.logprob)


def assert_near(found: Any, expected: Any, where: str = "") -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-4), where
    elif isinstance(expected, dict | list):
        assert len(found) == len(expected), where
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_near(found[key], expected[key], f"{where}[{key!r}]")
    else:
        assert found == expected, where


def try_together(
    model: Path, folder: Path, arrangement: dict[str, Any], *, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Results of features that need no engine of their own, by name of the function that tries them."""
    results: dict[str, Any] = {}
    failures = {}
    with started(model, folder, {**arranged(arrangement), **options_of_all(folder)}) as engine:
        for name in allowed(TRIED_TOGETHER, arrangement):
            attempt = TRIED_TOGETHER[name]
            if attempt.__name__ in (*results, *without):
                continue
            try:
                results[attempt.__name__] = plain(attempt(engine))
            except Exception as error:
                failures[name] = error
    assert not failures
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def of_one_worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return try_together(model, tmp_path_factory.mktemp("uni"), {})


@functools.cache
def of_one_worker_with(names: tuple[str, ...], folder: Path) -> Any:
    return try_alone(names, folder, {})


def try_alone(names: tuple[str, ...], folder: Path, arrangement: dict[str, Any]) -> Any:
    folder = folder / "-".join(names).replace("'", "")
    folder.mkdir(exist_ok=True)
    path = folder / "model"
    model = path if path.exists() else WAYS[names[0]].model(path)
    model = next((path / name for name in ("quantized", "mxfp4", "model.gguf") if (path / name).exists()), model)
    if model.is_dir():
        write_tokenizer(model, byte_level_tokenizer())
    options = {name: value for one in names for name, value in WAYS[one].options(folder).items()}
    with started(model, folder, {**arranged(arrangement), "kv_cache_memory_bytes": "2MiB", **options}) as engine:
        if "speculative_config" in options:
            assert max(engine.core.collective_rpc(RpcCall(drafts_of))) > 0
        (attempt,) = {WAYS[name].attempt for name in names} - {continuations} or {continuations}
        return attempt(engine)


def assert_as_of_one_worker(found: Any, names: tuple[str, ...], arrangement: dict[str, Any], folder: Path) -> None:
    (expected, likely), (tokens, probable) = of_one_worker_with(names, folder), found
    assert tokens[0] == tokens[1]
    off_by = max(WAYS[name].off_by for name in names)
    if off_by > 0 and "tensor_parallel_size" in arrangement:
        assert statistics.mean(abs(ours - theirs) for ours, theirs in zip(probable, likely, strict=True)) < off_by
    else:
        assert tokens == expected
        assert probable == pytest.approx(likely, abs=2e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of models that are tried alone."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """A Ray cluster, for all that is tried with it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


# What two processes try that torchrun has started, all of it in turn: with TP, where that is allowed.
LAUNCHED_TOGETHER = {"TP": {**LAUNCHED, **TENSOR}, "DCP x SP": {**LAUNCHED, **TURNS, **SCATTERED}}
LAUNCHED_ALONE = {
    names: {**LAUNCHED, **(TENSOR if allowed(names, {**LAUNCHED, **TENSOR}) == names else {})}
    for names in (allowed(names, LAUNCHED) for names in SETS)
}
PROGRAM = "import sys; from test_capabilities import try_launched; try_launched(*sys.argv[1:])"


def try_launched(model: str, folder: str) -> None:
    """Writes what was found, or what went wrong."""
    found: dict[Any, Any] = {}

    def note(name: Any, attempt: Callable[[], Any]) -> None:
        try:
            found[name] = attempt()
        except Exception:
            found[name] = traceback.format_exc()

    for name, options in LAUNCHED_TOGETHER.items():
        shared = Path(folder, name)
        shared.mkdir(exist_ok=True)
        note(name, functools.partial(try_together, Path(model), shared, options))
    own = Path(folder, os.environ["RANK"])
    own.mkdir()
    os.chdir(own)
    for names, options in LAUNCHED_ALONE.items():
        note(names, functools.partial(try_alone, names, own, options))
    Path(folder, f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def launched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Results of both processes."""
    folder = tmp_path_factory.mktemp("launched")
    with torchrun(folder, PROGRAM, model, folder, beside=Path(__file__)) as processes:
        said, _ = processes.communicate(timeout=500)
    assert processes.returncode == 0, said
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def test_every_feature_is_tried() -> None:
    tried = [name for names in SETS for name in names]
    assert sorted(tried) == sorted(name for name in WAYS if not refused_on_cpus(name, WAYS_ON_GPUS.get(name, {})))


def test_the_plain_engine_is_not_refused() -> None:
    config = EngineConfig.create("demo", device="cpu")
    check_options(config)
    check_options(config, "cuda")


@pytest.mark.slow
def test_what_is_tried_together_is_what_arrangements_can_do(
    model: Path, of_one_worker: dict[str, Any], tmp_path: Path
) -> None:
    """A part of what the slow tests try, for every day: a core in a process of its own, and stages."""
    slow = ("sharded_state", "new_weights")
    found = try_together(model, tmp_path, {**CORE, **STAGES}, without=slow)
    assert_near(found, {name: result for name, result in of_one_worker.items() if name not in slow})


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", TOGETHER)
def test_what_needs_no_engine_of_its_own_works(
    arrangement: str, model: Path, of_one_worker: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "Ray" in arrangement:
        request.getfixturevalue("two_nodes")
    found = try_together(model, tmp_path, TOGETHER[arrangement])
    assert_near(found, {name: of_one_worker[name] for name in found})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "arrangement"),
    [pytest.param(names, one, id=f"{' & '.join(names)} - {one}") for names, one in ALONE if names],
)
def test_what_is_allowed_gives_what_one_worker_gives(
    names: tuple[str, ...], arrangement: str, alone: Path, request: pytest.FixtureRequest
) -> None:
    options = ARRANGED[arrangement]
    if arrangement == "Ray":
        request.getfixturevalue("two_nodes")
    assert_as_of_one_worker(try_alone(names, alone, options), names, options, alone)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", LAUNCHED_TOGETHER)
def test_what_needs_no_engine_of_its_own_works_in_processes_of_torchrun(
    arrangement: str, launched: list[dict[Any, Any]], of_one_worker: dict[str, Any]
) -> None:
    for found in launched:
        results = found[arrangement]
        assert isinstance(results, dict), results
        assert results.keys() == {TRIED_TOGETHER[name].__name__ for name in allowed(TRIED_TOGETHER, LAUNCHED)}
        assert_near(results, {name: of_one_worker[name] for name in results})


@pytest.mark.slow
@pytest.mark.parametrize("names", LAUNCHED_ALONE, ids=" & ".join)
def test_processes_of_torchrun_give_what_one_worker_gives(
    names: tuple[str, ...], launched: list[dict[Any, Any]], alone: Path
) -> None:
    for found in launched:
        assert not isinstance(found[names], str), found[names]
        assert_as_of_one_worker(found[names], names, LAUNCHED_ALONE[names], alone)


@pytest.mark.parametrize(
    "refusal",
    [*ASYNC_REFUSALS, *REFUSALS],
    ids=lambda refusal: " & ".join(option.name for option in refusal.options),
)
def test_each_refusal_is_raised_at_start_with_its_text(refusal: Refusal, tmp_path: Path) -> None:
    names = [OTHERS.get(option.name, option.name) for option in refusal.options]
    ways = [WAYS[name] for name in names if name in WAYS]
    model = (ways or [Way()])[0].model(tmp_path / "model")
    options = {name: value for way in ways for name, value in way.options(tmp_path).items()}
    arrangement = {key: value for name in names for key, value in ARRANGED.get(name, {}).items()}
    config = EngineConfig.create(str(model), **{**arranged(arrangement), "device": refusal.device or "cpu", **options})
    with pytest.raises(UnsupportedArgument) as caught:
        start_or_serve(config, is_served="AsyncEngine" in names)
    assert str(caught.value) == refusal.message(config)
    assert str(caught.value).endswith(f": {refusal.why}. {refusal.instead}")
    assert all(str(option.given(config)) in str(caught.value) for option in refusal.options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Model and options of each way."""
    folder = tmp_path_factory.mktemp("written")
    return {
        name: (way.model(folder / str(number)), way.options(folder)) for number, (name, way) in enumerate(WAYS.items())
    }


def test_every_drafter_and_every_format_of_weights_is_tried(written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    configs = [EngineConfig.create(str(model), **options) for model, options in written.values()]
    assert {config.speculative.method for config in configs} == {None, *METHODS}
    assert {quantization_of_checkpoint(config.model.hf_config) for config in configs} == {None, *QUANTIZED_CHECKPOINTS}


def test_nothing_else_is_refused_on_cpus(written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    for name, (folder, options) in written.items():
        for arrangement, given in ARRANGED.items():
            if " x " in arrangement and arrangement.startswith("torchrun"):
                continue
            config = EngineConfig.create(str(folder), **{**arranged(given), "device": "cpu", **options})
            if refused_on_cpus(name, {**given, **WAYS_ON_GPUS.get(name, {})}):
                with pytest.raises(UnsupportedArgument):
                    check_options(config, "cpu")
            else:
                check_options(config, "cpu")


def test_float_and_quantized_models_are_not_refused_on_one_gpu(written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    quantized = [name for name in WAYS if name.endswith("checkpoints")]
    quantized += ["int8 weights", "int4 weights"]
    for name in ("n-gram drafts", "draft model", "bfloat16 weights", "GPT-2", "Transformers models", *quantized):
        model, options = written[name]
        check_options(EngineConfig.create(str(model), **options), "cuda")


def start_or_serve(config: EngineConfig, *, is_served: bool) -> None:
    if is_served:
        AsyncEngine.from_config(config)
    else:
        start_core(config)


def test_a_cache_of_the_models_own_dtype_is_taken_on_a_gpu(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE)
    edit_config(tmp_path, dtype="bfloat16")
    check_options(EngineConfig.create(str(tmp_path), kv_cache_dtype="bfloat16"), "cuda")
    with pytest.raises(UnsupportedArgument, match="kv_cache_dtype='float32' on cuda"):
        check_options(EngineConfig.create(str(tmp_path), kv_cache_dtype="float32"), "cuda")
