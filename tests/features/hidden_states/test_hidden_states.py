"""Hidden states equal Transformers' in float32, and have the same bits however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.contract import Parts, RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.features.hidden_states.messages import HiddenStates, HiddenStatesPart, OutputHiddenStates
from penstock.kernels.native import NATIVE
from penstock.worker.changes_model import keeps_model
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.draft_heads import eagle3_weights, write_head
from support.engines import Result, add, finish, greedy, make_core, random_prompts
from support.padded_attention import PaddedBackend, use_graphs

PROMPTS = random_prompts((1, 3, 40, 17, 16, 33, 8, 55), VOCAB_SIZE, seed=5)
NUM_TOKENS = 12
ALL = HiddenStatesPart(tokens="all", layers=(0, 1, -1))
# Requests for other tokens and layers, and for none, share the steps.
ASKED = [
    ALL,
    HiddenStatesPart(tokens="last", layers=(1, 2)),
    HiddenStatesPart(tokens="all"),
    None,
    ALL,
    HiddenStatesPart(tokens="last"),
    HiddenStatesPart(tokens="all", layers=(1,)),
    ALL,
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
ALONE = {**OPTIONS, "fast_paths": "off", "enable_prefix_caching": False, "async_scheduling": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"sliding_window": 9},
    "gemma3": {"sliding_window": 8},
    "gpt2": {},
    "granite": {},
    "qwen3": {"head_dim": 32},
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
}
QUICK = ("llama", "gemma3", "gpt2", "deepseek_v3")


class StatesResult(Result):
    """Result of a request with its hidden states."""

    part: OutputHiddenStates | None = None

    def take(self, output: Any) -> None:
        super().take(output)
        if output.parts is not None:
            (part,) = output.parts.values()
            self.part = part.after(self.part)

    def states(self, prompt: Sequence[int]) -> HiddenStates:
        assert self.error is None, self.error
        assert self.part is not None
        return self.part.result(len(prompt) + len(self.tokens))


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    asked: Sequence[HiddenStatesPart | None] = tuple(ASKED),
    params: SamplingParams | None = None,
) -> list[StatesResult]:
    results = {f"r{index}": StatesResult() for index in range(len(prompts))}
    for index, (prompt, part) in enumerate(zip(prompts, asked, strict=True)):
        parts = None if part is None else Parts.of([part])
        add(core, f"r{index}", prompt, params or greedy(NUM_TOKENS), parts=parts)
    finish(core, results)  # type: ignore[arg-type]
    return list(results.values())


class ProgramsWorker(Worker):
    @keeps_model
    def programs(self) -> list[int | None]:
        """Segments of each program; None for a forward pass that was refused."""
        found = self.runner.execution.programs._recorded.values()
        return [None if program is None else program.num_segments for program in found]


def oracle_states(oracle: Any, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        found = oracle(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    return tuple(states[0] for states in found.hidden_states)


def assert_equals_oracle(oracle: Any, prompt: Sequence[int], part: HiddenStatesPart, result: StatesResult) -> None:
    computed = [*prompt, *result.tokens[:-1]]
    expected, found = oracle_states(oracle, computed), result.states(prompt)
    first = 0 if part.has_all else len(computed) - 1
    assert found.start == first
    assert list(found) == list(part.layers)
    for layer in part.layers:
        assert found[layer].shape == (len(computed) - first, expected[0].shape[1])
        torch.testing.assert_close(found[layer], expected[layer][first:], rtol=2e-4, atol=2e-4)


def assert_same_bits(results: Sequence[StatesResult], expected: Sequence[StatesResult]) -> None:
    for prompt, part, result, other in zip(PROMPTS, ASKED, results, expected, strict=True):
        assert result.tokens == other.tokens
        if part is None:
            assert result.part is None
        else:
            assert result.states(prompt) == other.states(prompt)


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK)]
)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = tiny_model(family, **FAMILIES[family])
    save_checkpoint(oracle, tmp_path)
    core = make_core(tmp_path, **OPTIONS)
    num_layers = oracle.config.num_hidden_layers
    whole = HiddenStatesPart(tokens="all", layers=tuple(range(num_layers + 1)))
    asked = [part and (whole if part is ALL else part) for part in ASKED]
    for prompt, part, result in zip(PROMPTS, asked, run(core, asked=asked), strict=True):
        if part is not None:
            assert_equals_oracle(oracle, prompt, part, result)
    core.close()


def test_transformers_own_classes_give_their_layers(tmp_path: Path) -> None:
    oracle = tiny_model("llama")
    save_checkpoint(oracle, tmp_path)
    core = make_core(tmp_path, **OPTIONS, model_impl="transformers")
    for prompt, part, result in zip(PROMPTS, ASKED, run(core), strict=True):
        if part is not None:
            assert_equals_oracle(oracle, prompt, part, result)
    core.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[StatesResult]:
    """Each request by itself, layer by layer."""
    core = make_core(folder, **ALONE)
    try:
        return [run(core, [prompt], [part])[0] for prompt, part in zip(PROMPTS, ASKED, strict=True)]
    finally:
        core.close()


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "together": {},
    "asynchronous": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 7},
    "asynchronous chunks": {"async_scheduling": True, "max_num_batched_tokens": 13},
    "layer by layer": {"fast_paths": "off"},
    "drafts": {"speculative_config": NGRAM},
    "asynchronous drafts": {"speculative_config": NGRAM, "async_scheduling": True},
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_bits_are_those_of_requests_alone(folder: Path, alone: list[StatesResult], name: str) -> None:
    core = make_core(folder, **OPTIONS, **CIRCUMSTANCES[name])
    assert_same_bits(run(core), alone)
    # Cached prefixes change nothing.
    assert_same_bits(run(core), alone)
    core.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_bits_survive_preemption(folder: Path, alone: list[StatesResult], is_async: bool) -> None:
    core = make_core(folder, **OPTIONS, num_blocks=36, max_model_len=80, async_scheduling=is_async)
    results = run(core)
    assert any(result.num_preemptions for result in results)
    assert_same_bits(results, alone)
    core.close()


def test_heads_that_read_layers_share_them(folder: Path, alone: list[StatesResult]) -> None:
    drafter = {"method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": 3}
    core = make_core(folder, **OPTIONS, speculative_config=drafter)
    assert_same_bits(run(core), alone)
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"enable_sp": True}], ids=str)
def test_ranks_of_tensor_parallelism_give_whole_states(folder: Path, options: dict[str, Any]) -> None:
    oracle_folder_core = make_core(folder, **ALONE)
    expected = run(oracle_folder_core)
    oracle_folder_core.close()
    core = make_core(folder, **OPTIONS, tensor_parallel_size=2, num_threads=2, **options)
    for prompt, part, result, other in zip(PROMPTS, ASKED, run(core), expected, strict=True):
        if part is not None:
            torch.testing.assert_close(result.states(prompt).tensor, other.states(prompt).tensor, rtol=2e-4, atol=2e-4)
    core.close()


@pytest.mark.slow
def test_the_last_pipeline_stage_gives_final_states_and_others_are_refused(
    folder: Path, alone: list[StatesResult]
) -> None:
    core = make_core(folder, **OPTIONS, pipeline_parallel_size=2, num_threads=2)
    with pytest.raises(UnsupportedParameter, match=r"hidden_states_layers=\[1\] with pipeline_parallel_size=2"):
        run(core, PROMPTS[:1], [HiddenStatesPart(layers=(1,))])
    asked = [part if part in (ASKED[2], ASKED[5]) else None for part in ASKED]
    for prompt, part, result, other in zip(PROMPTS, asked, run(core, asked=asked), alone, strict=True):
        if part is not None:
            assert result.states(prompt) == other.states(prompt)
    core.close()


def test_a_cached_prefix_is_read_for_the_last_token_only(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    prompt = PROMPTS[7]
    run(core, [prompt], [None])
    last, whole, plain = run(core, [prompt] * 3, [HiddenStatesPart(), HiddenStatesPart(tokens="all"), None])
    assert last.num_cached_tokens == plain.num_cached_tokens > 0
    assert whole.num_cached_tokens == 0
    assert torch.equal(last.states(prompt)[-1][0], whole.states(prompt)[-1][-1])
    core.close()


def test_an_output_that_is_cut_has_the_states_of_its_tokens(folder: Path, alone: list[StatesResult]) -> None:
    prompt, whole = PROMPTS[0], alone[0]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, stop_token_ids=[whole.tokens[5]])
    core = make_core(folder, **OPTIONS, speculative_config=NGRAM)
    (result,) = run(core, [prompt], [ALL], params)
    num_tokens = len(result.tokens)
    assert num_tokens < NUM_TOKENS
    assert result.states(prompt).num_tokens == len(prompt) + num_tokens - 1
    assert torch.equal(result.states(prompt).tensor, whole.states(prompt).tensor[: len(prompt) + num_tokens - 1])
    core.close()


def test_states_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="bfloat16")
    (result,) = run(core, PROMPTS[:1], [ALL])
    states = result.states(PROMPTS[0])
    assert states[-1].dtype is getattr(torch, states.dtype)
    assert states.numbers().tolist() == states.tensor.float().tolist()
    core.close()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (HiddenStatesPart(layers=(3,)), r"hidden_states_layers has 3, but the model has 2 layers. Allowed: 0 \(emb"),
        (HiddenStatesPart(layers=(-4,)), "hidden_states_layers has -4"),
        (HiddenStatesPart(layers=()), r"hidden_states_layers=\[\] is not valid"),
        (HiddenStatesPart(layers=(1, 1)), r"hidden_states_layers=\[1, 1\] is not valid"),
        (HiddenStatesPart(layers=(2, -1)), r"hidden_states_layers=\[2, -1\] is not valid"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(folder: Path, part: HiddenStatesPart, message: str) -> None:
    core = make_core(folder, **OPTIONS)
    with pytest.raises(InvalidParameter, match=message):
        run(core, PROMPTS[:1], [part])
    core.close()


def test_a_request_for_too_much_is_refused_before_it_runs(folder: Path) -> None:
    size = (len(PROMPTS[2]) + NUM_TOKENS - 1) * 3 * 64 * 4
    limits = {"hidden_states": {"max_output_bytes": size - 1}}
    core = make_core(folder, **OPTIONS, additional_config=limits)
    message = r"'all' gives 51 tokens, 3 layers and hidden size 64, .* Allowed: .*\(max_output_bytes\)"
    with pytest.raises(InvalidParameter, match=message):
        run(core, PROMPTS[2:3], [ALL])
    assert run(core, PROMPTS[2:3], [HiddenStatesPart(tokens="all", layers=(0, 1))])[0].part is not None
    core.close()
    # Of two layers, noted and copied.
    limits = {"hidden_states": {"max_step_bytes": 4 * 64 * 64 * 4 - 1}}
    core = make_core(folder, **OPTIONS, additional_config=limits)
    with pytest.raises(InvalidParameter, match=r"a step has up to 64 tokens, 2 layers .*\(max_step_bytes\)"):
        run(core, PROMPTS[:1], [HiddenStatesPart(layers=(0, 1))])
    assert run(core, PROMPTS[:1], [HiddenStatesPart(layers=(0, -1))])[0].part is not None
    core.close()


def test_requests_wait_while_others_have_the_memory(folder: Path, alone: list[StatesResult]) -> None:
    # The states of a step in layers 0, 1 and the last, and the outputs of two long requests or so.
    limits = {"hidden_states": {"max_bytes": 90_000, "max_step_bytes": 5 * 64 * 64 * 4}}
    core = make_core(folder, **OPTIONS, additional_config=limits)
    most = 0
    results = {f"r{index}": StatesResult() for index in range(len(PROMPTS))}
    for index, (prompt, part) in enumerate(zip(PROMPTS, ASKED, strict=True)):
        add(core, f"r{index}", prompt, greedy(NUM_TOKENS), parts=None if part is None else Parts.of([part]))
    while core.has_unfinished_requests():
        for output in core.step():
            results[output.req_id].take(output)
        most = max(most, core.scheduler.num_running)
    assert 1 < most < len(PROMPTS)
    assert_same_bits(list(results.values()), alone)
    core.close()


def test_steps_with_hidden_states_stay_recorded_programs(folder: Path, alone: list[StatesResult]) -> None:
    core = make_core(folder, **OPTIONS, worker_cls=f"{__name__}.ProgramsWorker")
    assert_same_bits(run(core), alone)
    if NATIVE is not None:
        (programs,) = core.collective_rpc(RpcCall("programs"))
        assert None not in programs
    core.close()


@pytest.mark.parametrize("has_layers", [False, True])
def test_graphs_have_the_bits_of_steps_layer_by_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_layers: bool
) -> None:
    device = use_graphs(monkeypatch)
    asked = ASKED if has_layers else [part and HiddenStatesPart(tokens=part.tokens) for part in ASKED]
    results = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **OPTIONS, attention_backend=PaddedBackend.name, fast_paths=fast_paths)
        results.append(run(core, asked=asked))
        core.close()
    assert_same_bits(*results)
    assert device.refusals == []
    # The states of layers would take memory in each graph that no plan has.
    assert device.num_replays > 5 or has_layers
    assert not (has_layers and device.num_replays)


def test_programs_are_recorded_for_the_first_sets_of_layers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, num_hidden_layers=5)
    core = make_core(tmp_path, **OPTIONS, worker_cls=f"{__name__}.ProgramsWorker")
    sets = [tuple(layer for layer in range(5) if number >> layer & 1) for number in range(1, 32)]
    for layers in sets:
        (result,) = run(core, [[5, 6, 7]], [HiddenStatesPart(tokens="all", layers=layers)], greedy(2))
        assert list(result.states([5, 6, 7])) == list(layers)
    (programs,) = core.collective_rpc(RpcCall("programs"))
    assert len(programs) <= 2 * 16
    core.close()
