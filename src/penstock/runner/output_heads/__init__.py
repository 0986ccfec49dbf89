"""Output heads: from a step's hidden states to its results, one file per kind."""

from penstock.runner.output_heads.base import HeadParts, OutputHead
from penstock.runner.output_heads.pooling import PoolingHead
from penstock.runner.output_heads.registry import create_output_head, register_output_head

__all__ = ["HeadParts", "OutputHead", "PoolingHead", "create_output_head", "register_output_head"]
