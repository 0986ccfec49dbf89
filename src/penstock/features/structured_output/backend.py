"""Grammar backend of an engine: llguidance for its tokenizer, and the markers of its reasoning."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.config.reasoning import HARMONY, REASONING_PARSERS, ReasoningMarkers
from penstock.errors import UnsupportedFeature
from penstock.structured.backend import GrammarBackend
from penstock.structured.harmony import HarmonyBackend
from penstock.structured.harmony_messages import HarmonyTokens
from penstock.structured.llguidance_backend import LLGuidanceBackend
from penstock.structured.reasoning import ReasoningBackend, reasoning_tokens
from penstock.structured.schema_narrowing import DefaultBounds
from penstock.text.tokenizer import load_tokenizer


def backend_of(model: ModelConfig, reasoning: ReasoningMarkers | None) -> GrammarBackend:
    """Create the backend of a model's tokenizer.

    reasoning: markers of the reasoning part, after which constraints begin; None if they begin with the output.
    """
    tokenizer = load_tokenizer(model.tokenizer_folder)
    as_json = tokenizer.as_json()
    if as_json is None:
        raise UnsupportedFeature("The model's tokenizer has no fast version, which structured outputs need.")
    eos_token_ids = model.eos_token_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
    backend = LLGuidanceBackend(as_json, model.vocab_size, eos_token_ids, DefaultBounds.within(model.planned_context))
    if reasoning is None:
        return backend
    if reasoning == REASONING_PARSERS[HARMONY]:
        return HarmonyBackend(backend, HarmonyTokens.of(tokenizer), model.vocab_size, eos_token_ids)
    return ReasoningBackend(backend, reasoning_tokens(tokenizer, reasoning), model.vocab_size, eos_token_ids)
