"""Factory of speculators, by the method of `SpeculativeConfig`."""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.config.speculative import MODEL_METHODS
from penstock.device import Device
from penstock.models.causal_lm import CausalLM
from penstock.models.draft_head import DraftHead
from penstock.runner.sampling.verification import create_verification
from penstock.runner.speculative.draft_model import DraftModel
from penstock.runner.speculative.drafting_head import DraftingHead
from penstock.runner.speculative.ngram import NgramOnDevice, NgramOnHost
from penstock.runner.speculative.speculator import NO_SPECULATOR, ReceivedDrafts, Speculator
from penstock.runner.speculative.suffix import SuffixSpeculator


def create_speculator(
    config: SpeculativeConfig,
    device: Device,
    vocab_size: int,
    drafter: CausalLM | None = None,
    aux_layers: tuple[int, ...] = (),
) -> Speculator:
    """Create the speculator of the configured method.

    drafter: the loaded draft model, of a method that has one; None on a pipeline stage before the last, which receives
    the drafts and records the target's `aux_layers`.
    """
    if config.method is None:
        return NO_SPECULATOR
    speculator: Speculator
    if drafter is not None:
        speculator = _with_model(drafter, config, vocab_size, device)
    elif config.method in MODEL_METHODS:
        speculator = ReceivedDrafts(config, aux_layers)
    else:
        speculator = _without_model(config, device)
    speculator.verification = create_verification(config, device)
    return speculator


def _with_model(drafter: CausalLM, config: SpeculativeConfig, vocab_size: int, device: Device) -> Speculator:
    if isinstance(drafter, DraftHead):
        return DraftingHead(drafter, config, vocab_size, device)
    return DraftModel(drafter, config, vocab_size, device)


def _without_model(config: SpeculativeConfig, device: Device) -> Speculator:
    if config.method == "ngram":
        return NgramOnHost(config) if device.kind == "cpu" else NgramOnDevice(config, device)
    assert config.method == "suffix", "other methods have a draft model"
    return SuffixSpeculator(config)
