"""Drafts of heads in an engine equal their papers' definition on the whole sequence, whatever the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import AuxHiddenStates
from penstock.config import LoadConfig, ModelConfig
from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import BoundChoices
from penstock.kernels.sampling import draw_tokens_reference
from penstock.loader.loader import load_model
from penstock.models.decoder import DecoderForCausalLM
from penstock.parallel import ParallelState
from penstock.runner.speculative import draft_model, drafting_head
from penstock.scheduler.draft_budget import DraftBudget
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.draft_heads import (
    eagle3_fused,
    eagle3_hidden,
    eagle3_logits,
    eagle3_weights,
    eagle_hidden,
    eagle_weights,
    logits_of,
    mtp_hidden,
    mtp_weights,
    write_head,
    write_mimo,
)
from support.engines import Result, add, greedy, make_core, random_prompts, run_layer_by_layer
from support.plain_attention import plain_context

NUM_DRAFTS = 3
BLOCK_SIZE = 4
METHODS = ["eagle", "eagle3", "mtp"]
Next = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Oracle:
    """A head over a whole text, in plain torch. layers: of the target, before which it reads hidden states."""

    target: DecoderForCausalLM
    layers: tuple[int, ...]
    start: Callable[[Tensor, Sequence[Tensor]], Tensor]
    next_hidden: Next
    logits: Callable[[Tensor], Tensor]

    def drafts(self, tokens: Sequence[int], params: SamplingParams, num_drafts: int = NUM_DRAFTS) -> list[int]:
        ids, length = torch.tensor(tokens), len(tokens)
        with torch.inference_mode():
            aux = AuxHiddenStates(self.layers)
            context = replace(plain_context(self.target, [length]), aux=aux)
            hidden_SD = self.target(ids.int(), torch.arange(length), context)
            states_SD = self.start(hidden_SD, list(aux.states.values()))[:-1]
            embed_SD = self.target.model.embed_tokens.weight[ids[1:]]
            drafts: list[int] = []
            for number in range(num_drafts):
                next_SD = self.next_hidden(embed_SD, states_SD)
                drafts.append(self._choose(self.logits(next_SD[-1:]), params, length - 1 + number))
                states_SD = torch.cat([states_SD, next_SD[-1:]])
                embed_SD = torch.cat([embed_SD, self.target.model.embed_tokens.weight[drafts[-1:]]])
        return drafts

    def _choose(self, logits: Tensor, params: SamplingParams, position: int) -> int:
        if params.is_greedy:
            return int(logits.argmax())
        assert params.seed is not None
        where = torch.tensor([params.seed]), torch.tensor([position])
        return int(draw_tokens_reference(logits / params.temperature, *where).token_ids_R)


def load_target(folder: Path) -> DecoderForCausalLM:
    model = load_model(ModelConfig.load(str(folder)), LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
    assert isinstance(model, DecoderForCausalLM)
    return model


def make(folder: Path, method: str) -> tuple[Path, dict[str, Any], Oracle]:
    """A target, the options that draft for it, and what must be drafted."""
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    if method == "mtp":
        target, weights = load_target(write_mimo(folder)), mtp_weights()
        oracle = Oracle(
            target,
            (2,),
            lambda _, aux: aux[0],
            lambda *args: mtp_hidden(weights, *args),
            logits_of(target),
        )
        return folder, options, oracle
    tiny_checkpoint(folder / "target", num_hidden_layers=5)
    target = load_target(folder / "target")
    options["model"] = str(folder / "head")
    if method == "eagle":
        weights = eagle_weights()
        write_head(folder / "head", weights)
        oracle = Oracle(
            target,
            (),
            lambda hidden, _: hidden,
            lambda *args: eagle_hidden(weights, *args),
            logits_of(target),
        )
        return folder / "target", options, oracle
    weights = eagle3_weights()
    write_head(folder / "head", weights, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    oracle = Oracle(
        target,
        (1, 2, 4),
        lambda _, aux: eagle3_fused(weights, aux),
        lambda *args: eagle3_hidden(weights, *args),
        lambda hidden: eagle3_logits(weights, hidden),
    )
    return folder / "target", options, oracle


class Watched:
    """An engine whose drafts are compared with the oracle's whenever it makes some."""

    def __init__(self, core: EngineCore, oracle: Oracle) -> None:
        self.core, self.num_compared = core, 0
        self._oracle = oracle
        self._requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.results: dict[str, Result] = {}
        take = core.scheduler.update_draft_token_ids

        def note(drafts: dict[str, list[int]]) -> None:
            self._noted = drafts
            take(drafts)

        self._noted: dict[str, list[int]] = {}
        core.scheduler.update_draft_token_ids = note  # type: ignore[method-assign]

    def add(self, req_id: str, prompt: list[int], params: SamplingParams) -> None:
        self._requests[req_id] = prompt, params
        add(self.core, req_id, prompt, params)

    def step(self) -> None:
        self._noted = {}
        for output in self.core.step():
            self.results.setdefault(output.req_id, Result()).take(output)
        for req_id, drafts in self._noted.items():
            prompt, params = self._requests[req_id]
            tokens = self.results[req_id].tokens
            assert params.max_tokens is not None
            # Those that the request may have before its last token; others are not verified.
            num_useful = max(0, min(NUM_DRAFTS, params.max_tokens - len(tokens) - 1))
            assert drafts[:num_useful] == self._oracle.drafts([*prompt, *tokens], params, num_useful)
            self.num_compared += num_useful

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()
        self.core.close()


