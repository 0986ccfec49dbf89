"""The sampler's stages together: each request as if it were alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import DeviceConfig
from penstock.contract import SamplingParams
from penstock.device import create_device
from penstock.kernels.random import counter_uniform
from penstock.runner.sampling import Sampler, SamplerOutput
from penstock.runner.sampling.stage import LogitsRows

DEVICE = create_device(DeviceConfig(device="cpu"))
VOCAB_SIZE = 60

_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 59, 60, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


def _sample(
    params: list[SamplingParams], slots: list[int], logits: torch.Tensor, positions: list[int]
) -> SamplerOutput:
    sampler = Sampler(DEVICE, 20, VOCAB_SIZE)
    for slot, each in zip(slots, params, strict=True):
        sampler.add_request(slot, each)
    return sampler.sample(logits, LogitsRows(torch.tensor(slots), np.array(slots), torch.tensor(positions)))


def _restated(params: SamplingParams, logits: np.ndarray, position: int) -> int:
    """The token by plain numpy in float64."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = (logits / np.float32(params.temperature)).astype(np.float64)
    scaled[scaled < scaled.max() + (np.log(params.min_p) if params.min_p else -np.inf)] = -np.inf
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[::-1][params.top_k - 1]] = -np.inf
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass_before = np.cumsum(probs[order]) - probs[order]
        weakest = probs[order][mass_before < params.top_p].min()
        probs[probs < weakest] = 0
    cumulative = np.cumsum(probs)
    assert params.seed is not None
    uniform = counter_uniform(torch.tensor([params.seed]), torch.tensor([position])).item()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


@settings(max_examples=150, deadline=None)
@given(params=st.lists(_params, min_size=1, max_size=12), seed=st.integers(0, 1000), data=st.data())
def test_each_row_equals_a_restatement_whatever_shares_the_batch(
    params: list[SamplingParams], seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB_SIZE, generator=generator) * 2
    before = logits.clone()
    slots = data.draw(st.permutations(range(20)))[: len(params)]
    positions = [3 * row for row in range(len(params))]
    together = _sample(params, slots, logits, positions)
    assert torch.equal(logits, before), "the raw logits must survive for the log-probabilities"
    for row, each in enumerate(params):
        alone = _sample([each], [slots[row]], logits[row : row + 1], [positions[row]])
        token = int(together.sampled_token_ids[row])
        assert token == int(alone.sampled_token_ids[0])
        assert token == _restated(each, logits[row].numpy(), positions[row])


def test_a_slot_forgets_its_last_owner() -> None:
    sampler = Sampler(DEVICE, 4, VOCAB_SIZE)
    logits = torch.randn(1, VOCAB_SIZE)
    rows = LogitsRows(torch.tensor([2]), np.array([2]), torch.tensor([5]))
    sampler.add_request(2, SamplingParams(temperature=1.5, top_k=3, top_p=0.5, min_p=0.2, seed=4, logprobs=7))
    assert sampler.sample(logits, rows).logprobs is not None
    sampler.add_request(2, SamplingParams(temperature=0.0, seed=0))
    result = sampler.sample(logits, rows)
    assert result.logprobs is None
    assert int(result.sampled_token_ids[0]) == int(logits.argmax())


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    params = SamplingParams(temperature=0.5, top_k=2, seed=1, logprobs=4)
    result = _sample([params, params], [0, 1], logits, [0, 0]).logprobs
    assert result is not None
    expected = torch.log_softmax(logits, dim=-1)
    assert torch.allclose(result.logprobs_RN, expected.gather(-1, result.token_ids_RN), atol=1e-5)
