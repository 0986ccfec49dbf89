"""Custom logits processors: inputs, order, and isolation of failures to their requests."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import LLM, RequestOutput, SamplingParams
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.session import Session
from penstock.errors import ConfigError, InvalidParameter, LogitsProcessorError, RemoteError
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from penstock.runner.sampling import load_processors as loading
from penstock.runner.sampling.failures import Failure
from penstock.scheduler.outputs import FinishReason
from support.checkpoints import tiny_checkpoint
from support.engines import make_core, random_prompts, run
from support.plain_sampling import VOCAB_SIZE, HandDriven, random_logits

DEMO = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4}


class Force(LogitsProcessor):
    """Forces the token that a request names."""

    name = "force"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.tokens = np.zeros(context.num_slots, dtype=np.int64)
        self.removed: list[int] = []
        self.seen: list[list[int]] = []

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        token = (params.extra_args or {}).get(self.name)
        if token is not None:
            self.tokens[slot] = token
        return token is not None

    def remove_request(self, slot: int) -> None:
        self.removed.append(slot)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        self.seen.append(rows.slots_np.tolist())
        assert torch.equal(rows.slots, torch.from_numpy(rows.slots_np))
        logits.fill_(-1.0)
        logits[range(len(logits)), self.tokens[rows.slots_np]] = 9.0
        return logits


class Everywhere(LogitsProcessor):
    """Masks a token for every request."""

    name = "everywhere"
    forbidden: ClassVar[int] = 3

    def add_request(self, *request: Any) -> bool:
        return True

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        logits[:, self.forbidden] = -torch.inf
        return logits


class Fragile(Force):
    """Corrupts the logits and raises for requests that ask for it."""

    name = "fragile"
    when: ClassVar[str] = "apply"

    def add_request(self, slot: int, params: SamplingParams, *tokens: Any) -> bool:
        wanted = super().add_request(slot, params, *tokens)
        if wanted and self.when == "add_request" and self.tokens[slot] < 0:
            raise KeyError("bad request")
        return wanted

    def is_needed(self, slots: np.ndarray) -> bool:
        if self.when == "is_needed" and (self.tokens[slots] < 0).any():
            raise KeyError("bad slots")
        return True

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        is_bad = bool((self.tokens[rows.slots_np] < 0).any())
        logits.fill_(-torch.inf) if is_bad else None
        if is_bad and self.when == "shape":
            return logits[:, :-1]
        if is_bad and self.when == "apply":
            raise KeyError("bad row")
        return super().apply(logits, rows)


def asking(name: str, token: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "seed": 0, "extra_args": {name: token}, **fields})


def plain(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "seed": 0, **fields})


def processor_of(driver: HandDriven, kind: type) -> Any:
    return next(one for one in driver.sampler._custom._processors if isinstance(one, kind))


def test_a_processor_sees_the_rows_of_its_requests_only_by_slot() -> None:
    driver = HandDriven(logits_processors=(Force,))
    driver.add(4, asking("force", 11), [5])
    driver.add(2, plain(), [5])
    driver.add(9, asking("force", 12, temperature=1.0), [5])
    logits = random_logits(3, 0)
    best = int(logits[1].argmax())
    assert driver.step([9, 2, 4], logits).sampled_token_ids.tolist() == [12, best, 11]
    driver.step([2], random_logits(1, 0))
    driver.remove(4)
    driver.remove(2)
    force = processor_of(driver, Force)
    assert force.seen == [[9, 4]]
    assert force.removed == [4]


def test_processors_come_after_penalties_and_before_temperature() -> None:
    driver = HandDriven(logits_processors=(Everywhere,), logprobs_mode="processed_logits", max_logprobs=-1)
    driver.add(0, plain(temperature=0.5, logit_bias={3: 100.0, 4: 2.0}, logprobs=-1), [5])
    logits = random_logits(1, 0)
    result = driver.step([0], logits).logprobs
    assert result is not None
    found = dict(zip(result.token_ids_RN[0].tolist(), result.logprobs_RN[0].tolist(), strict=True))
    assert found[3] == -np.inf
    assert found[4] == pytest.approx((float(logits[0, 4]) + 2.0) / 0.5)


@pytest.mark.parametrize("max_rows", [2, 5])
@pytest.mark.parametrize("when", ["apply", "shape", "is_needed"])
def test_a_processor_that_raises_fails_the_rows_that_make_it_raise(
    when: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "when", when)
    driver = HandDriven(logits_processors=(Fragile,))
    driver.sampler.max_rows = max_rows
    for slot, token in enumerate([11, -1, 12, -1]):
        driver.add(slot, asking("fragile", token), [5])
    driver.add(4, plain(), [5])
    logits = random_logits(5, 0)
    result = driver.step(range(5), logits)
    assert sorted(result.errors) == [1, 3]
    assert all("Logits processor 'fragile' failed in apply" in error for error in result.errors.values())
    tokens = result.sampled_token_ids.tolist()
    assert [tokens[0], tokens[2], tokens[4]] == [11, 12, int(logits[4].argmax())]
    assert driver.step([0, 2], logits[:2]).errors == {}


def test_a_processor_that_raises_for_a_new_request_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragile, "when", "add_request")
    driver = HandDriven(logits_processors=(Fragile,))
    with pytest.raises(LogitsProcessorError, match="'fragile' failed in add_request: KeyError: 'bad request'"):
        driver.add(0, asking("fragile", -1), [5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


@pytest.mark.parametrize("when", ["apply", "add_request", "is_needed", "shape"])
def test_in_an_engine_the_request_ends_and_the_others_go_on(
    folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "when", when)
    core: EngineCore = make_core(folder, logits_processors=[f"{__name__}:Fragile"], async_scheduling=True)
    prompts = random_prompts([5, 9, 3], 97)
    params = [asking("fragile", token, max_tokens=4, ignore_eos=True) for token in (20, -1, 30)]
    for _ in range(2):
        good, bad, other = run(core, prompts, params)
        assert (good.tokens, other.tokens) == ([20] * 4, [30] * 4)
        assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
        assert bad.error is not None
        assert "Logits processor 'fragile' failed in" in bad.error
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


class Nameless(Force):
    name = ""


class Namesake(Everywhere):
    name = "force"


class Unmakable(Force):
    name = "unmakable"

    def __init__(self, context: Any) -> None:
        raise OSError("no such table")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere:Processor"], "'nowhere:Processor', which cannot be loaded: ModuleNotFoundError"),
        ([f"{__name__}:Missing"], "Missing', which cannot be loaded: AttributeError"),
        (["NoColon"], "'NoColon', which cannot be loaded.*'my_package.my_module:MyProcessor'"),
        (["pathlib:Path"], "'pathlib:Path', which is not a LogitsProcessor"),
        ([int], "<class 'int'>, which is not a LogitsProcessor"),
        ([Nameless], "Nameless has name=''"),
        ([Force, Namesake], "Two logits processors have the name 'force'"),
        ([Unmakable], "'unmakable' cannot be made: OSError: no such table"),
        ([5], r"logits_processors=\[5\] is not valid"),
        ({"force": 1}, "logits_processors={'force': 1} is not valid"),
    ],
    ids=str,
)
def test_what_is_no_processor_stops_the_engine_at_its_start(folder: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(folder, logits_processors=given)


class _EntryPoint:
    name, value = "installed", "package:Everywhere"

    def load(self) -> type:
        return Everywhere


@pytest.mark.parametrize(("plugins", "is_there"), [(None, True), ("installed", True), ("", False)])
def test_installed_packages_bring_processors(
    plugins: str | None, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plugins is not None:
        monkeypatch.setenv("PENSTOCK_PLUGINS", plugins)
    monkeypatch.setattr(loading, "entry_points", lambda group: [_EntryPoint()] if group == loading.GROUP else [])
    names = [one.name for one in loading.load_logits_processors([Force])]
    assert names == (["everywhere"] if is_there else []) + ["force", "thinking_budget"]


def _example() -> str:
    page = (Path(__file__).parents[2] / "docs" / "logits_processors.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]


@pytest.fixture
def no_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module of the page's example."""
    (tmp_path / "no_repeat.py").write_text(_example())
    monkeypatch.syspath_prepend(tmp_path)
    yield "no_repeat:NoRepeat"
    sys.modules.pop("no_repeat", None)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_pages_example_does_what_it_says(no_repeat: str, async_scheduling: bool) -> None:
    with LLM("demo", logits_processors=[no_repeat], async_scheduling=async_scheduling, **DEMO) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args={"no_repeat": 5})
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        held, other = llm.generate(["ROMEO: la la la la", "ROMEO: la la la la"], [params, free], use_tqdm=False)
        alone = llm.generate("ROMEO: la la la la", free, use_tqdm=False)[0]
        tokens = [*held.prompt_token_ids, *held.outputs[0].token_ids]
        for position in range(len(held.prompt_token_ids), len(tokens)):
            assert tokens[position] not in tokens[position - 5 : position]
        assert other.outputs[0].token_ids == alone.outputs[0].token_ids != held.outputs[0].token_ids
        refusals: list[tuple[Callable[[], object], str]] = [
            (lambda: SamplingParams(extra_args={"no_repeat": 0}), "'no_repeat' refuses the request: no_repeat=0"),
            (lambda: SamplingParams(extra_args={"no_repaet": 5}), "extra_args has 'no_repaet'.*Allowed: no_repeat"),
        ]
        for make, message in refusals:
            with pytest.raises(InvalidParameter, match=message):
                llm.generate("x", make(), use_tqdm=False)


