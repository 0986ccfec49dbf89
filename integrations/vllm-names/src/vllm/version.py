"""Version of vLLM whose names these are, by which programs choose their calls."""

__version__ = "0.31.0+penstock"
__version_tuple__ = (0, 31, 0, "penstock")
