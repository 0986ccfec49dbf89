"""Embeddings of whole engines, compared with sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock import LLM, PoolingParams
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest
from penstock.layers.linear import NATIVE
from support.pooling_models import (
    TINY_DECODER,
    TINY_ENCODER,
    TINY_MODERN_BERT,
    VOCAB,
    random_model,
    random_text,
    sentence_transformer,
)

pytest.importorskip("sentence_transformers")

TEXTS = [random_text(num_words, seed=num_words) for num_words in (1, 3, 17, 40, 100, 5, 64)]
_DISTIL = {"vocab_size": len(VOCAB), "dim": 32, "hidden_dim": 56, "n_layers": 2, "n_heads": 4}
_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3": ("last", {**TINY_DECODER, "head_dim": 16}, "lasttoken"),
    "Mistral": ("last", TINY_DECODER, "mean"),
    "Llama": ("last", TINY_DECODER, "cls"),
    "Qwen3_5Text": ("last", {**TINY_DECODER, **_DELTA}, "mean"),
    "Mamba": ("last", {"vocab_size": len(VOCAB), "hidden_size": 32, "num_hidden_layers": 2}, "lasttoken"),
    "Bert": ("bert", TINY_ENCODER, "mean"),
    "Roberta": ("roberta", {**TINY_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}, "cls"),
    "XLMRoberta": ("roberta", {**TINY_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}, "mean"),
    "ModernBert": ("bert", TINY_MODERN_BERT, "mean"),
    "DistilBert": ("bert", {**_DISTIL, "max_position_embeddings": 130}, "mean"),
    "MPNet": ("roberta", {**TINY_ENCODER, "pad_token_id": 1}, "max"),
    "Electra": ("bert", {**TINY_ENCODER, "embedding_size": 32}, "cls"),
}
DECODERS = ("Qwen3", "Mistral", "Llama")
_ONE_PATH = pytest.mark.one_path(reason="the programs of pooling models are compared with eager steps in one test")


def make_oracle(folder: Path, family: str, **options: Any) -> Any:
    kind, fields, pooling = MODELS[family]
    model = random_model(f"{family}Model", f"{family}Config", **fields)
    return sentence_transformer(folder, model, kind=kind, pooling=options.pop("pooling", pooling), **options)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder / "model", kv_cache_memory_bytes="4MiB", **options)


def embed(llm: LLM, texts: Sequence[str], **options: Any) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, **options)])


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return np.einsum("id,id->i", found, expected) / lengths  # type: ignore[no-any-return]


_FAMILIES = [
    family if family in ("Mistral", "Bert", "ModernBert") else pytest.param(family, marks=pytest.mark.slow)
    for family in MODELS
]


@pytest.fixture(scope="module", params=_FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, np.ndarray]:
    """A family, the folder of its model, and sentence-transformers' embeddings of TEXTS."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_oracle(folder, request.param).encode(TEXTS)


@_ONE_PATH
def test_embeddings_are_those_of_sentence_transformers(written: tuple[str, Path, np.ndarray]) -> None:
    _, folder, expected = written
    with open_llm(folder) as llm:
        assert cosines(embed(llm, TEXTS), expected).min() >= 0.99999


@_ONE_PATH
def test_a_text_has_the_same_bits_alone_and_in_a_batch(written: tuple[str, Path, np.ndarray]) -> None:
    _, folder, _ = written
    with open_llm(folder) as llm:
        together = embed(llm, TEXTS)
        alone = np.concatenate([embed(llm, [text]) for text in reversed(TEXTS)])[::-1]
    assert (together == alone).all()


@_ONE_PATH
@pytest.mark.slow
def test_a_text_in_chunks_has_the_same_bits(tmp_path: Path) -> None:
    for family in DECODERS:
        make_oracle(tmp_path / family, family)
        with open_llm(tmp_path / family) as whole, open_llm(tmp_path / family, max_num_batched_tokens=16) as chunks:
            assert (embed(whole, TEXTS) == embed(chunks, TEXTS)).all(), family


