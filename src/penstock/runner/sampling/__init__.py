"""Sampling: logits transforms, one per file, and the draw."""

from penstock.runner.sampling.logits_processor import LogitsProcessor, ProcessorContext
from penstock.runner.sampling.prompt_logprobs import PromptLogprobs
from penstock.runner.sampling.sampler import Sampler, SamplerOutput
from penstock.step.logits_rows import LogitsRows

__all__ = ["LogitsProcessor", "LogitsRows", "ProcessorContext", "PromptLogprobs", "Sampler", "SamplerOutput"]
