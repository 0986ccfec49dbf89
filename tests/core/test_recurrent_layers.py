"""Models with recurrent layers: first, last, and without any attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.plugins import CIRCUMSTANCES, assert_equal, install_plugin, mixer
from penstock.contract import RpcCall
from support.checkpoints import VOCAB_SIZE
from support.engines import greedy, make_core, random_prompts, run
from support.padded_attention import PaddedBackend, use_graphs

PROMPTS = random_prompts((5, 37, 1, 30, 13, 22), VOCAB_SIZE, seed=3)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20}
NGRAM = CIRCUMSTANCES[-1]
PARAMS = greedy(16, logprobs=2)


@pytest.fixture(scope="module", params=mixer.ARCHITECTURES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    mixer.register()
    return mixer.write_mixer_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, NGRAM], ids=str)
@pytest.mark.each_value_quick
def test_tokens_and_bits_are_those_of_requests_alone(folder: Path, options: dict[str, Any]) -> None:
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    alone = [run(core, [prompt], PARAMS)[0] for prompt in PROMPTS]
    core.close()
    assert len({tuple(result.tokens) for result in alone}) == len(alone)
    core = make_core(folder, **OPTIONS, **options)
    # The second time from snapshots.
    for _ in range(2):
        results = run(core, PROMPTS, PARAMS)
        assert_equal(results, alone)
    assert any(result.num_cached_tokens for result in results)
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_a_program_with_recurrent_layers_is_one_segment(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    run(core, PROMPTS[:2], greedy(6))

    def segments(worker: Any) -> set[int | None]:
        programs = worker.runner.execution.programs
        return {None if found is None else found.num_segments for found in programs._recorded.values()}

    assert core.collective_rpc(RpcCall(segments)) == [{1}]
    core.close()


@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only"])
@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
def test_graphs_of_steps_use_the_states_of_each_step(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    device = use_graphs(monkeypatch)
    options = {**OPTIONS, "attention_backend": PaddedBackend.name, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    results = []
    for more in ({"cudagraph_mode": mode}, {"fast_paths": "off"}):
        core = make_core(folder, **options, **more)
        results.append([result.tokens for result in run(core, PROMPTS[:4], greedy(8))])
        core.close()
    assert device.refusals == []
    assert device.num_replays > device.num_captures > 0
    assert results[0] == results[1]


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_have_heads_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "mixer")
    results = []
    for options in ({}, {"tensor_parallel_size": 2}):
        core = make_core(folder, **OPTIONS, **options)
        results.append([result.tokens for result in run(core, PROMPTS, PARAMS)])
        core.close()
    assert results[0] == results[1]