def test_a_thinking_budget_is_a_field_like_others() -> None:
    with LLM("demo", reasoning_start_str="ROMEO:", reasoning_end_str="JULIET:", **DEMO) as llm:
        encode = llm.get_tokenizer().encode
        start, end = (encode(text, add_special_tokens=False) for text in ("ROMEO:", "JULIET:"))
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, thinking_token_budget=6)
        output = llm.generate({"prompt_token_ids": [5, *start]}, params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids[6 : 6 + len(end)] == end
        free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        other = llm.generate({"prompt_token_ids": [5, *start]}, free, use_tqdm=False)[0].outputs[0]
        assert other.token_ids[:6] == output.token_ids[:6]
        assert other.token_ids != output.token_ids


def test_the_vocabulary_of_a_processor_is_the_logits(folder: Path) -> None:
    driver = HandDriven(logits_processors=(Force,))
    context = processor_of(driver, Force).context
    assert (context.vocab_size, context.num_slots) == (VOCAB_SIZE, 20)
    assert context.token_ids is driver.token_ids


class Quits(Force):
    """Raises the exception that a request names in the method that it names, or returns undrawable logits."""

    name = "quits"
    kinds: ClassVar[dict[str, type[BaseException]]] = {
        kind.__name__: kind for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
    }

    def add_request(self, slot: int, params: SamplingParams, *tokens: Any) -> bool:
        wanted = (params.extra_args or {}).get(self.name)
        if wanted is None:
            return False
        self.kind = self.kinds[wanted[1]]
        if wanted[0] == "add_request":
            raise self.kind("enough")
        return True

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        raise self.kind("enough")


QUITS = f"{__name__}:Quits"
FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def quitting(kind: str, when: str = "apply") -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, extra_args={"quits": [when, kind]})


