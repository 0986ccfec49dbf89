"""Models that pool: a backbone of any family, and the layers after pooling."""

from penstock.models.pooling.model import PoolingModel

__all__ = ["PoolingModel"]
