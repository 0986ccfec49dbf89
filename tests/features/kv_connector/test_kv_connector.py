"""KV connectors: what they load has the bits of what is computed, and their failures are those of no other request."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from features.kv_connector.memory_connector import STORES
from features.kv_connector.page_connector import PageConnector
from penstock.contract import Parts, RpcCall, part_of
from penstock.contract.feature import with_label
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.features.kv_transfer import KVTransferPart, KVTransferResult
from support.adapted_models import adapted
from support.adapted_models import run as run_adapted
from support.adapters import VARIANTS
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.kept_blocks import PROMPTS, VOCAB, answers, counter, same
from support.random_requests import run_at_random

# Whole blocks of 16 tokens without the last token.
NUM_LOADED = 64 + 96 + 32
MODULE = "features.kv_connector.memory_connector"


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    STORES.clear()
    yield
    STORES.clear()


def transfer(policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


@contextlib.contextmanager
def engine(model: Path | str, config: dict[str, Any] | None, **options: Any) -> Iterator[EngineCore]:
    core = make_core(model, kv_transfer_config=config, **options)
    try:
        yield core
    finally:
        core.close()


def drain(core: EngineCore) -> None:
    """Let transfers end."""
    for _ in range(10_000):
        if not core.scheduler.kv_cache.num_used_blocks:
            return
        core.step()
        time.sleep(0.001)
    raise AssertionError("blocks are held")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "windows": ("gemma2", {}),
    "latents": ("deepseek_v3", {}),
    "bfloat16-cache": ("llama", {"kv_cache_dtype": "bfloat16"}),
    "int8-cache": ("llama", {"kv_cache_dtype": "int8"}),
    "drafts": ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "asynchronous": ("llama", {"async_scheduling": True}),
    "without-prefix-cache": ("llama", {"enable_prefix_caching": False}),
}


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_new_engine_loads_what_an_earlier_one_saved(tmp_path: Path, case: str, beside: int) -> None:
    family, options = CASES[case]
    save_checkpoint(tiny_model(family), tmp_path / "model")
    with engine(tmp_path / "model", None, **options) as core:
        expected = answers(core)
    for num_loaded in (0, NUM_LOADED):
        with engine(tmp_path / "model", transfer(beside=beside), **options) as core:
            assert same(answers(core), expected)
            assert counter(core, "external_prefix_cache_hits") == num_loaded
            core.scheduler.kv_cache.check_integrity()
            assert not core.scheduler.kv_cache.num_used_blocks


def test_requests_of_several_adapters_load_their_own_blocks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with adapted(tmp_path, variants=VARIANTS[:2]) as model:
        # Each prompt with each adapter, and with none.
        prompts = [prompt for prompt in PROMPTS for _ in range(3)]
        numbers = [0, 1, 2] * len(PROMPTS)
        with engine(model.folder, None, **options) as core:
            expected = run_adapted(core, model, prompts, numbers)
        with engine(model.folder, transfer(), **options) as core:
            for num_loaded in (0, 3 * NUM_LOADED):
                before = counter(core, "external_prefix_cache_hits")
                assert same(run_adapted(core, model, prompts, numbers), expected)
                assert counter(core, "external_prefix_cache_hits") - before == num_loaded
                assert core.reset_prefix_cache()


@pytest.mark.parametrize("beside", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_drafts_of_a_head_after_blocks_that_were_loaded(beside: int) -> None:
    options: dict[str, Any] = {
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
        "kv_cache_memory_bytes": "16MiB",
    }
    with engine("demo", None, **options) as core:
        expected = answers(core)
    for num_loaded in (0, NUM_LOADED):
        with engine("demo", transfer(beside=beside), **options) as core:
            assert same(answers(core), expected)
            assert counter(core, "external_prefix_cache_hits") == num_loaded
            core.scheduler.kv_cache.check_integrity()


def fill(model: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Result]:
    """Let an engine save the prompts' blocks, and end."""
    with engine(model, transfer(), **options) as core:
        return answers(core, prompts)


