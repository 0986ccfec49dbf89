"""From logits to tokens, one file per stage."""

from penstock.runner.sampling.prompt_logprobs import PromptLogprobs
from penstock.runner.sampling.sampler import Sampler, SamplerOutput

__all__ = ["PromptLogprobs", "Sampler", "SamplerOutput"]