@_ONE_PATH
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mistral", "Bert"])
def test_steps_scheduled_ahead_change_no_embedding(family: str, tmp_path: Path) -> None:
    make_oracle(tmp_path, family)
    texts = TEXTS * 3
    options: dict[str, Any] = {"max_num_seqs": 2} if family == "Bert" else {"max_num_batched_tokens": 16}
    found = []
    for ahead in (False, True):
        with open_llm(tmp_path, async_scheduling=ahead, **options) as llm:
            found.append(embed(llm, texts))
    assert (found[0] == found[1]).all()


@_ONE_PATH
@pytest.mark.parametrize("family", [*DECODERS[:2], pytest.param(DECODERS[2], marks=pytest.mark.slow)])
def test_a_cached_prefix_changes_no_embedding(family: str, tmp_path: Path) -> None:
    make_oracle(tmp_path, family)
    prefix = random_text(70, seed=7)
    texts = [f"{prefix} {random_text(20, seed=seed)}" for seed in range(4)]
    with open_llm(tmp_path, enable_prefix_caching=False) as plain, open_llm(tmp_path) as cached:
        expected = embed(plain, texts)
        outputs = [cached.embed(text, use_tqdm=False)[0] for text in texts]
    assert (np.array([output.outputs.embedding for output in outputs]) == expected).all()
    # Only the last token's hidden state can do without those of the cached tokens.
    assert (outputs[-1].num_cached_tokens > 0) is (family == "Qwen3")


@_ONE_PATH
def test_preempted_texts_are_pooled_whole(tmp_path: Path) -> None:
    make_oracle(tmp_path, "Mistral")
    texts = [random_text(90, seed=seed) for seed in range(6)]
    with open_llm(tmp_path) as roomy:
        expected = embed(roomy, texts)
    # Room for less than two texts.
    options = {"kv_cache_memory_bytes": 12 * 16 * 2 * 2 * 2 * 8 * 4, "max_num_batched_tokens": 64}
    with LLM(tmp_path / "model", **options) as narrow:
        assert (embed(narrow, texts) == expected).all()


@pytest.mark.parametrize("family", ["Bert", pytest.param("ModernBert", marks=pytest.mark.slow)])
def test_programs_and_eager_steps_have_the_same_bits(family: str, fast_paths: str, tmp_path: Path) -> None:
    """Run with both settings of fast_paths; each is compared with the default."""
    make_oracle(tmp_path, family)
    with open_llm(tmp_path) as llm, open_llm(tmp_path, fast_paths="auto") as recorded:
        assert (embed(llm, TEXTS) == embed(recorded, TEXTS)).all()
        assert "Recorded programs: 1" in recorded.get_model_inspection()


@_ONE_PATH
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Qwen3", "DistilBert"])
@pytest.mark.parametrize(("options", "least"), [({"quantization": "int8"}, 0.995), ({"dtype": "bfloat16"}, 0.995)])
def test_narrow_weights_are_close(family: str, options: dict[str, Any], least: float, tmp_path: Path) -> None:
    expected = make_oracle(tmp_path, family).encode(TEXTS)
    with open_llm(tmp_path, **options) as llm:
        assert cosines(embed(llm, TEXTS), expected).min() >= least


@pytest.mark.processor
@_ONE_PATH
def test_a_bfloat16_checkpoint_is_computed_exactly_unless_the_processor_has_its_arithmetic(tmp_path: Path) -> None:
    make_oracle(tmp_path, "Bert")
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    _edit_config(tmp_path, dtype="bfloat16")
    with open_llm(tmp_path, dtype="float32") as llm:
        expected = embed(llm, TEXTS)
    with open_llm(tmp_path, cpu_arithmetic="float32") as llm:
        assert (embed(llm, TEXTS) == expected).all()
    with open_llm(tmp_path) as llm:
        found = embed(llm, TEXTS)
    assert cosines(found, expected).min() >= 0.9999
    assert NATIVE.prefers_bfloat16 or (found == expected).all()


@_ONE_PATH
def test_dense_layers_follow_pooling(tmp_path: Path) -> None:
    expected = make_oracle(tmp_path, "Bert", dense=24).encode(TEXTS)
    with open_llm(tmp_path) as llm:
        found = embed(llm, TEXTS)
    assert found.shape == (len(TEXTS), 24)
    assert cosines(found, expected).min() >= 0.99999