IN_STEPS_AND_BESIDE = {"beside": 0}, {"beside": 2}


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("extra", IN_STEPS_AND_BESIDE, ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_compute_what_cannot_be_loaded(
    tmp_path: Path, extra: dict[str, Any], fails_at: int, asynchronous: bool
) -> None:
    tiny_checkpoint(tmp_path)
    # Two of one prompt: the second one finds the blocks of the first in the same step.
    prompts = [*PROMPTS, [*PROMPTS[1][:96], 5, 6]]
    expected = fill(tmp_path, prompts)
    config = transfer(fails_at=fails_at, **extra)
    with engine(tmp_path, config, async_scheduling=asynchronous, max_num_batched_tokens=256) as core:
        assert same(answers(core, prompts), expected)
        # A prompt of fewer blocks is loaded.
        assert counter(core, "kv_connector_failed_loads") >= (3 if fails_at < 2 else 2)
        core.scheduler.kv_cache.check_integrity()
        # What was right of a load, and what was computed, is in the prefix cache.
        assert same(answers(core, prompts), expected)
        assert core.scheduler.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("extra", IN_STEPS_AND_BESIDE, ids=str)
def test_requests_end_where_blocks_cannot_be_loaded_and_others_go_on(tmp_path: Path, extra: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path)
    expected = fill(tmp_path)
    with engine(tmp_path, transfer("fail", fails_at=2, **extra), max_num_batched_tokens=256) as core:
        results = answers(core)
        assert "The KV cache of 64 tokens could not be loaded" in (results[0].error or "")
        assert "The KV cache of 96 tokens could not be loaded" in (results[1].error or "")
        assert same(results[2:], expected[2:])
        core.scheduler.kv_cache.check_integrity()
        assert core.scheduler.kv_cache.num_used_blocks == 0


def test_a_request_that_is_aborted_during_its_load_gives_its_blocks_back_at_its_end(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    expected = fill(tmp_path)
    with engine(tmp_path, transfer(beside=20)) as core:
        add(core, "gone", PROMPTS[0], greedy(4))
        add(core, "stays", PROMPTS[1], greedy(12, logprobs=2))
        core.step()
        core.abort_requests(["gone"])
        assert core.scheduler.kv_cache.num_used_blocks == 4 + 6
        results: dict[str, Result] = {}
        finish(core, results)
        assert same([results["stays"]], [expected[1]])
        drain(core)
        core.scheduler.kv_cache.check_integrity()


def test_blocks_of_ended_requests_are_kept_until_they_are_sent(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with engine(tmp_path, transfer(keeps=30)) as core:
        answers(core)
        assert core.scheduler.kv_cache.num_used_blocks > 10
        assert not core.reset_prefix_cache()
        drain(core)
        core.scheduler.kv_cache.check_integrity()
        assert core.reset_prefix_cache()
        assert STORES["default"]
        assert core.reset_prefix_cache(reset_connector=True)
        assert not STORES["default"]


def test_a_connector_that_answers_later_holds_up_no_others(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    expected = fill(tmp_path)
    with engine(tmp_path, transfer(later=5)) as core:
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") == NUM_LOADED


class FailingDuringLoads(FailingWorker):
    """Fails while blocks are loaded, or kept, once."""


@pytest.mark.parametrize("extra", [{"beside": 0}, {"beside": 3}, {"keeps": 9}], ids=str)
@pytest.mark.parametrize("step", [0, 1, 2, 9])
def test_requests_begin_anew_where_a_worker_fails(tmp_path: Path, extra: dict[str, Any], step: int) -> None:
    tiny_checkpoint(tmp_path)
    expected = fill(tmp_path)
    FailingDuringLoads.fails_at = {("execute", step)}
    with engine(tmp_path, transfer(**extra), worker_cls=f"{__name__}.FailingDuringLoads") as core:
        assert same(answers(core), expected)
        assert not FailingDuringLoads.fails_at
        drain(core)
        core.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("extra", [{}, {"beside": 2, "keeps": 3}, {"fails_at": 2}, {"beside": 1, "later": 1}], ids=str)
@pytest.mark.parametrize("case", ["full", "windows"])
def test_random_schedules_in_a_small_cache(tmp_path: Path, case: str, extra: dict[str, Any]) -> None:
    """Requests that come, end and are aborted at random, with common prefixes, preemption and resets."""
    family, options = CASES[case]
    save_checkpoint(tiny_model(family), tmp_path)
    choose = random.Random(3)
    stems = random_prompts([40, 64, 50], vocab_size=VOCAB)
    tails = random_prompts([choose.randint(1, 40) for _ in range(12)], vocab_size=VOCAB, seed=7)
    prompts = [[*choose.choice(stems), *tail] for tail in tails]
    params = greedy(8)
    with engine(tmp_path, None, **options) as core:
        expected = [run(core, [prompt], params)[0].tokens for prompt in prompts]
    for _ in range(2):
        with engine(tmp_path, transfer(**extra), num_blocks=24, max_num_seqs=4, **options) as core:
            for _ in range(2):
                drain(core)
                run_at_random(core, prompts, params, expected, choose)
            drain(core)
            core.scheduler.kv_cache.check_integrity()


def test_several_connectors_save_all_and_load_from_the_first_that_has_blocks(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    one, two = transfer(store="one", keeps=2), transfer(store="two", beside=2, keeps=5)
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [one, two]},
    }
    with engine(tmp_path, several) as core:
        expected = answers(core)
        drain(core)
    assert STORES["one"].keys() == STORES["two"].keys()
    assert STORES["one"]
    STORES["one"].clear()
    for num_beside in (NUM_LOADED, 0):
        with engine(tmp_path, several) as core:
            assert same(answers(core), expected)
            assert counter(core, "external_prefix_cache_hits") == NUM_LOADED
            drain(core)
        # The second one has filled the first one again, but for the blocks that were loaded.
        assert num_beside == 0 or STORES["one"].keys() <= STORES["two"].keys()
        STORES["one"].update(STORES["two"])


@pytest.mark.parametrize("name", ["MemoryConnector", "MultiConnector"])
def test_statistics_and_events_are_in_the_metrics(tmp_path: Path, name: str) -> None:
    tiny_checkpoint(tmp_path)
    config, of_one = transfer(), ""
    if name == "MultiConnector":
        others = transfer(store="other")
        config, of_one = transfer(connectors=[config, others]), "MemoryConnector 0: "
        config = {**config, "kv_connector": name}
        del config["kv_connector_module_path"]
    stored = with_label("kv_connector_events", "kind", "BlockStored")
    num_stores = 2 if of_one else 1
    with engine(tmp_path, config) as core:
        answers(core)
        assert counter(core, stored) == num_stores * NUM_LOADED // 16
        assert core.stats().gauges == {}
    with engine(tmp_path, config) as core:
        answers(core)
        core.step()
        assert stored not in core.stats().counters
        loaded = with_label("kv_connector_stats", "name", f"{of_one}Num loaded blocks")
        assert core.stats().gauges == {loaded: NUM_LOADED // 16}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"kv_connector": "X"}, {}, "kv_transfer_config has no 'kv_role'"),
        (
            {"kv_connector": "X", "kv_role": "both"},
            {},
            "kv_role of kv_transfer_config='both' is not valid. Allowed: kv_",
        ),
        ({**transfer(), "kv_load": 1}, {}, "kv_transfer_config has 'kv_load'. Allowed: kv_connector, kv_role"),
        (transfer("later"), {}, "kv_load_failure_policy of kv_transfer_config='later'"),
        ("{", {}, "kv_transfer_config='{' is not JSON"),
        (
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            {},
            "kv_connector='NixlConnector' does not come with Penstock. Use kv_offload_dir with kv_listen and kv_peers",
        ),
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            {},
            "does not come with Penstock. Use kv_offload_dir (docs/kv_tiers.md) in place of kv_transfer_config",
        ),
        ({**transfer(), "kv_connector": "STORES"}, {}, "'STORES' of features.kv_connector.memory_connector is not a"),
        ({**transfer(), "kv_connector_module_path": "no.where"}, {}, "kv_connector_module_path='no.where' cannot be"),
        (transfer(), {"kv_offload_dir": "."}, "kv_transfer_config is not valid with kv_offload_dir"),
    ],
)
def test_options_are_checked(tmp_path: Path, config: Any, options: dict[str, Any], message: str) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_core(tmp_path, kv_transfer_config=config, **options)


def test_models_whose_blocks_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("lfm2"), tmp_path)
    with pytest.raises(ConfigError, match="a model with recurrent states or cross attention, whose blocks cannot be"):
        make_core(tmp_path, kv_transfer_config=transfer())


