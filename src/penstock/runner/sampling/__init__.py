"""Sampling: logits transforms, one per file, and the draw."""

from penstock.runner.logits_rows import LogitsRows
from penstock.runner.sampling.logits_processor import LogitsProcessor, ProcessorContext
from penstock.runner.sampling.prompt_logprobs import PromptLogprobs
from penstock.runner.sampling.sampler import Sampler, SamplerOutput

__all__ = ["LogitsProcessor", "LogitsRows", "ProcessorContext", "PromptLogprobs", "Sampler", "SamplerOutput"]