@pytest.mark.parametrize("when", ["apply", "add_request"])
@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_what_is_for_the_program_reaches_it_and_the_engine_goes_on(kind: str, when: str) -> None:
    with LLM("demo", logits_processors=[QUITS], max_restarts=1, **DEMO) as llm:
        whole = llm.generate("ROMEO:", FOUR, use_tqdm=False)[0].outputs[0].token_ids
        for _ in range(3):  # more often than workers may fail
            with pytest.raises(Quits.kinds[kind], match="enough"):
                llm.generate(["ROMEO:", "x"], [FOUR, quitting(kind, when)], use_tqdm=False)
        assert llm.generate("ROMEO:", FOUR, use_tqdm=False)[0].outputs[0].token_ids == whole


@pytest.mark.parametrize("when", ["apply", "add_request"])
@pytest.mark.parametrize("kind", ["GeneratorExit", "CancelledError"])
def test_what_is_no_errors_kind_ends_its_request_alone(kind: str, when: str) -> None:
    with LLM("demo", logits_processors=[QUITS], **DEMO) as llm:
        whole = llm.generate("ROMEO:", FOUR, use_tqdm=False)[0].outputs[0].token_ids
        good, bad = llm.generate(["ROMEO:", "x"], [FOUR, quitting(kind, when)], use_tqdm=False)
    assert good.outputs[0].token_ids == whole
    assert bad.error is not None
    assert f"'quits' failed in {when}: {kind}: enough" in bad.error


