"""Model states: embeddings, positions of another shape, and further step inputs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT, ForwardContext
from penstock.config import DeviceConfig, LoadConfig
from penstock.contract import SamplingParams
from penstock.device import create_device
from penstock.errors import RanksDisagree
from penstock.loader.loader import load_model
from penstock.models.attention_layers import cache_layers, kv_cache_specs
from penstock.models.interface import ModelInputs
from penstock.parallel import GroupAgreement, ParallelState
from penstock.runner.dummy_runs import run_dummy_batch, run_longest_prompt
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.runner.model_states import DecoderModelState, ModelState
from penstock.scheduler.kv_cache_plan import group_layers, make_kv_cache_config
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.ranks import contexts, run_ranks
from support.runners import Driver, new_request

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


class FromEmbeddings(nn.Module):
    """A decoder that takes embeddings, three rows of positions, and a factor per token."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.calls: list[tuple[int, ...]] = []

    def forward(self, embeddings_TD: Tensor, positions_3T: Tensor, context: ForwardContext) -> Tensor:
        assert positions_3T.shape == (3, len(embeddings_TD))
        self.calls.append(tuple(embeddings_TD.shape))
        model = self.decoder.model
        factors_T = context.of_all_tokens().input("factors")
        assert factors_T is not None, "its state makes them in every step"
        hidden_TD, residual_TD = embeddings_TD * factors_T.unsqueeze(-1), None
        rotations = model.rotations(positions_3T[1] - 100, hidden_TD.dtype)
        for layer, rotation, of_layer in zip(model.layers, rotations, context.by_layer(len(model.layers)), strict=True):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotation, of_layer)
        return model.norm.add_and_norm(hidden_TD, residual_TD)[0]  # type: ignore[no-any-return]

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return self.decoder.compute_logits(hidden_LD, context)  # type: ignore[no-any-return]

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> None:
        return None


class EmbeddingState(ModelState):
    """Its positions are not those of the sequence: they begin at 100."""

    def __init__(self, embed: nn.Module) -> None:
        self._embed = embed

    def inputs(self, batch: InputBatch) -> ModelInputs:
        return self.dummy_inputs(batch.input_ids, batch.positions)

    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        factors_T = torch.ones(len(input_ids_T))
        return ModelInputs(
            self._embed(input_ids_T, NO_CONTEXT), (positions_T + 100).expand(3, -1), {"factors": factors_T}
        )


def make_runner(model: Any, decoder: nn.Module, **options: Any) -> ModelRunner:
    device = create_device(DeviceConfig(device="cpu", num_threads=1))
    config = make_kv_cache_config(group_layers(kv_cache_specs(decoder, 4, "float32")), [32])
    limits = RunnerLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=64, vocab_size=VOCAB_SIZE)
    return ModelRunner(device, model, cache_layers(decoder), config, limits, **options)


@pytest.fixture
def decoder(tmp_path: Path) -> Any:
    config = tiny_checkpoint(tmp_path)
    quiet = LoadConfig(use_tqdm_on_load=False)
    return load_model(config, quiet, ParallelState(), torch.device("cpu"), torch.float32)


def tokens_of(runner: ModelRunner, temperature: float) -> dict[str, list[int]]:
    driver = Driver(runner)
    tokens: dict[str, list[int]] = {"a": [], "b": []}

    def take(step: dict[str, list[int]]) -> None:
        for req_id, sampled in step.items():
            tokens[req_id] += sampled

    def request(req_id: str, prompt: list[int], first_block: int) -> Any:
        params = SamplingParams(temperature=temperature, seed=11)
        return new_request(req_id, prompt, first_block=first_block, num_blocks=8, params=params)

    with torch.no_grad():
        take(driver.tokens({"a": 5}, [request("a", PROMPT, 1)]))
        take(driver.tokens({"a": 3, "b": 4}, [request("b", PROMPT[4:], 9)]))
        for number in range(8):
            take(driver.tokens({"a": 1, "b": 1}, repeats=number > 0))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_embeddings_and_rows_of_positions_give_the_tokens_of_plain_inputs(decoder: Any, temperature: float) -> None:
    model = FromEmbeddings(decoder)
    state = EmbeddingState(decoder.model.embed_tokens)
    ours = tokens_of(make_runner(model, decoder, model_state=state), temperature)
    plain = tokens_of(make_runner(decoder, decoder), temperature)
    assert ours == plain
    assert sum(map(len, plain.values())) == 18
    # Every step ran the model's own code: there is no program of such inputs.
    assert len(model.calls) == 10


def test_runs_that_serve_no_request_have_inputs_of_the_same_kind(decoder: Any) -> None:
    model = FromEmbeddings(decoder)
    runner = make_runner(model, decoder, model_state=EmbeddingState(decoder.model.embed_tokens))
    with torch.no_grad():
        run_dummy_batch(runner, num_tokens=3, num_reqs=2)
        assert run_longest_prompt(runner, 10).shape == (10, 64)
    assert model.calls == [(3, 64), (10, 64)]


def test_plain_inputs_are_the_batch_s_own(decoder: Any) -> None:
    runner = make_runner(decoder, decoder)
    assert isinstance(runner.model_state, DecoderModelState)
    seen: list[tuple[InputBatch, ModelInputs]] = []
    fill = runner.frames.fill

    def note(frame: Frame) -> bool:
        has_tokens = fill(frame)
        seen.append((frame.batch, frame.inputs))
        return has_tokens

    runner.frames.fill = note  # type: ignore[method-assign]
    tokens_of(runner, 0.0)
    assert all(inputs.tokens is batch.input_ids and inputs.positions is batch.positions for batch, inputs in seen)
    pairs = list(itertools.pairwise(seen))
    assert all((inputs is before) == (batch is previous) for (previous, before), (batch, inputs) in pairs)
    assert sum(batch is previous for (previous, _), (batch, _) in pairs) >= 5


def test_ranks_that_are_given_different_steps_find_out_before_they_run_them(decoder: Any) -> None:
    agreements = [GroupAgreement(parallel.tensor) for parallel in contexts(2)]
    drivers = [Driver(make_runner(decoder, decoder, agreement=agreement)) for agreement in agreements]

    def run(rank: int, counts: dict[str, int]) -> Any:
        new = [new_request("a", PROMPT)] if "a" not in drivers[rank].computed else []
        return drivers[rank].tokens(counts, new)

    first = run_ranks(2, lambda rank: run(rank, {"a": 8}))
    assert first[0] == first[1]
    assert not isinstance(first[0], BaseException)
    for error in run_ranks(2, lambda rank: run(rank, {"a": 1 + rank})):
        assert isinstance(error, RanksDisagree)
        assert "Step 2: rank 1 runs step 2 with 2 tokens" in str(error)
