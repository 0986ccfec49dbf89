"""New weights in the memory of a live model: bit for bit those of a model that was loaded with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import CheckpointError, ModelError
from penstock.kernels.native.quantized import NativeQuantizedProducts
from penstock.layers.quantization.method import PRODUCTS
from penstock.layers.tensors_of import tensors_of
from penstock.loader.live_memory import LiveMemory
from penstock.loader.loader import load_model
from penstock.loader.weight_update import WeightUpdate
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.encoder_decoders import write_encoder_decoder
from support.float8_checkpoints import FORMATS as FLOAT8
from support.float8_checkpoints import write_float8
from support.multimodal_models import save_multimodal
from support.mxfp4_checkpoints import write_mxfp4
from support.quantized_checkpoints import write_quantized
from support.ranks import contexts
from support.weight_formats import LOAD, QUANTIZED, family_cases

CPU = torch.device("cpu")
Load = Callable[..., CausalLM]


def loader(config: ModelConfig, parallel: ParallelState | None = None, **dtypes: Any) -> Load:
    return partial(
        load_model,
        config,
        LOAD,
        parallel or ParallelState(),
        CPU,
        dtypes.get("dtype", torch.float32),
        dtypes.get("weights_dtype"),
    )


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def buckets(tensors: dict[str, Tensor], seed: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in random order, in buckets of random sizes."""
    chosen = random.Random(seed)
    items = list(tensors.items())
    chosen.shuffle(items)
    while items:
        size = chosen.randint(1, 5)
        yield items[:size]
        del items[:size]


def update(live: CausalLM, load: Load, given: Sequence[list[tuple[str, Tensor]]]) -> LiveMemory:
    memory = LiveMemory(live)
    run = WeightUpdate(lambda source: load(source=source, memory=memory), live)
    for bucket in given:
        copied = [(name, tensor.clone()) for name, tensor in bucket]
        run.take(copied)
        for _, tensor in copied:  # which a caller may change
            tensor.zero_()
    run.finish()
    return memory


def contents(model: CausalLM) -> dict[str, Tensor]:
    return {one.path: one.tensor.clone() for one in tensors_of(model)}


def assert_equal(model: CausalLM, expected: CausalLM) -> None:
    ours, theirs = contents(model), contents(expected)
    assert list(ours) == list(theirs)
    for path, tensor in ours.items():
        assert torch.equal(tensor, theirs[path]), path


def check(old: Path, new: Path, **dtypes: Any) -> None:
    options = dtypes.pop("options", {})
    configs = [ModelConfig.load(str(folder), **options) for folder in (old, new)]
    live, fresh = (loader(config, **dtypes)() for config in configs)
    places = {one.path: one.tensor.data_ptr() for one in tensors_of(live)}
    assert any(not torch.equal(one, contents(fresh)[path]) for path, one in contents(live).items())
    for seed in range(2):
        memory = update(live, loader(configs[0], **dtypes), list(buckets(stored(new), seed)))
        assert_equal(live, fresh)
        assert not memory.moved
        assert places == {one.path: one.tensor.data_ptr() for one in tensors_of(live)}


