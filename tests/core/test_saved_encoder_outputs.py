"""Encoder outputs in a folder: an item that an earlier engine has encoded is not encoded again, with equal bits."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.contract import Parts, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.features.kv_files.folder import blocks_in
from penstock.features.multimodal.messages import MediaItem, MediaPart
from penstock.features.multimodal.worker import MediaFeatures
from penstock.media.item import NAMED
from penstock.scheduler.outputs import RUNNING, CoreState
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


def transfer(folder: Path, role: str) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"ec_connector": "folder", "ec_role": role, "ec_connector_extra_config": extra}


def encode(core: EngineCore, prompts: list[MediaPrompt]) -> dict[str, Result]:
    """Requests for one token, as a proxy sends them to the engine that encodes."""
    for index, prompt in enumerate(prompts):
        add(core, f"e{index}", prompt.token_ids, greedy(1), parts=prompt.parts)
    results: dict[str, Result] = {}
    finish(core, results)
    return results


def test_a_consumer_takes_what_a_producer_has_encoded(model: Path, name: str, folder: Path) -> None:
    given = prompts(model, name, 5)
    with engine(model, None) as core:
        expected = run(core, given)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as producer:
        for answer in encode(producer, given).values():
            # The language model has not run.
            assert (answer.tokens, answer.finish_reason, answer.error) == ([], "length", None)
        assert producer.stats().num_computed_tokens == 0
        assert counts(producer) == (3, 0)
        # The files are there with the answers, while the producer runs.
        with engine(model, None, ec_transfer_config=transfer(folder, "ec_consumer")) as consumer:
            assert same(run(consumer, given), expected)
            assert counts(consumer) == (0, 3)
        # What is there is not encoded again.
        encode(producer, given)
        assert counts(producer) == (3, 3)


def test_a_consumer_without_files_encodes_and_keeps_nothing(model: Path, name: str, folder: Path) -> None:
    given = prompts(model, name, 5)
    with engine(model, None) as core:
        expected = run(core, given)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_consumer")) as core:
        assert same(run(core, given), expected)
        assert counts(core) == (3, 0)
    assert not list(folder.iterdir())


def test_a_consumer_encodes_what_is_damaged(model: Path, name: str, folder: Path) -> None:
    given = prompts(model, name, 5)
    with engine(model, None) as core:
        expected = run(core, given)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        encode(core, given)
    damaged, *_ = outputs_in(folder)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_consumer")) as core:
        assert same(run(core, given), expected)
        assert counts(core) == (1, 2)
    assert len(outputs_in(folder)) == 2


def test_an_engine_of_both_roles_takes_and_keeps(model: Path, name: str, folder: Path, tmp_path: Path) -> None:
    """Beside blocks of the KV cache in another folder."""
    (tmp_path / "blocks").mkdir()
    first, other = prompts(model, name, 5), prompts(model, name, 20)
    with engine(model, None) as core:
        expected = run(core, other)
    with engine(model, tmp_path / "blocks", ec_transfer_config=transfer(folder, "ec_both")) as core:
        run(core, first)
        assert [len(answer.tokens) for answer in encode(core, first).values()] == [1, 1]
        assert counts(core) == (3, 0)
    assert len(outputs_in(folder)) == 3
    assert [one.about.get("content") for one in blocks_in(tmp_path / "blocks")] == [None]
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_both")) as core:
        assert same(run(core, other), expected)
        assert counts(core) == (0, 3)


def test_a_producer_runs_other_requests(model: Path, name: str, folder: Path) -> None:
    given, texts = prompts(model, name, 5), expanded(model, [(words(5, 6, 7), [])])
    named = prompts(model, name, 5)
    for prompt in named:
        prompt.parts = Parts.of([MediaPart(items=[replace(item, key=NAMED + item.key) for item in prompt.items])])
    with engine(model, None) as core:
        expected, of_texts = run(core, given), encode(core, texts)
        scored = greedy(1, prompt_logprobs=1)
        add(core, "scored", given[0].token_ids, scored, parts=given[0].parts)
        finish(core, of_texts)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        assert same(run(core, given), expected)
        found = encode(core, texts)
        add(core, "scored", given[0].token_ids, scored, parts=given[0].parts)
        finish(core, found)
        assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in of_texts.items()}
        assert [len(answer.tokens) for answer in encode(core, named).values()] == [1, 1]
    assert len(outputs_in(folder)) == 3


def test_requests_of_a_producer_may_end_before_their_turn(model: Path, name: str, folder: Path) -> None:
    first, second = prompts(model, name, 5)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        for index, prompt in enumerate((first, second)):
            add(core, f"e{index}", prompt.token_ids, greedy(1), parts=prompt.parts)
        core.abort_requests(["e0"])
        results: dict[str, Result] = {}
        finish(core, results)
        assert results["e1"].finish_reason == "length"
        assert counts(core) == (2, 0)


def test_an_item_that_cannot_be_encoded_ends_its_request_alone(
    model: Path, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompts(model, name, 5)
    encoded = MediaFeatures._encoded

    def fails(self: MediaFeatures, item: MediaItem, given: Any) -> Any:
        if item.key == first.items[0].key:
            raise ValueError("a hole in the picture")
        return encoded(self, item, given)

    monkeypatch.setattr(MediaFeatures, "_encoded", fails)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        results = encode(core, [first, second])
    assert results["e0"].error == "ValueError: a hole in the picture"
    assert results["e1"].finish_reason == "length"
    assert len(outputs_in(folder)) == 2


def test_a_producer_that_rests_encodes_afterwards(model: Path, name: str, folder: Path) -> None:
    given = prompts(model, name, 5)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        core.scheduler.let_rest(folder, CoreState("asleep", is_ready=False))
        for index, prompt in enumerate(given):
            add(core, f"e{index}", prompt.token_ids, greedy(1), parts=prompt.parts)
        assert [core.step() for _ in range(4)] == [[]] * 4
        assert counts(core) == (0, 0)
        core.scheduler.let_rest(folder, RUNNING)
        results: dict[str, Result] = {}
        finish(core, results)
        assert {one.finish_reason for one in results.values()} == {"length"}
        assert counts(core) == (3, 0)


def test_a_request_for_which_workers_fail_runs_as_others_do(
    model: Path, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(model, name, 5)
    encoded, failures = MediaFeatures._encoded, [torch.OutOfMemoryError("no memory")]

    def fails_once(self: MediaFeatures, item: MediaItem, of_item: Any) -> Any:
        if failures:
            raise failures.pop()
        return encoded(self, item, of_item)

    monkeypatch.setattr(MediaFeatures, "_encoded", fails_once)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
        results = encode(core, given)
    assert [(len(results[key].tokens), results[key].error) for key in ("e0", "e1")] == [(1, None), (0, None)]
    assert len(outputs_in(folder)) == 3


@pytest.mark.slow
def test_a_producer_that_is_killed_while_it_writes_leaves_whole_files(model: Path, name: str, folder: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from core.test_saved_encoder_outputs import encode, engine, prompts, transfer
model, folder = Path({str(model)!r}), Path({str(folder)!r})
with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer")) as core:
    first, second = prompts(model, {name!r}, 5)
    encode(core, [first])
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    encode(core, [second])
"""
    tests = str(Path(__file__).parents[1])
    killed = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{script}"], check=False)
    assert killed.returncode == -signal.SIGKILL
    given = prompts(model, name, 5)
    with engine(model, None) as core:
        expected = run(core, given)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_consumer")) as core:
        assert same(run(core, given), expected)
        assert counts(core) == (2, 1)


@pytest.mark.slow
def test_ranks_encode_for_others(model: Path, name: str, folder: Path) -> None:
    given = prompts(model, name, 5)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2}
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_producer"), **options) as core:
        encode(core, given)
    with engine(model, None) as core:
        expected = run(core, given)
    with engine(model, None, ec_transfer_config=transfer(folder, "ec_consumer")) as core:
        assert same(run(core, given), expected)
        assert counts(core) == (0, 3)


def test_transfers_need_an_encoder(model: Path, folder: Path) -> None:
    for folder_of_model, options in (("demo", {}), (str(model), {"language_model_only": True})):
        with pytest.raises(ConfigError, match="ec_transfer_config is not valid for an engine of texts alone"):
            EngineConfig.create(folder_of_model, ec_transfer_config=transfer(folder, "ec_both"), **options)
