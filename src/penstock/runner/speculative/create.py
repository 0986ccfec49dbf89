"""From the method of `SpeculativeConfig` to a speculator."""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.device import Device
from penstock.errors import UnsupportedFeature
from penstock.models.causal_lm import CausalLM
from penstock.models.draft_head import DraftHead
from penstock.runner.speculative.model_drafter import DraftingHead, DraftModel
from penstock.runner.speculative.ngram import NgramOnDevice, NgramOnHost
from penstock.runner.speculative.speculator import NO_SPECULATOR, Speculator
from penstock.runner.speculative.suffix import SuffixSpeculator
from penstock.runner.speculative.verification import create_verification


def create_speculator(config: SpeculativeConfig, device: Device, drafter: CausalLM | None = None) -> Speculator:
    """The speculator that the options ask for. drafter: the model, loaded, of a method that has one.

    Raises UnsupportedFeature for what is not there.
    """
    if isinstance(drafter, DraftHead):
        return DraftingHead(drafter, config.num_speculative_tokens, device)
    if drafter is not None:
        return DraftModel(drafter, config.num_speculative_tokens, device)
    if config.method is None:
        return NO_SPECULATOR
    speculator = _create(config, device)
    speculator.verification = create_verification(config, device)
    return speculator


def _create(config: SpeculativeConfig, device: Device) -> Speculator:
    if config.method == "ngram":
        return NgramOnHost(config) if device.kind == "cpu" else NgramOnDevice(config, device)
    if config.method == "suffix":
        if device.kind != "cpu":
            raise UnsupportedFeature(
                "speculative_config: the method 'suffix' reads tokens on the host, which the device "
                f"{device.kind!r} does not show in time. Use the method 'ngram'."
            )
        return SuffixSpeculator(config)
    raise UnsupportedFeature(
        f"speculative_config: the method {config.method!r} is not supported yet. Use 'ngram' or 'suffix'."
    )