@pytest.mark.parametrize("when", ["apply", "add_request"])
@pytest.mark.parametrize("kind", list(Quits.kinds))
def test_in_a_thread_of_the_engines_nothing_is_for_the_program(kind: str, when: str) -> None:
    async def both(engine: AsyncEngine) -> list[RequestOutput]:
        async def last(prompt: str, params: SamplingParams) -> RequestOutput:
            return [output async for output in engine.generate(prompt, params)][-1]

        return await asyncio.gather(last("ROMEO:", FOUR), last("x", quitting(kind, when)))

    engine = AsyncEngine("demo", logits_processors=[QUITS], enable_multiprocessing=False, **DEMO)
    try:
        good, bad = asyncio.run(both(engine))
        again, _ = asyncio.run(both(engine))
    finally:
        engine.shutdown()
    assert good.outputs[0].token_ids == again.outputs[0].token_ids
    assert len(good.outputs[0].token_ids) == 4
    assert bad.error is not None
    assert f"'quits' failed in {when}: {kind}: enough" in bad.error


@pytest.mark.slow
def test_in_a_process_of_the_engines_nothing_is_for_the_program() -> None:
    config = EngineConfig.create("demo", logits_processors=(QUITS,), enable_multiprocessing=True, **DEMO)
    with closing(Session(config)) as session:
        for kind in Quits.kinds:
            requests = [session.accept("ROMEO:", FOUR), session.accept("x", quitting(kind))]
            ended = {progress.req_id: progress.output() for progress in session.run(requests) if progress.finished}
            good, bad = (ended[accepted.request.req_id] for accepted in requests)
            assert len(good.outputs[0].token_ids) == 4
            assert bad.error is not None
            assert f"'quits' failed in apply: {kind}: enough" in bad.error
            with pytest.raises(RemoteError, match=f"{kind}: enough"):
                session.collective_rpc(RpcCall(quit_with, (kind,)))


def quit_with(_worker: Any, kind: str) -> None:
    raise Quits.kinds[kind]("enough")


class Spoils(LogitsProcessor):
    """Returns undrawable logits for requests that ask for it."""

    name = "spoils"

    def add_request(self, slot: int, params: SamplingParams, *tokens: Any) -> bool:
        wanted = (params.extra_args or {}).get(self.name)
        if wanted is not None:
            self.value = float(wanted)
        return wanted is not None

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return logits.fill_(self.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_who_leaves_nothing_to_draw_from_is_named(value: str) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=4, ignore_eos=True, extra_args={"spoils": value})
    with LLM("demo", logits_processors=[Everywhere, Spoils], **DEMO) as llm:
        good, bad, other = llm.generate(["ROMEO:"] * 3, [FOUR, params, FOUR], use_tqdm=False)
        assert good.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(good.outputs[0].token_ids) == 4
        assert bad.outputs[0].finish_reason == "error"
        assert bad.error is not None
        assert "Logits processor 'spoils' (Spoils) left no token" in bad.error


def test_the_models_own_nan_is_not_blamed_on_a_processor() -> None:
    driver = HandDriven(logits_processors=(Spoils,))
    for slot in range(4):
        driver.add(slot, asking("spoils", "nan") if slot % 2 == 0 else plain(), [5])
    logits = random_logits(4, 0)
    logits[2:, 7] = torch.nan
    assert driver.step(range(4), logits).failures.tolist() == [Failure.NOTHING_LEFT + 1, 0, 1, 1]


def test_the_parameters_are_blamed_where_they_left_nothing_before() -> None:
    driver = HandDriven(logits_processors=(Spoils,))
    driver.add(0, asking("spoils", "nan", allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2), [5])
    assert driver.step([0], random_logits(1, 0)).failures.tolist() == [Failure.NOTHING_LEFT]
