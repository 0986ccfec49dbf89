"""Quantised linear layers: int8 and int4 weights."""