@_ONE_PATH
@pytest.mark.parametrize("file", ["sentence_bert_config.json", "sentence_distilbert_config.json"])
def test_texts_are_lowered_and_cut_as_the_files_of_older_models_say(file: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    make_oracle(tmp_path, "Bert")
    (tmp_path / "model" / "sentence_bert_config.json").unlink()
    (tmp_path / "model" / file).write_text(json.dumps({"max_seq_length": 16, "do_lower_case": True}))
    texts = [*map(str.title, TEXTS), "ÇA [SEP] SE yes"]
    expected = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts)
    with open_llm(tmp_path) as llm:
        found = embed(llm, texts, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        with pytest.raises(InvalidRequest, match="16"):
            embed(llm, [random_text(17)])
    assert cosines(found, expected).min() >= 0.99999


@_ONE_PATH
def test_embeddings_without_normalisation_have_the_oracles_length(tmp_path: Path) -> None:
    expected = make_oracle(tmp_path, "Bert", normalize=False).encode(TEXTS)
    with open_llm(tmp_path) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), expected, atol=1e-4)
        unit = embed(llm, TEXTS, pooling_params=PoolingParams(use_activation=True))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


@_ONE_PATH
def test_prompts_of_the_model_are_put_before_a_text(tmp_path: Path) -> None:
    prompts = {"query": f"{random_text(4, seed=50)} ", "passage": f"{random_text(3, seed=51)} "}
    oracle = make_oracle(tmp_path, "Bert", prompts=prompts, default_prompt_name="query")
    with open_llm(tmp_path) as llm:
        for name in (None, "query", "passage"):
            expected = oracle.encode(TEXTS, **({} if name is None else {"prompt_name": name}))
            assert cosines(embed(llm, TEXTS, prompt_name=name), expected).min() >= 0.99999
        with pytest.raises(
            InvalidParameter, match=r"prompt_name='other' is not valid. Allowed: document, passage, query"
        ):
            llm.embed(TEXTS, prompt_name="other")


@_ONE_PATH
@pytest.mark.slow
def test_scores_have_the_prompts_of_roles_and_the_similarity_of_the_checkpoint(tmp_path: Path) -> None:
    prompts = {"query": f"{random_text(4, seed=50)} ", "document": f"{random_text(3, seed=51)} "}
    oracle = make_oracle(tmp_path, "Bert", normalize=False, prompts=prompts, similarity_fn_name="euclidean")
    expected = oracle.similarity(oracle.encode_query(TEXTS[:1]), oracle.encode_document(TEXTS[1:]))[0]
    with open_llm(tmp_path) as llm:
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@_ONE_PATH
def test_matryoshka_embeddings_are_cut_and_normalised(tmp_path: Path) -> None:
    expected = make_oracle(tmp_path, "Bert").encode(TEXTS)
    _edit_config(tmp_path, matryoshka_dimensions=[8, 16])
    with open_llm(tmp_path) as llm:
        found = embed(llm, TEXTS, pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(InvalidParameter, match=r"dimensions=9 is not valid. Allowed: 8, 16"):
            llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=9))
    assert found.shape == (len(TEXTS), 8)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert cosines(found, expected[:, :8]).min() >= 0.99999


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("bert")
    oracle = make_oracle(folder, "Bert")
    with open_llm(folder, fast_paths="auto") as llm:
        yield llm, oracle


@_ONE_PATH
@pytest.mark.parametrize("num_words", [127, 400, 30_000])
def test_truncation_keeps_what_the_tokenizer_keeps(num_words: int, bert: tuple[LLM, Any]) -> None:
    llm, oracle = bert
    text = random_text(num_words, seed=9)
    (output,) = llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == oracle.tokenizer(text, truncation=True, max_length=128)["input_ids"]
    assert cosines(np.array([output.outputs.embedding]), oracle.encode([text])).min() >= 0.99999
    (left,) = llm.embed(
        text, pooling_params=PoolingParams(truncate_prompt_tokens=20, truncation_side="left"), use_tqdm=False
    )
    whole = oracle.tokenizer(text)["input_ids"]
    assert left.prompt_token_ids == [whole[0], *whole[-19:]]