@pytest.mark.slow
@pytest.mark.fresh_interpreters
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_the_connector_of_the_page_serves_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, Any]
) -> None:
    page = PageConnector(tmp_path, monkeypatch)
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", None, **ranks) as core:
        expected = answers(core)
    for num_loaded in (0, NUM_LOADED):
        with engine(tmp_path / "model", page.config, **ranks) as core:
            assert same(answers(core), expected)
            assert counter(core, "external_prefix_cache_hits") == num_loaded
    # A block that one rank cannot load is computed by both.
    for path in list(page.blocks.glob("*-1.safetensors"))[::3]:
        path.write_bytes(b"damaged")
    with engine(tmp_path / "model", page.config, **ranks) as core:
        assert same(answers(core), expected)
        assert counter(core, "kv_connector_failed_loads") > 0


def test_a_request_and_its_response_have_parameters_for_the_connector(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with engine(tmp_path, transfer()) as core:
        parts = Parts.of([KVTransferPart(params={"peer": "a"})])
        add(core, "one", PROMPTS[0], greedy(4), parts=parts)
        outputs = []
        while core.has_unfinished_requests():
            outputs += core.step()
        part = part_of(outputs[-1].parts, KVTransferResult)
        assert part is not None
        assert part.params == {"finish_reason": "length", "given": {"peer": "a"}}
        assert core.collective_rpc(RpcCall("get_kv_connector_handshake_metadata")) == [None]
