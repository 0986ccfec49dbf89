"""Output heads: what an engine makes of a step's hidden states, one file per kind."""

from penstock.runner.output_heads.base import HeadParts, OutputHead
from penstock.runner.output_heads.pooling import PoolingHead
from penstock.runner.output_heads.registry import create_output_head, register_output_head

__all__ = ["HeadParts", "OutputHead", "PoolingHead", "create_output_head", "register_output_head"]