@pytest.mark.parametrize(("family", "quantization"), family_cases(one_in=2))
def test_families(family: str, quantization: str | None, tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        tiny_checkpoint(tmp_path / name, family, seed=seed)
    check(tmp_path / "old", tmp_path / "new", options={"quantization": quantization})


def test_square_weights_that_are_stored_transposed(tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        tiny_checkpoint(tmp_path / name, "gpt2", seed=seed)
    check(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    quantize, written = QUANTIZED[name]
    old = write_quantized(tmp_path / "old", quantize, written).config
    new = write_quantized(tmp_path / "new", lambda layer, weight: quantize(layer, 2 * weight), written).config
    check(old.folder, new.folder)


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_checkpoints(name: str, tmp_path: Path) -> None:
    old, new = (write_float8(tmp_path / str(seed), name, seed=seed)[0] for seed in (1, 2))
    check(old.folder, new.folder)


def test_mxfp4(tmp_path: Path) -> None:
    old, new = (write_mxfp4(tmp_path / str(seed), seed=seed)[0] for seed in (1, 2))
    check(old.folder, new.folder)


@pytest.mark.parametrize("write", [partial(save_multimodal, name="qwen2-vl"), write_encoder_decoder])
def test_encoders(write: Callable[..., object], tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        write(tmp_path / name, seed=seed)
    check(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_weights_of_a_trainer_in_float32(tied: bool, tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        tiny_checkpoint(tmp_path / name, "qwen2", seed=seed, tie_word_embeddings=tied)
    check(tmp_path / "old", tmp_path / "new", weights_dtype=torch.bfloat16)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_rank_takes_its_share(quantization: str | None, tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        tiny_checkpoint(tmp_path / name, "mixtral", seed=seed, vocab_size=96, intermediate_size=64)
    old, new = (ModelConfig.load(str(tmp_path / name), quantization=quantization) for name in ("old", "new"))
    for parallel in contexts(2):
        live, fresh = loader(old, parallel)(), loader(new, parallel)()
        update(live, loader(old, parallel), list(buckets(stored(new.folder), 3)))
        assert_equal(live, fresh)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [16, 10])  # key heads are whole panels of every instruction set, or of none
def test_each_tensor_may_have_a_dtype_of_its_own(quantization: str, head_dim: int, tmp_path: Path) -> None:
    config = wide_checkpoint(tmp_path, quantization, head_dim)
    live, fresh = loader(config)(), loader(config)()
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    mixed = {name: tensor.to(dtypes[index % 3]) for index, (name, tensor) in enumerate(stored(tmp_path).items())}
    update(live, loader(config), list(buckets(mixed, 1)))
    update(fresh, loader(config), [[(name, tensor.float()) for name, tensor in mixed.items()]])
    assert_equal(live, fresh)


@pytest.mark.skipif(not isinstance(PRODUCTS, NativeQuantizedProducts), reason="torch takes them")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_piece_that_is_not_finite_is_named_and_replaced_by_the_next_update(quantization: str, tmp_path: Path) -> None:
    config = wide_checkpoint(tmp_path, quantization, 16)
    live, tensors = loader(config)(), stored(tmp_path)
    before = contents(live)
    name = "model.layers.0.self_attn.k_proj.weight"
    broken = tensors[name].clone()
    broken[3, 7] = torch.nan
    with pytest.raises(CheckpointError, match=rf"{name} has values that are not finite.*with atomic=True"):
        update(live, loader(config), [list((tensors | {name: broken}).items())])
    update(live, loader(config), [list(tensors.items())])
    assert all(torch.equal(tensor, before[path]) for path, tensor in contents(live).items())


def wide_checkpoint(folder: Path, quantization: str, head_dim: int) -> ModelConfig:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": head_dim}
    tiny_checkpoint(folder, "llama", seed=1, **sizes)
    return ModelConfig.load(str(folder), quantization=quantization, quantization_calibration="none")


@pytest.fixture
def live(tmp_path: Path) -> tuple[CausalLM, Load, dict[str, Tensor]]:
    config = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    return loader(config)(), loader(config), stored(tmp_path)


Live = tuple[CausalLM, Load, dict[str, Tensor]]


def test_a_tied_weight_may_come_twice(live: Live) -> None:
    model, load, tensors = live
    before = contents(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for order in (list(tensors), list(reversed(tensors))):
        update(model, load, [[(name, tensors[name])] for name in order])
        assert all(torch.equal(tensor, before[path]) for path, tensor in contents(model).items())
    del tensors["model.embed_tokens.weight"]
    update(model, load, [list(tensors.items())])
    tensors["model.embed_tokens.weight"] = -tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"is tied to model\.embed_tokens\.weight in this engine"):
        update(model, load, [list(tensors.items())])


def test_missing_tensors_are_named_until_they_come(live: Live) -> None:
    model, load, tensors = live
    run = WeightUpdate(lambda source: load(source=source, memory=LiveMemory(model)), model)
    items = list(tensors.items())
    run.take(items[:-1])
    assert run.missing == [items[-1][0]]
    assert not run.is_complete
    assert run.taken == [name for name, _ in items[:-1]]
    run.take(items[-1:])
    assert run.is_complete
    run.finish()


def test_what_does_not_fit_ends_the_update_by_name(live: Live) -> None:
    model, load, tensors = live
    (name, tensor), *others = tensors.items()
    for wrong, message in (
        ([(name, tensor[:1])], f"1 misshapen: {name}"),
        ([("model.other.weight", tensor)], r"1 unexpected: model\.other\.weight"),
        (
            [*tensors.items(), others[0]],
            f"loaded. Weights 1 duplicate: {others[0][0]}. Each tensor may come once",
        ),
    ):
        run = WeightUpdate(lambda source: load(source=source, memory=LiveMemory(model)), model)
        run.take(wrong)
        with pytest.raises(CheckpointError, match=message):
            run.finish()
    run = WeightUpdate(lambda source: load(source=source, memory=LiveMemory(model)), model)
    run.take(others[:2])
    with pytest.raises(CheckpointError, match=f"The weights of this update cannot be loaded.*missing.*{name}"):
        run.finish()
    with pytest.raises(CheckpointError, match="missing"):
        run.take(others[2:])


def test_an_error_of_a_bucket_ends_the_update(live: Live) -> None:
    model, load, tensors = live

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(tensors.items()))
        raise TimeoutError("the trainer is gone")

    run = WeightUpdate(lambda source: load(source=source, memory=LiveMemory(model)), model)
    with pytest.raises(TimeoutError, match="gone"):
        run.take(failing())
    with pytest.raises(TimeoutError, match="gone"):
        run.finish()


def test_an_abandoned_update_ends_its_thread(live: Live) -> None:
    model, load, tensors = live
    run = WeightUpdate(lambda source: load(source=source, memory=LiveMemory(model)), model)
    run.take(list(tensors.items())[:1])
    run.abandon()
    assert not run._thread.is_alive()
    run.abandon()


def test_a_model_of_another_shape_is_refused_before_a_value_changes(live: Live, tmp_path: Path) -> None:
    model, _, _ = live
    before = contents(model)
    other = save_checkpoint(tiny_model("qwen2", intermediate_size=80, tie_word_embeddings=True), tmp_path / "other")
    with pytest.raises(ModelError, match=r"down_proj\.weight \(was \[64, 112\], would be \[64, 80\]\)"):
        loader(other)(memory=LiveMemory(model))
    assert all(torch.equal(tensor, before[path]) for path, tensor in contents(model).items())


def test_a_folder_is_read_into_the_same_memory(live: Live, tmp_path: Path) -> None:
    model, _, _ = live
    new = tiny_checkpoint(tmp_path / "new", "qwen2", seed=5, tie_word_embeddings=True)
    loader(new)(memory=LiveMemory(model))
    assert_equal(model, loader(new)())
