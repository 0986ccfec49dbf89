"""How ranks are arranged and talk to each other."""

from penstock.parallel.context import ParallelContext

__all__ = ["ParallelContext"]