@_ONE_PATH
def test_a_bad_text_among_many_is_named_and_the_engine_goes_on(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    texts = ["ba"] * 300
    expected = embed(llm, ["ba"])
    with pytest.raises(ContextTooLong, match=r"prompts\[280\]: The text has 202 tokens"):
        llm.embed([*texts[:280], random_text(200), *texts], use_tqdm=False)
    assert (embed(llm, texts) == expected).all()


@_ONE_PATH
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda llm: llm.embed(random_text(200)),
            ContextTooLong,
            r"has 202 tokens, .*truncate_prompt_tokens=-1",
        ),
        (
            lambda llm: llm.classify("ba"),
            InvalidParameter,
            r"cannot do classify: .*BertModel. Allowed: embed, token",
        ),
        (lambda llm: llm.generate("ba"), InvalidRequest, r"pools here, and generates no text. Its tasks: embed"),
        (lambda llm: llm.encode("ba", pooling_task="nonsense"), InvalidParameter, r"cannot do nonsense"),
        (lambda llm: llm.embed("ba", pooling_params=PoolingParams(dimensions=4)), InvalidParameter, r"was not trained"),
        (
            lambda llm: llm.embed("ba", pooling_params=PoolingParams(task="classify")),
            InvalidParameter,
            r"task='classify'",
        ),
        (lambda llm: llm.embed([1, 999]), InvalidRequest, r"token id 999"),
        (lambda llm: llm.embed("ba " * 100_000), ContextTooLong, r"has \d+ tokens or more, but this engine takes"),
        (lambda llm: llm.embed(""), None, ""),
    ],
)
def test_bad_input_is_refused_by_name(
    call: Callable[[LLM], Any], error: type[Exception] | None, message: str, bert: tuple[LLM, Any]
) -> None:
    if error is None:
        call(bert[0])
        return
    with pytest.raises(error, match=message):
        call(bert[0])


@_ONE_PATH
def test_texts_of_one_call_may_have_different_tasks(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    params = [PoolingParams(task="token_embed"), PoolingParams(task="embed"), PoolingParams()]
    tokens, *vectors = (output.outputs.data for output in llm.encode(["ba"] * 3, params, use_tqdm=False))
    assert tokens.dim() == 2
    assert all((vector.numpy() == embed(llm, ["ba"])[0]).all() for vector in vectors)
    with pytest.raises(InvalidParameter, match=r"prompts\[1\]: task='classify' is not one of"):
        llm.encode(["ba"] * 2, [PoolingParams(), PoolingParams(task="classify")])


@_ONE_PATH
def test_a_generative_model_refuses_to_embed_unless_it_is_started_for_it() -> None:
    with LLM("demo") as llm, pytest.raises(InvalidParameter, match="Start the engine with runner='pooling'"):
        llm.embed("ROMEO:")


@_ONE_PATH
def test_a_generative_checkpoint_can_embed() -> None:
    with LLM("demo", runner="pooling", pooler_config={"pooling_type": "MEAN"}) as llm:
        first, second = (output.outputs.embedding for output in llm.embed(["ROMEO:", "JULIET: O"], use_tqdm=False))
        assert len(first) == len(second) == llm.config.model.hidden_size
        assert abs(sum(x * x for x in first) - 1) < 1e-5


@_ONE_PATH
@pytest.mark.slow
def test_vectors_of_tokens_are_the_oracles(tmp_path: Path) -> None:
    for family in ("Bert", "ModernBert", "Mistral"):
        oracle = make_oracle(tmp_path / family, family, normalize=False)
        expected = oracle.encode(TEXTS, output_value="token_embeddings")
        options = {"max_num_batched_tokens": 16} if family == "Mistral" else {}
        with open_llm(tmp_path / family, **options) as llm:
            outputs = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
        for output, rows in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output.outputs.data.numpy(), rows.numpy(), atol=1e-4)


def _edit_config(folder: Path, **changes: Any) -> None:
    import json

    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