def engine(folder: Path, options: dict[str, Any], **others: Any) -> EngineCore:
    sizes = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": 68, "async_scheduling": False}
    return make_core(folder, **{**sizes, **others}, speculative_config=options)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"fast_paths": "off"}, {"attention_backend": "cpu_paged"}],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_drafts_are_those_of_the_whole_text(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    folder, speculative, oracle = make(tmp_path, method)
    watched = Watched(engine(folder, speculative, **options), oracle)
    for index, prompt in enumerate(random_prompts((5, 21, 1, 13), VOCAB_SIZE, seed=3)):
        drawn = SamplingParams(temperature=0.8, seed=index, max_tokens=12, ignore_eos=True)
        watched.add(f"r{index}", prompt, greedy(12) if index % 2 else drawn)
    watched.finish()
    assert watched.num_compared > 60


@pytest.mark.one_path(reason="looks at what is recorded of models, which on the plain path is nothing")
@pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")
@pytest.mark.parametrize("method", METHODS)
def test_target_and_head_run_as_programs(tmp_path: Path, method: str) -> None:
    folder, speculative, oracle = make(tmp_path, method)
    core = engine(folder, speculative)
    watched = Watched(core, oracle)
    watched.add("r", random_prompts((21,), VOCAB_SIZE)[0], greedy(9))
    watched.step()
    assert core._engine is not None
    programs = core._engine.executor._wrapper.worker.runner.execution.programs._recorded  # type: ignore[attr-defined]
    assert len(programs) == 2
    assert None not in programs.values()
    watched.finish()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.each_value_quick
def test_without_programs_drafts_are_the_same(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer_by_layer(monkeypatch)
    folder, speculative, oracle = make(tmp_path, method)
    watched = Watched(engine(folder, speculative), oracle)
    watched.add("r", random_prompts((21,), VOCAB_SIZE)[0], greedy(25))
    watched.finish()
    assert watched.num_compared > 60


@pytest.mark.parametrize("method", METHODS)
def test_a_cached_prefix_is_the_drafters_too(tmp_path: Path, method: str) -> None:
    folder, speculative, oracle = make(tmp_path, method)
    watched = Watched(engine(folder, speculative), oracle)
    prompt = random_prompts((3 * BLOCK_SIZE + 2,), VOCAB_SIZE, seed=3)[0]
    watched.add("first", prompt, greedy(6))
    while watched.core.has_unfinished_requests():
        watched.step()
    # Another token follows the last of the blocks that both have in common.
    shared = prompt[: 2 * BLOCK_SIZE]
    for name, rest in {
        "same": prompt[2 * BLOCK_SIZE :],
        "other": [(prompt[2 * BLOCK_SIZE] + 1) % VOCAB_SIZE, 5],
    }.items():
        watched.add(name, [*shared, *rest], greedy(9))
    num_compared = watched.num_compared
    watched.finish()
    assert watched.num_compared > num_compared
    # Of the blocks that are found, all but the last are taken.
    assert watched.results["same"].num_cached_tokens == 2 * BLOCK_SIZE
    assert watched.results["other"].num_cached_tokens == BLOCK_SIZE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_a_preempted_request_drafts_as_if_nothing_had_been(tmp_path: Path, method: str) -> None:
    folder, speculative, oracle = make(tmp_path, method)
    num_layers = 3 if method == "mtp" else 6
    watched = Watched(engine(folder, speculative, kv_cache_memory_bytes=num_layers * 20 * BLOCK_SIZE * 256), oracle)
    for index, prompt in enumerate(random_prompts((15, 21, 13), VOCAB_SIZE, seed=3)):
        watched.add(f"r{index}", prompt, greedy(20))
    watched.finish()
    assert sum(result.num_preemptions for result in watched.results.values()) > 0
    assert watched.num_compared > 60


class Alone(Oracle):
    """A model that drafts by itself."""

    def drafts(self, tokens: Sequence[int], params: SamplingParams, num_drafts: int = NUM_DRAFTS) -> list[int]:
        known = list(tokens)
        with torch.inference_mode():
            for _ in range(num_drafts):
                context = plain_context(self.target, [len(known)])
                hidden_SD = self.target(torch.tensor(known, dtype=torch.int32), torch.arange(len(known)), context)
                known.append(self._choose(self.logits(hidden_SD[-1:]), params, len(known) - 1))
        return known[len(tokens) :]


def make_draft_model(folder: Path) -> tuple[Path, dict[str, Any], Oracle]:
    tiny_checkpoint(folder / "target", num_hidden_layers=5)
    tiny_checkpoint(folder / "drafter", "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    options: dict[str, Any] = {"method": "draft_model", "model": str(folder / "drafter")}
    drafter = load_target(folder / "drafter")
    oracle = Alone(
        drafter,
        (),
        lambda hidden, _: hidden,
        lambda _, hidden: hidden,
        logits_of(drafter),
    )
    return folder / "target", {**options, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}, oracle


def test_drafts_of_a_draft_model_are_its_own_choices(tmp_path: Path) -> None:
    folder, speculative, oracle = make_draft_model(tmp_path)
    watched = Watched(engine(folder, speculative, max_num_batched_tokens=7), oracle)
    for index, prompt in enumerate(random_prompts((5, 21, 1, 13), VOCAB_SIZE, seed=3)):
        drawn = SamplingParams(temperature=0.8, seed=index, max_tokens=12, ignore_eos=True)
        watched.add(f"r{index}", prompt, greedy(12) if index % 2 else drawn)
    watched.finish()
    assert watched.num_compared > 60


@pytest.mark.parametrize("most_waiting", [5, 256])
@pytest.mark.parametrize("method", [*METHODS, "draft_model"])
@pytest.mark.one_case_quick
def test_steps_after_which_no_request_wants_drafts_are_not_lost(
    tmp_path: Path, method: str, most_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_wanted = True

    def plan(budget: DraftBudget, step_id: int, requests: object) -> int:
        budget.num_steps_planned = 7 - step_id % 7
        return NUM_DRAFTS if are_wanted and step_id % 7 == 0 else 0

    monkeypatch.setattr(DraftBudget, "plan", plan)
    for module in (draft_model, drafting_head):
        monkeypatch.setattr(module, "MOST_WAITING", most_waiting)
    folder, speculative, oracle = make_draft_model(tmp_path) if method == "draft_model" else make(tmp_path, method)
    watched = Watched(engine(folder, speculative), oracle)
    prompts = random_prompts((5, 21, 13), VOCAB_SIZE, seed=3)
    for index, (prompt, length) in enumerate(zip(prompts, (40, 26, 33), strict=True)):
        watched.add(f"r{index}", prompt, greedy(length))
    while watched.core.has_unfinished_requests():
        watched.step()
        are_wanted = watched.num_compared <= 20
    assert not are_wanted
    are_wanted = True
    # Blocks filled while no drafts were wanted are cached prefixes like any other.
    for index, prompt in enumerate(prompts):
        watched.add(f"again{index}", [*prompt, *watched.results[f"r{index}"].tokens, 5], greedy(9))
    num_compared = watched.num_compared
    watched.finish()
    assert watched.num_compared > num_compared
    for index, prompt in enumerate(prompts):
        assert watched.results[f"again{index}"].num_cached_tokens > len(prompt) + BLOCK_SIZE


@pytest.mark.one_path(reason="counts what only fast paths do")
@pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")
@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_no_request_asks_leaves_a_step_one_call(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(budget: DraftBudget, step_id: int, requests: object) -> int:
        budget.num_steps_planned = 100
        return 0

    monkeypatch.setattr(DraftBudget, "plan", plan)
    calls = []
    run = BoundChoices.run
    monkeypatch.setattr(BoundChoices, "run", lambda bound: calls.append(len(bound.states)) or run(bound))
    folder, speculative, oracle = make(tmp_path, method)
    watched = Watched(engine(folder, speculative), oracle)
    watched.add("r", random_prompts((21,), VOCAB_SIZE)[0], greedy(40))
    watched.finish()
    # But for the prompt, and the first steps after it.
    assert len(calls) > 30
    assert set(calls) == {1 + len(oracle.layers)}
