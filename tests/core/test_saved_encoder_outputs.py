"""Encoder outputs in a folder: an item that an earlier engine has encoded is not encoded again, with equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.contract import Parts, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.features.kv_files.folder import blocks_in
from penstock.features.multimodal.messages import MediaPart
from penstock.media.item import NAMED
from support.engines import Result, add, finish, greedy, make_core
from support.multimodal_models import PLACEHOLDERS, MediaPrompt, expanded, picture, save_multimodal, words

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128}
# With features of several levels, and with plain ones.
NAMES = ("qwen3-vl", "smolvlm")


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(name)
    save_multimodal(folder, name)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def prompts(model: Path, name: str, first: int) -> list[MediaPrompt]:
    """Two prompts with three images, of which no block is that of prompts with another first word."""
    image = PLACEHOLDERS.get(name, "<image>")
    return expanded(
        model,
        [
            (f"{words(first, 6)} {image} {words(7, 8, 9)}", [picture(40, 24, 1)]),
            (f"{words(first)} {image} {words(11)} {image}", [picture(16, 48, 2), picture(33, 31, 3)]),
        ],
    )


@contextlib.contextmanager
def engine(model: Path, folder: Path | None, **options: Any) -> Iterator[EngineCore]:
    core = make_core(model, kv_offload_dir=folder and str(folder), **{**OPTIONS, **options})
    try:
        yield core
    finally:
        core.close()


def run(core: EngineCore, prompts: list[MediaPrompt]) -> list[Result]:
    for index, prompt in enumerate(prompts):
        add(core, f"r{index}", prompt.token_ids, greedy(8, logprobs=2), parts=prompt.parts)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


def same(one: list[Result], other: list[Result]) -> bool:
    return [(result.tokens, result.logprobs) for result in one] == [
        (result.tokens, result.logprobs) for result in other
    ]


def counts(core: EngineCore) -> tuple[int, int]:
    """Items that were encoded, and that came from the folder."""
    stats = core.collective_rpc(RpcCall("get_encoder_timing_stats"))
    return int(stats[0]["num_items"]), int(stats[0]["num_loaded_items"])


def outputs_in(folder: Path) -> list[Path]:
    (kept,) = (one for one in blocks_in(folder) if one.about.get("content") == "encoder outputs")
    return [path for path in (folder / "kv-1" / kept.digest).rglob("*-0") if path.is_file()]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_an_item_is_encoded_once(model: Path, name: str, folder: Path, dtype: str) -> None:
    first, other = prompts(model, name, 5), prompts(model, name, 20)
    with engine(model, None, dtype=dtype) as core:
        expected, of_others = run(core, first), run(core, other)
    with engine(model, folder, dtype=dtype) as core:
        assert same(run(core, first), expected)
        assert counts(core) == (3, 0)
    assert len(outputs_in(folder)) == 3
    with engine(model, folder, dtype=dtype) as core:
        assert same(run(core, other), of_others)
        assert counts(core) == (0, 3)


def test_damaged_outputs_are_encoded_again(model: Path, name: str, folder: Path) -> None:
    other = prompts(model, name, 20)
    with engine(model, None) as core:
        expected = run(core, other)
    with engine(model, folder) as core:
        run(core, prompts(model, name, 5))
    damaged, cut, _ = outputs_in(folder)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    with engine(model, folder) as core:
        assert same(run(core, other), expected)
        assert counts(core) == (2, 1)
    with engine(model, folder) as core:
        run(core, prompts(model, name, 30))
        assert counts(core) == (0, 3)


def test_a_full_disk_keeps_nothing_and_stops_nothing(
    model: Path, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = prompts(model, name, 5)
    with engine(model, None) as core:
        expected = run(core, first)
    monkeypatch.setattr("penstock.features.kv_files.files.os.writev", _no_space)
    with engine(model, folder) as core:
        assert same(run(core, first), expected)
    assert "An encoder output is not kept: [Errno 28]" in caplog.text
    assert not [path for path in folder.rglob("*-0") if path.is_file()]


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_items_with_names_of_the_caller_keep_nothing(model: Path, name: str, folder: Path) -> None:
    """Neither their features nor blocks of the KV cache: the name may be another item's in another engine."""
    first = prompts(model, name, 5)
    for prompt in first:
        named = [replace(item, key=NAMED + item.key) for item in prompt.items]
        prompt.parts = Parts.of([MediaPart(items=named)])
    with engine(model, folder) as core:
        run(core, first)
        assert counts(core) == (3, 0)
    assert not [path for path in folder.rglob("*-*") if path.is_file() and path.suffix != ".json"]
    texts = [(f"{words(5, 6)} {PLACEHOLDERS.get(name, '<image>')}", [picture(40, 24, 1)])]
    (unnamed,), (named_prompt,) = expanded(model, texts), expanded(model, texts, uuids=("cat",))
    assert named_prompt.items[0].is_named
    assert not unnamed.items[0].is_named


def test_weights_that_came_later_keep_nothing(model: Path, name: str, folder: Path) -> None:
    with engine(model, folder) as core:
        core.collective_rpc(RpcCall("reload_weights"))
        run(core, prompts(model, name, 20))
        assert counts(core) == (3, 0)
    assert not [one for one in blocks_in(folder) if one.about.get("content") == "encoder outputs"]


def test_engines_that_read_media_in_another_way_share_nothing(model: Path, name: str, folder: Path) -> None:
    """Equal files have equal keys, whatever an engine makes of them."""
    given = prompts(model, name, 5)
    with engine(model, folder) as core:
        run(core, given)
    with engine(model, folder, media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}) as core:
        run(core, given)
        assert counts(core) == (3, 0)
        assert core.stats().counters["external_prefix_cache_hits"] == 0


@pytest.mark.slow
def test_ranks_share_outputs(model: Path, name: str, folder: Path) -> None:
    first, other = prompts(model, name, 5), prompts(model, name, 20)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2}
    with engine(model, None, **options) as core:
        expected = run(core, other)
    with engine(model, folder, **options) as core:
        run(core, first)
        assert counts(core) == (3, 0)
    with engine(model, folder, **options) as core:
        assert same(run(core, other), expected)
        assert counts(core) == (0, 3)
    # An arrangement of other ranks has the same encoder.
    with engine(model, folder) as core:
        run(core, prompts(model, name, 30))
        assert counts(core) == (0, 3)
